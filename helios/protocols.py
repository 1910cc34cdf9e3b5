"""Protocols for objects with state, and for clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    pass


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that :meth:`state_dict` returned."""
        ...


Clock: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds; an argument, so that tests need not sleep."""
