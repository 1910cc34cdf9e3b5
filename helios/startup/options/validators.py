"""Checks of single values that several groups of options share, and their error messages."""

from __future__ import annotations

import math
from pathlib import Path

from helios.errors import ArgumentError, ArgumentTypeError
from helios.storage.local_paths import as_local_path


def refusal(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    """Return the error for an argument of the trainer: name, rule, value and remedy."""
    return ArgumentError(f"Trainer({name}=...) must be {rule}, got {value!r}. {remedy}")


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is neither None nor an int of at least ``least``."""
    if value is not None and (type(value) is not int or value < least):
        rule = "None or a positive int" if least else "None or a non-negative int"
        raise refusal(name, rule, value, "Pass None to disable it.")


def check_positive(name: str, value: object) -> None:
    """Refuse what is neither None nor a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < float(value) < math.inf):  # type: ignore[arg-type]
        raise refusal(name, "None or a positive number", value, "Pass None to disable it.")


def check_flags(**flags: object) -> None:
    """Refuse the first flag that is not a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise refusal(name, "True or False", value, "Pass a bool.")


def as_folder(name: str, value: object) -> Path | None:
    """Return a folder's path, which need not exist.

    Raises:
        ArgumentTypeError: for something that is not a path.
        ArgumentError: for a URL, or if a file has the name of the folder or of one of its parents.
    """
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ArgumentTypeError(
            f"Trainer({name}=...) must be a path or None, got {value!r}. Pass a pathlib.Path."
        )
    path = as_local_path(f"Trainer({name}=...)", value)
    present = next((place for place in (path, *path.parents) if place.exists()), path)
    if present.exists() and not present.is_dir():
        raise refusal(name, "a folder", str(path), f"The file {present} is in its place.")
    return path
