"""The code of a run: hashes of the files that it imported, and the state of their repository."""

from __future__ import annotations

import ast
import functools
import hashlib
import operator
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from helios.ledger.scrubbing import scrub

_MOST_PARSED = 200_000
_UNKNOWN: tuple[Any, None] = (object(), None)
_Listed: TypeAlias = "tuple[list[str], list[Any], list[str | None], list[tuple[str, str]]]"
_PACKAGE = __name__.partition(".")[0]
# A rank that was started by the script has the script a second time; PyTorch writes the last one
# into a temporary folder.
_LEFT_OUT = (_PACKAGE, "__mp_main__", "_remote_module_non_scriptable")
# Fields of syntax trees that hold statements, handlers of exceptions or cases.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def hash_texts(modules: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return hashes of the source files of imported modules outside of installed packages.

    Args:
        modules: the imported modules by name.

    Returns:
        For each module its ``file`` and the hash of its ``text``.
    """
    found: dict[str, dict[str, str]] = {}
    roots = str(find_script_folder()), str(Path.home())
    for name, path in sorted(_list_sources(modules)):
        text = _hash_present(path)
        if text is not None:
            found[name] = {"file": _shorten(path, *roots), "text": text}
    return found


def hash_statements(
    modules: Mapping[str, Any],
    texts: Mapping[str, Mapping[str, str]],
    known: Mapping[str, Mapping[str, str]],
    rest: Callable[[float], None],
) -> dict[str, dict[str, str]]:
    """Return hashes of source files, also of their ``code``.

    That is the syntax tree without comments and docstrings, of files of at most 200 kB.

    Args:
        modules: the imported modules by name.
        texts: what :func:`hash_texts` has returned for them.
        known: what was found earlier with this version of Python; equal texts are not parsed again.
        rest: called after each file that was parsed with the seconds that it took; may sleep, so
            that a training continues meanwhile.
    """
    found: dict[str, dict[str, str]] = {}
    for name, path in _list_sources(modules):
        if name not in texts:
            continue
        entry = {key: texts[name][key] for key in ("file", "text")}
        earlier = known.get(name, {})
        if earlier.get("text") == entry["text"]:
            found[name] = {**earlier, **entry}
            continue
        begin = time.perf_counter()
        found[name] = entry | _hash_code(path, entry["text"])
        rest(time.perf_counter() - begin)
    return found


def hash_absent(
    before: Mapping[str, Mapping[str, str]],
    present: Mapping[str, Any],
    known: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """Return hashes of files that an earlier start had imported and this one has not, or not yet.

    Args:
        before: what :func:`hash_statements` has returned in the earlier start.
        present: what it has returned in this one.
        known: what was found earlier with this version of Python.
    """
    found = {}
    for name, entry in before.items():
        if name not in present:
            path = Path(entry["file"])
            path = path.expanduser() if path.parts[:1] == ("~",) else find_script_folder() / path
            text = _hash_present(str(path))
            if text is not None:
                earlier = known.get(name, {})
                is_known = earlier.get("text") == text
                code = earlier if is_known else _hash_code(str(path), text)
                found[name] = {**code, "file": entry["file"], "text": text}
    return found


def _hash_present(path: str) -> str | None:
    try:
        status = _as_path(path).stat()
        return _hash_text(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _as_path(path: str) -> Path:
    return Path(path)


def _list_sources(modules: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and source files of modules that are not installed."""
    return _listing().read(modules)


@functools.cache
def _listing() -> _Listing:
    return _Listing()


class _Listing:
    """The source files of a process: thousands of modules, which stay from start to start."""

    def __init__(self) -> None:
        self._last: _Listed = ([], [], [], [])

    def read(self, modules: Mapping[str, Any]) -> list[tuple[str, str]]:
        names, values = list(modules), list(modules.values())
        known_names, known_values, paths, sources = self._last
        if names != known_names or not all(map(operator.is_, values, known_values)):
            # A new module must not cost a look at all others.
            known = dict(zip(known_names, zip(known_values, paths, strict=True), strict=True))
            paths = []
            for name, module in modules.items():
                earlier, path = known.get(name, _UNKNOWN)
                paths.append(path if earlier is module else _find_own_source(name, module))
            sources = [(n, path) for n, path in zip(names, paths, strict=True) if path is not None]
            self._last = names, values, paths, sources
        return sources


def _find_own_source(name: str, module: Any) -> str | None:
    """Return the source file of a module that is not installed."""
    path = _find_source(module)
    is_left_out = path is None or _is_installed(path) or name.partition(".")[0] in _LEFT_OUT
    return None if is_left_out else path


@functools.lru_cache(maxsize=16384)
def _is_installed(path: str) -> bool:
    return path.startswith(_find_library()) or _INSTALLED.search(path) is not None


@functools.cache
def _find_library() -> str:
    return f"{sysconfig.get_path('stdlib')}{os.sep}"


@functools.cache
def hash_package() -> str:
    """Return a hash of the source files of Helios itself."""
    root = Path(__file__).parents[1]
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


@functools.lru_cache(maxsize=4096)
def _shorten(path: str, script_folder: str, home: str) -> str:
    """Return a path below the script's folder or the home folder without that folder."""
    whole = Path(path).absolute()
    for root, mark in ((script_folder, ""), (home, "~")):
        if whole.is_relative_to(root):
            return Path(mark, whole.relative_to(root)).as_posix()
    return whole.as_posix()


@functools.lru_cache(maxsize=4096)
def _hash_text(path: str, _changed_at: int, _size: int) -> str:
    return _hash_bytes(Path(path).read_bytes())


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def _hash_code(path: str, text: str) -> dict[str, str]:
    """Return the hash of the syntax tree; nothing if the file is not the one of the text now."""
    try:
        data = Path(path).read_bytes()
        if len(data) > _MOST_PARSED or _hash_bytes(data) != text:
            return {}
        tree = ast.parse(data)
        _drop_docstrings(tree)
        code = ast.dump(tree).encode("utf-8", "replace")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {"code": _hash_bytes(code)}


def _drop_docstrings(tree: ast.Module) -> None:
    for node in _walk_statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):  # type: ignore[union-attr]
                node.body = node.body[1:]


def _walk_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it; no expression holds one."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in _BLOCKS:
                waiting += value


_MOST_CHARACTERS = 50_000
_MOST_BYTES = 8 << 20
_SECONDS = 10.0
# No file is locked, and no program runs that a repository configures, except its filters, such as
# that of git-lfs, without which its files would look changed.
_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=")


def describe_git(folder: Path) -> dict[str, Any]:
    """Return the state of the repository that holds a folder; empty without one.

    Returns:
        ``commit``, ``branch`` and ``remote`` where there are any, ``is_dirty``, and for a dirty
        tree the ``patch`` to it, without secrets, its ``patch_hash`` and whether it ``is_cut`` to
        50,000 characters. Files that git does not track are not in the patch.
    """
    status = _run(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return {}
    lines = status.decode("utf-8", "replace").splitlines()
    heads = dict(line[2:].partition(" ")[::2] for line in lines if line.startswith("# "))
    found: dict[str, Any] = {"is_dirty": any(not line.startswith("#") for line in lines)}
    for name, key in (("commit", "branch.oid"), ("branch", "branch.head")):
        if heads.get(key, "(").startswith("("):
            continue
        found[name] = heads[key]
    remote = _run(folder, "config", "--get", "remote.origin.url")
    if remote:
        found["remote"] = scrub(remote.decode("utf-8", "replace").strip())
    if found["is_dirty"] and "commit" in found:
        found |= _describe_patch(folder)
    return found


def _describe_patch(folder: Path) -> dict[str, Any]:
    patch = _run(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if patch is None:
        return {}
    text = scrub(patch.decode("utf-8", "replace"))
    return {
        "patch": text[:_MOST_CHARACTERS],
        "patch_hash": hashlib.sha256(patch).hexdigest()[:16],
        "is_cut": len(text) > _MOST_CHARACTERS or len(patch) >= _MOST_BYTES,
    }


def _run(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command, at most 8 MiB; ``None`` if it fails."""
    git = shutil.which("git")
    if git is None:
        return None
    # A loader worker that is forked meanwhile would keep a pipe open, but not a file.
    with tempfile.TemporaryFile() as output:
        try:
            # A repository on a disk that does not answer must not hold up the end of the run. With
            # cwd or close_fds, Python would fork, and wait for a pipe that such a worker has too.
            subprocess.run(
                [git, "-C", str(folder), *_OPTIONS, *arguments],
                close_fds=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        output.seek(0)
        return output.read(_MOST_BYTES)
