"""Says by which words the command line differs from the one that wrote the checkpoint."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from helios.core.stored_values import ABSENT, ValueChange, compare_values
from helios.ledger.scrubbing import scrub_arguments

_LOGGER = logging.getLogger(__name__)

KEY = "command"
"""The entry of the options of a checkpoint that holds the arguments of the command line."""


def read_arguments() -> list[str]:
    """Return the arguments of the command line, without secrets."""
    return scrub_arguments(sys.argv[1:])


def report_arguments(stored: Mapping[str, Any], told: Iterable[ValueChange]) -> None:
    """Log which words of the command line have changed, unless another line explains them.

    Args:
        stored: the options of the checkpoint; one of an earlier release does not say them.
        told: the changes that the log has named already.
    """
    if KEY not in stored:
        return
    known = list(told)
    new = [
        change
        for change in compare_values(parse_words(stored[KEY]), parse_words(read_arguments()))
        if not any(_explains(each, change) for each in known)
    ]
    if new:
        shown = ", ".join(f"{change.name} {change.values}" for change in new)
        _LOGGER.info("The command line has changed since the checkpoint: %s.", shown)


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--name value``, ``--name=value`` and ``name=value``, and other words.

    Other words are numbered. All values of one name are joined.
    """
    found: dict[str, str] = {}
    name, number = "", 0
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equal, value = word.partition("=")
            found[name] = f"{found.get(name, '')} {value}".strip()
            name = "" if equal else name
        elif name:
            found[name] = f"{found[name]} {word}".strip()
        elif "=" in word:
            key, _, value = word.partition("=")
            found[key] = f"{found.get(key, '')} {value}".strip()
        else:
            number += 1
            found[f"argument {number}"] = word
    return found


def as_change(text: str) -> ValueChange:
    """Return a change that is recorded as ``name: old -> new``."""
    name, _, values = text.partition(": ")
    before, _, after = values.partition(" -> ")
    return ValueChange(name, before, after)


def _explains(line: ValueChange, change: ValueChange) -> bool:
    """Whether a line is about what a word sets: it has its name, or the values that it has."""
    name = change.name.lstrip("-").replace("-", "_")
    if line.name.rpartition(".")[2] == name:
        return True
    # A word that is new or has gone has one value.
    return all(
        _as_number(one) == _as_number(other)
        for one, other in ((line.before, change.before), (line.after, change.after))
        if other is not ABSENT
    )


def _is_number(text: str) -> bool:
    return isinstance(_as_number(text), float)


def _as_number(value: Any) -> Any:
    with contextlib.suppress(ValueError):
        return float(str(value))
    return str(value).strip("'")
