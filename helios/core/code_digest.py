"""Digests of the methods of a class, to see whether somebody has edited one between two starts.

A digest is of the source without comments, docstrings and formatting. Cells of notebooks have one,
too; what has none is not compared. Code is read and never changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

_FOREIGN = {"helios", "torch", *sys.stdlib_module_names}
_NOT_TRAINING = re.compile(r"(on_|process_)?(test_|testing|predict)")


def own_classes(kind: type) -> Iterator[type]:
    """Yield a class and its bases, without those of Helios, PyTorch and Python."""
    return (base for base in kind.__mro__ if not _is_foreign(base.__module__))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def digest_methods(kind: type) -> dict[str, str]:
    """Return a digest of each method that a training may call, by name.

    Methods of all bases count, because ``super()`` calls them; methods for testing and predicting
    do not.
    """
    found: dict[str, str] = {}
    for base in own_classes(kind):
        for name, member in vars(base).items():
            if not _NOT_TRAINING.match(name) and (digest := digest_functions(member)):
                found[name] = found.get(name, "") + digest
    return found


def digest_functions(member: Any) -> str:
    """Return a digest of the functions that a member of a class runs; empty if it is none."""
    texts = [text for each in _functions_in(member) for text in _sources(each, set())]
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:12] if texts else ""


def _functions_in(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of what a class or a closure holds."""
    if isinstance(member, FunctionType):
        yield member
        return
    if isinstance(member, property):
        parts: Any = member.fget, member.fset, member.fdel
    elif isinstance(member, staticmethod | classmethod | MethodType):
        parts = (member.__func__,)
    elif isinstance(member, functools.partial):
        parts = (member.func,)
    elif isinstance(member, list):
        parts = member
    else:
        # Such as functools.lru_cache, or a decorator that is a class.
        held = {} if isinstance(member, type) else getattr(member, "__dict__", {})
        parts = [each for each in held.values() if isinstance(each, FunctionType)]
    for part in parts:
        yield from _functions_in(part)


def _sources(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """Yield the source of a function, and so of the functions that a decorator has wrapped."""
    if id(function) in seen:
        return
    seen.add(id(function))
    held = [vars(function).get("__wrapped__")]
    # All that have a value.
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    for value in held:
        for each in _functions_in(value):
            yield from _sources(each, seen)
    # A decorator of a library is a line of the source of what it wraps.
    if not _is_foreign(str(function.__globals__.get("__name__"))):
        try:
            yield _without_comments(inspect.getsource(function.__code__))
        except Exception:  # no source, or not the one that was imported
            return


def _without_comments(source: str) -> str:
    """Return a source in one form, without comments and docstrings."""
    try:
        # A method is indented.
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    except SyntaxError:  # a lambda inside a longer expression
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_described = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[is_described:]
    return ast.unparse(tree)
