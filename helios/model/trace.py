"""What objects hold at a moment, to be put back: a trial validation must leave no trace (C17)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol


class Owner(Protocol):
    """A model or a plugin: attributes, and state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state back."""
        ...


class Trace:
    """A copy of the state of some objects.

    Args:
        owners: the model and the plugins.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._states = [(owner, copy.deepcopy(owner.state_dict())) for owner in owners]

    def erase(self) -> None:
        """Put back what the objects held."""
        for owner, state in self._states:
            owner.load_state_dict(state)
