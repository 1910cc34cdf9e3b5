"""What import-linter and ruff cannot say: bans, public names, docstrings of what users reach."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path

from tests import codebase

_FILES = codebase.source_files()
_TEXTS = ("*.md", "docs/**/*.md", "scripts/**/*", "tests/**/*.py", "helios/**/*.py", ".ci/run")
_INTERCEPTORS = ("__getattr__", "__setattr__", "__getattribute__", "__delattr__")
# What is only read says so to those who assign to it; two packages import names when they are used.
_KEPT_INTERCEPTORS = {
    ("hooks/context.py", "__setattr__"),
    ("__init__.py", "__getattr__"),
    ("core/__init__.py", "__getattr__"),
}
_NO_PART_OF_THE_PROJECT = re.compile(
    r"(?<![\w.~/-])/(?:root|home|Users|work|workspace|mnt|opt)/[\w.]|\b(?:TODO|FIXME|XXX|HACK)\b"
)
_MEMBERS = (
    *(types.FunctionType, property, functools.cached_property, staticmethod, classmethod),
    functools.singledispatchmethod,
)


def _banned(path: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield f"{path}:{node.lineno}: hasattr probes; ask for a type or a protocol."
        is_interceptor = isinstance(node, ast.FunctionDef) and node.name in _INTERCEPTORS
        if is_interceptor and (path, node.name) not in _KEPT_INTERCEPTORS:
            yield f"{path}:{node.lineno}: {node.name} intercepts attributes."


def test_nothing_probes_or_intercepts_attributes() -> None:
    assert [fault for path, text in _FILES.items() for fault in _banned(path, text)] == []
    text = "class A:\n    def __getattr__(self, name): ...\nhasattr(A, 'b')"
    assert len([*_banned("x.py", text)]) == 2


def test_texts_name_no_machine_and_keep_no_notes() -> None:
    paths = {path for pattern in _TEXTS for path in codebase.ROOT.glob(pattern) if path.is_file()}
    paths = {path for path in paths if "__pycache__" not in path.parts}
    assert len(paths) > len(_FILES), "The search for texts finds nothing."
    faults = [
        f"{path.relative_to(codebase.ROOT)}: {found.group(0)}"
        for path in sorted(paths - {Path(__file__).resolve()})
        for found in _NO_PART_OF_THE_PROJECT.finditer(path.read_text("utf-8"))
    ]
    assert faults == []


def test_public_names_are_those_of_the_golden_list() -> None:
    golden = (codebase.ROOT / "tests/golden/public_names.txt").read_text("utf-8")
    assert codebase.public_names() == golden, "Meant so? Run scripts/make_golden.py."


def _without_docstring(name: str, value: object) -> Iterator[str]:
    """Yield what users reach under a public name and has no docstring: itself, and its members.

    A member that overrides one with a docstring inherits it.
    """
    if inspect.ismodule(value):
        shown = vars(value).get("__all__", ())
        for member, inner in vars(value).items():
            is_own = member in shown or getattr(inner, "__module__", "") == value.__name__
            if is_own and not member.startswith("_") and _is_ours(inner):
                yield from _without_docstring(f"{name}.{member}", inner)
    elif inspect.isclass(value) or inspect.isroutine(value):
        if not value.__doc__:
            yield name
        for kind in value.__mro__ if inspect.isclass(value) else ():
            for member, inner in vars(kind).items() if _is_ours(kind) else ():
                is_public = not member.startswith("_") and isinstance(inner, _MEMBERS)
                bases = [vars(base)[member] for base in value.__mro__ if member in vars(base)]
                if is_public and not any(each.__doc__ for each in bases):
                    yield f"{name}.{member}"


def _is_ours(value: object) -> bool:
    is_named = inspect.isclass(value) or inspect.isroutine(value)
    return is_named and (value.__module__ or "").split(".")[0] in ("helios", "tests")


def test_what_users_reach_has_a_docstring() -> None:
    paths = (codebase.ROOT / "tests/golden/import_paths.txt").read_text("utf-8")
    names = {*codebase.public_names().splitlines(), *paths.splitlines()}
    assert [n for name in names for n in _without_docstring(name, pkgutil.resolve_name(name))] == []
