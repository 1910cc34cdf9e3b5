"""Hashes of the source files that a run has imported, except for installed packages."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_PARSED = 200_000
_PACKAGE = __name__.partition(".")[0]
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def hash_sources(
    modules: Mapping[str, Any], rest: Callable[[float], None]
) -> dict[str, dict[str, str]]:
    """Return hashes of the source files of imported modules outside of installed packages.

    Args:
        modules: the imported modules by name.
        rest: called after each file with the seconds that it took; may sleep, so that a training
            continues meanwhile.

    Returns:
        For each module its ``file``, the hash of its ``text``, and that of its ``code``: of the
        syntax tree without comments and docstrings, if the file has at most 200 kB.
    """
    found: dict[str, dict[str, str]] = {}
    for name, path in sorted(_list_sources(modules)):
        begin = time.perf_counter()
        hashes = _hash_present(path)
        if hashes is not None:
            found[name] = {"file": _shorten(path), **hashes}
        rest(time.perf_counter() - begin)
    return found


def hash_absent(
    before: Mapping[str, Mapping[str, str]], present: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """Return hashes of files that an earlier start had imported and this one has not, or not yet.

    Args:
        before: what :func:`hash_sources` has returned in the earlier start.
        present: what it has returned in this one.
    """
    found = {}
    for name, entry in before.items():
        if name not in present:
            path = Path(entry["file"])
            path = path.expanduser() if path.parts[:1] == ("~",) else find_script_folder() / path
            hashes = _hash_present(str(path))
            if hashes is not None:
                found[name] = {"file": entry["file"], **hashes}
    return found


def _hash_present(path: str) -> dict[str, str] | None:
    try:
        status = Path(path).stat()
        return _hash_file(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


def _list_sources(modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and source files of modules that are not installed."""
    library = f"{sysconfig.get_path('stdlib')}{os.sep}"
    for name, module in modules.items():
        path = _find_source(module)
        if path is None or _INSTALLED.search(path) or path.startswith(library):
            continue
        # A rank that was started by the script has the script a second time.
        if name.partition(".")[0] not in (_PACKAGE, "__mp_main__"):
            yield name, path


@functools.cache
def hash_package() -> str:
    """Return a hash of the source files of Helios itself."""
    root = Path(__file__).parents[2]
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root).as_posix()}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def find_script_folder() -> Path:
    """Return the folder of the script that runs; the current folder in an interactive session."""
    script = _find_source(sys.modules.get("__main__"))
    return Path.cwd() if script is None else Path(script).absolute().parent


def _find_source(module: Any) -> str | None:
    path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return path if isinstance(path, str) and path.endswith(".py") else None


def _shorten(path: str) -> str:
    """Return a path below the script's folder or the home folder without that folder."""
    whole = Path(path).absolute()
    for root, mark in ((find_script_folder(), ""), (Path.home(), "~")):
        if whole.is_relative_to(root):
            return Path(mark, whole.relative_to(root)).as_posix()
    return whole.as_posix()


@functools.lru_cache(maxsize=4096)
def _hash_file(path: str, _changed_at: int, _size: int) -> dict[str, str]:
    data = Path(path).read_bytes()
    found = {"text": hashlib.sha256(data).hexdigest()[:16]}
    # Parsing holds the interpreter, and would delay the first steps.
    if len(data) > _MOST_PARSED:
        return found
    try:
        tree = ast.parse(data)
        _drop_docstrings(tree)
        text = ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    return found | {"code": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]}


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):  # type: ignore[union-attr]
                node.body = node.body[1:]
