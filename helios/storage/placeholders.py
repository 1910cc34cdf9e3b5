"""Stand-ins for what a file refers to and loading does not build.

A file can be looked into without the classes of the objects in it: each of them becomes an
inert object that remembers the name and what came with it. Nothing is imported or called.
"""

from __future__ import annotations

from typing import Any


class Unknown:
    """An object of a file whose class is not known, or not to be trusted.

    Attributes:
        name: the full name by which the file refers to its class or function.
        parts: the arguments and the state that came with it.
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
    """Return a class that stands for everything a file refers to by a name.

    Example:
        >>> stand_in("datetime.date")(2024, 2, 29).parts
        (2024, 2, 29)
    """
    return type("Unknown", (Unknown,), {"name": name})
