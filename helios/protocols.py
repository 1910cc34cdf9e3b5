"""The shapes that Helios asks of objects it does not know: state that can be saved, and time."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and given back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""
        ...


class Clock(Protocol):
    """A monotonic clock in seconds; passed in, so that tests never sleep."""

    def __call__(self) -> float:
        """Return the present time in seconds."""
        ...
