"""Digests of the methods of a class, to detect edits between two starts.

A digest covers what Python executes: instructions, constants and names, but not comments,
docstrings, line numbers and file names. Two digests can be compared if they are from the same
version of Python. Code is read and never changed, and no source file is needed, so this also works
for cells of notebooks.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import platform
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_FOREIGN = {"helios", "torch", *sys.stdlib_module_names}
_NOT_TRAINING = re.compile(r"(on_|process_)?(test_|testing|predict)")
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type(...))
_NO_EFFECT = ("NOP", "CACHE", "EXTENDED_ARG", "RESUME")
_JUMPS = {dis.opname[code] for code in (*dis.hasjrel, *dis.hasjabs)}
_FAST = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")
_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def python_version() -> str:
    """Return Python's implementation and version, which determine the instructions."""
    return f"{platform.python_implementation()} {platform.python_version()} -O{sys.flags.optimize}"


def own_classes(kind: type) -> Iterator[type]:
    """Yield a class and its bases, without those of Helios, PyTorch and Python."""
    return (base for base in kind.__mro__ if not _is_foreign(base.__module__))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def digest_methods(kind: type) -> dict[str, str]:
    """Return a digest of each method that training may call, by name.

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
    """Return a digest of the functions that a member of a class runs; empty if there are none."""
    texts = [_describe(each, set()) for each in _functions_in(member)]
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


def _describe(function: FunctionType, seen: set[int]) -> list[Any]:
    """Return what a function executes, and so the functions that a decorator has wrapped."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    held = [vars(function).get("__wrapped__")]
    # All that have a value.
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    wrapped = [each for value in held for each in _functions_in(value)]
    found = [_describe(each, seen) for each in wrapped]
    module = str(function.__globals__.get("__name__"))
    if _is_foreign(module):
        # A decorator of a library counts by its name, which its wrapper hides.
        return [*found, module, function.__code__.co_name]
    if wrapped:
        # Arguments of a decorator; other variables around a method may change while it runs.
        found += [_tag(value) for value in held if isinstance(value, _CONSTANT)]
    defaults = function.__defaults__, tuple((function.__kwdefaults__ or {}).items())
    return [*found, _tag(function.__code__), _tag(defaults)]


def _tag(value: Any) -> Any:
    """Return a constant with its type, so that 1, 1.0 and True differ."""
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, tuple):
        return [_tag(each) for each in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(_tag(each)) for each in value)
    return type(value).__name__, repr(value) if isinstance(value, _CONSTANT) else ""


def _instructions(code: CodeType) -> list[Any]:
    """Return what a code object executes; line breaks may insert instructions without effect."""
    steps = [*_steps(code)]
    offsets = [offset for offset, _, _ in steps]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return [counts, code.co_flags & _ARGUMENTS] + [
        (name, bisect_left(offsets, value) if name in _JUMPS else _tag(value))
        for _, name, value in steps
    ]


def _steps(code: CodeType) -> Iterator[tuple[int, str, Any]]:
    for each in dis.get_instructions(code):
        names = _FAST.findall(each.opname)
        if len(names) > 1:
            # Python 3.13 joins two that are in one line.
            for name, value in zip(names, each.argval, strict=True):
                yield each.offset, name, value
        elif each.opname == "KW_NAMES":
            # Python 3.11 does not show its value.
            yield each.offset, each.opname, code.co_consts[each.arg or 0]
        elif each.opname not in _NO_EFFECT:
            yield each.offset, each.opname, each.argval
