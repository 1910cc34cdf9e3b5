"""Digests of the methods of a class, to see whether somebody has edited one between two starts.

A digest is of what Python executes: instructions, constants and names. Comments, docstrings, line
numbers and file names are not part of it, so code that was only moved or formatted stays the same.
Two digests can be compared if the same version of Python has made both. Code is read and never
changed, and no source file is needed: cells of notebooks are seen, too.
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
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

_FOREIGN = {"helios", "torch", *sys.stdlib_module_names}
_NOT_TRAINING = re.compile(r"(on_|process_)?(test_|testing|predict)")
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type(...))
_NO_EFFECT = ("NOP", "CACHE", "EXTENDED_ARG", "RESUME")
_JUMPS = (*dis.hasjrel, *dis.hasjabs)
_ALWAYS = ("JUMP", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT")
_FAST = "((?:LOAD|STORE)_FAST(?:_BORROW)?)"
_JOINED = re.compile(f"{_FAST}_{_FAST}")
_MOST_HOPS = 10
# What the body of a class notes of itself.
_NOTES = ("__doc__", "__firstlineno__", "__static_attributes__")
# The others say whether there is a docstring, and where the function was defined.
_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE


def python_version() -> str:
    """Return what makes the instructions of a source: Python's implementation and version."""
    optimized = f" -O{sys.flags.optimize}" if sys.flags.optimize else ""
    return f"{platform.python_implementation()} {platform.python_version()}{optimized}"


def own_classes(kind: type) -> Iterator[type]:
    """Yield a class and its bases, without those of Helios, PyTorch and Python."""
    return (base for base in kind.__mro__ if not _is_foreign(base.__module__))


def digest_methods(kind: type) -> dict[str, str]:
    """Return a digest of each method that a training may call, by name.

    Methods of all bases count, because ``super()`` calls them; methods for testing and predicting
    do not.
    """
    found: dict[str, list[Any]] = {}
    for base in own_classes(kind):
        for name, member in vars(base).items():
            functions = [*_functions_in(member)]
            if functions and not _NOT_TRAINING.match(name):
                texts = [_describe(each, each.__name__ != name, set()) for each in functions]
                if isinstance(member, functools.partial | functools.partialmethod):
                    texts.append([_tag(member.args), _tag_all(member.keywords)])
                found.setdefault(name, []).append(texts)
    return {name: _hash(texts) for name, texts in found.items()}


def digest_function(value: Any) -> str:
    """Return a digest of a function or a partial of one; empty for anything else."""
    texts = [_describe(each, False, set()) for each in _functions_in(value)]
    return _hash(texts) if texts else ""


def _hash(texts: list[Any]) -> str:
    return hashlib.sha256(repr(texts).encode("utf-8", "backslashreplace")).hexdigest()[:12]


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _functions_in(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of what a class or a closure holds."""
    if isinstance(member, FunctionType):
        parts: Any = ()
        yield member
    elif isinstance(member, property):
        parts = member.fget, member.fset, member.fdel
    elif isinstance(member, functools.partial):
        parts = (member.func,)
    elif isinstance(member, staticmethod | classmethod | MethodType):
        parts = (member.__func__,)
    else:
        # Such as functools.lru_cache, or a decorator that is a class.
        held = {} if isinstance(member, type) else getattr(member, "__dict__", {})
        parts = [each for each in held.values() if isinstance(each, FunctionType)]
    for part in parts:
        yield from _functions_in(part)


def _describe(function: FunctionType, is_wrapper: bool, seen: set[int]) -> list[Any]:
    """Return what a function executes, and so the functions that a decorator has wrapped."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    wrapped = vars(function).get("__wrapped__")
    is_wrapper |= wrapped is not None
    # A decorator of a library counts by its name, which its wrapper hides.
    module = str(function.__globals__.get("__name__"))
    if _is_foreign(module):
        is_wrapper = False
        found: list[Any] = [module, function.__code__.co_name]
    else:
        found = _instructions(function.__code__)
        found += [_tag(function.__defaults__), _tag_all(function.__kwdefaults__)]
    held = [wrapped]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable without a value
            continue
    for value in held:
        found += [_describe(each, False, seen) for each in _functions_in(value)]
        # Arguments of a decorator; other variables around a method may change while it runs.
        if is_wrapper and isinstance(value, _CONSTANT):
            found.append(_tag(value))
    return found


class _Step(NamedTuple):
    """An instruction, or one of the two that Python 3.13 has joined."""

    offset: int
    name: str
    value: Any
    is_jump: bool


def _steps(code: CodeType, instructions: Iterable[dis.Instruction]) -> Iterator[_Step]:
    for each in instructions:
        joined = _JOINED.fullmatch(each.opname)
        if joined is not None:
            for name, value in zip(joined.groups(), each.argval, strict=True):
                yield _Step(each.offset, name, value, is_jump=False)
        elif each.opname == "KW_NAMES" and each.arg is not None:
            # Python 3.11 shows their place only.
            yield _Step(each.offset, each.opname, code.co_consts[each.arg], is_jump=False)
        elif each.opname not in _NO_EFFECT:
            name = each.opname.replace("_FORWARD", "").replace("_BACKWARD", "")
            yield _Step(each.offset, name, each.argval, each.opcode in _JUMPS)


def _instructions(code: CodeType) -> list[Any]:
    """Return what a code object executes; formatting a statement otherwise may move its jumps."""
    bytecode = dis.Bytecode(code)
    steps = [*_steps(code, bytecode)]
    notes = [n for n, each in enumerate(steps) if _is_note(each)]
    steps = [each for n, each in enumerate(steps) if n not in notes and n + 1 not in notes]
    offsets = [each.offset for each in steps]
    found: list[Any] = [
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        *(code.co_flags & _FLAGS, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]),
    ]
    for entry in getattr(bytecode, "exception_entries", ()):
        found.append(
            [bisect_left(offsets, each) for each in (entry.start, entry.end, entry.target)]
        )
    for each in steps:
        value = _target(steps, offsets, each) if each.is_jump else _tag(each.value)
        found.append((each.name, value))
    return found


def _is_note(step: _Step) -> bool:
    return step.name == "STORE_NAME" and step.value in _NOTES


def _target(steps: list[_Step], offsets: list[int], jump: _Step) -> int:
    """Return the number of the instruction to which a jump leads at last."""
    number = bisect_left(offsets, jump.value)
    for _ in range(_MOST_HOPS):
        if number == len(steps) or steps[number].name not in _ALWAYS:
            break
        number = bisect_left(offsets, steps[number].value)
    return number


def _tag_all(values: dict[str, Any] | None) -> list[Any]:
    return [(name, _tag(each)) for name, each in (values or {}).items()]


def _tag(value: Any) -> Any:
    """Return a constant with its type, so that 1, 1.0 and True differ."""
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, tuple):
        return "tuple", [_tag(each) for each in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(_tag(each)) for each in value)
    if isinstance(value, FunctionType):
        return "function", value.__code__.co_name
    return type(value).__name__, repr(value) if isinstance(value, _CONSTANT) else ""
