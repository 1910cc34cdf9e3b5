"""A clock for tests that no time passes for."""

from __future__ import annotations


class Hands:
    """A clock that stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time
