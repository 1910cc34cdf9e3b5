"""Explains wrong options: the errors of jsonargparse as one sentence each."""

from __future__ import annotations

import difflib
import inspect
import json
import pydoc
import re
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from helios import plugins
from helios.start.options import MEANT, ROWS

_INNER = re.compile(
    r'Parser key "([\w.]+)":(?s:.*?)\n( *)(?:- )?'
    r"Problem with given class_path '([\w.]+)':\n((?:\2 +[^\n]*\n?)+)"
)
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_UNKNOWN_KEY = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'")
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_WRONG = re.compile(r'Parser key "([\w.]+)":\s*((?s:.*))')
_VALUE = re.compile(r"(?:Got value|Given value): (.*)")
_NO_PATH = re.compile(r"\s*Expected a dot import path string: (\S+)")
_REASON = re.compile(r"^ *- ((?!Expected a |Not of type ).*)$", re.MULTILINE)


class Mistakes:
    """Explains the errors of one command line.

    Args:
        kinds: the classes whose arguments are options, by the name before these.
        known: the names of all options.
        words: the command line.
    """

    def __init__(
        self, kinds: Mapping[str, type], known: Sequence[str], words: Sequence[str]
    ) -> None:
        self._kinds = dict(kinds)
        self._known = list(known)
        self._words = words

    def explain(self, message: str, prefix: str = "") -> str:
        """Return what an error of jsonargparse means.

        Args:
            message: its text.
            prefix: what stands before the options that it names, such as ``trainer.store.``.
        """
        if found := _INNER.search(message):
            place = f"{prefix}{found[1]}"
            self._enter(place, pydoc.locate(found[3]))
            return self.explain(found[4], f"{place}.")
        if found := _UNKNOWN.search(message):
            options = [word for word in found[1].split() if word.startswith("-")]
            names = [option.lstrip("-").partition("=")[0] for option in options]
            return "\n".join(map(self._refuse_name, names)) or f"Unexpected words: {found[1]}."
        if found := _UNKNOWN_KEY.search(message):
            return self._refuse_name(prefix + ".".join(filter(None, found.groups())))
        if found := _REQUIRED.search(message):
            return "\n".join(self._ask_for(f"{prefix}{name}") for name in found[1].split(", "))
        if found := _WRONG.search(message):
            return self._refuse_value(f"{prefix}{found[1]}", found[2])
        place = f"--{prefix[:-1]}: " if prefix else self._find_broken()
        return f"{place}{' '.join(message.split())}"

    def _enter(self, place: str, kind: object) -> None:
        """Let the arguments of a class that an option names be options, too."""
        if isinstance(kind, type):
            self._kinds[place] = kind
            self._known += [f"{place}.{name}" for name in inspect.signature(kind).parameters]

    def _refuse_name(self, name: str) -> str:
        names = {other: f"--trainer.{x}" if x in ROWS else x for other, x in MEANT.items()}
        names |= {f"trainer.{other}": meant for other, meant in names.items()}
        names |= {each.rpartition(".")[2]: f"--{each}" for each in reversed(self._known)}
        names |= {each: f"--{each}" for each in self._known}
        (meant, *_) = [names[each] for each in difflib.get_close_matches(name, names, n=1)] or [""]
        hint = f"Did you mean {meant}?" if meant else "--help lists the options."
        return f"There is no option --{name}. {hint}"

    def _ask_for(self, name: str) -> str:
        expected = self._describe_type(name)
        return f"--{name} is required{f': {expected}' if expected else ''}."

    def _refuse_value(self, name: str, text: str) -> str:
        value, expected = _VALUE.search(text), self._describe_type(name)
        if found := _NO_PATH.match(text):
            near = difflib.get_close_matches(found[1], plugins.__all__, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Pass e.g. package.module.Class."
            return f"--{name} must be the path of a class, got {found[1]!r}. {hint}"
        if value is None or not expected:
            return f"--{name}: {' '.join(text.split())}"
        reasons = [reason.rstrip(".") for reason in _REASON.findall(text)]
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"--{name} must be {expected}, got {value[1]!r}{why}."

    def _describe_type(self, name: str) -> str:
        hint = self._find_hint(name)
        return "" if hint is None else _type_text(hint)

    def _find_hint(self, name: str) -> Any:
        """Return the type of an option, as far as the class or its bases say it themselves."""
        group, _, argument = name.rpartition(".")
        kind = self._kinds.get(group) or (self._find_hint(group) if group else None)
        for each in kind.__mro__ if isinstance(kind, type) else ():
            try:
                hints = typing.get_type_hints(inspect.unwrap(vars(each)["__init__"]))
            except (KeyError, NameError, TypeError):  # no constructor, or names for checkers only
                continue
            if argument in hints:
                return hints[argument]
        return None

    def _find_broken(self) -> str:
        """Return the file that is no YAML, with a colon; empty if all are."""
        pairs = zip(self._words, [*self._words[1:], ""], strict=True)
        options = [(word.partition("="), after) for word, after in pairs]
        paths = [Path(value or after) for (name, _, value), after in options if name == "--config"]
        for path in filter(Path.is_file, paths):
            try:
                yaml.safe_load(path.read_text("utf-8"))
            except (UnicodeDecodeError, yaml.YAMLError):
                return f"{path}: "
        return ""


def _type_text(hint: Any) -> str:
    """Return a type as users write values.

    Example:
        >>> _type_text(Literal["auto"] | int | None)
        '"auto" or int or null'
    """
    if hint is types.NoneType:
        return "null"
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_type_text, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(json.dumps, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(hint.__members__)
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return re.sub(r"[\w.]+\.(?=\w)", "", str(hint))
