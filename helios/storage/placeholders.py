"""Placeholders for objects in a file whose classes are not loaded.

They allow to inspect a file without the classes of its objects: a placeholder stores the name of
the class and the object's arguments and state. Nothing is imported or called.
"""

from __future__ import annotations

from typing import Any


class Unknown:
    """An object of a file whose class is unknown or not trusted.

    Attributes:
        name: the full name of its class or function in the file.
        parts: its arguments, and its state if it has one.
    """

    name = ""
    parts: tuple[Any, ...] = ()

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.parts = (*self.parts, state)

    def __repr__(self) -> str:
        return f"{self.name}(...)"


def stand_in(name: str) -> type[Unknown]:
    """Return a placeholder class for a name that a file refers to.

    Example:
        >>> stand_in("datetime.date")(2024, 2, 29).parts
        (2024, 2, 29)
    """
    return type("Unknown", (Unknown,), {"name": name})
