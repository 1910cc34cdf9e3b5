"""The shapes that Helios asks of objects it does not know: state, time, and where results go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from helios.state import TrainingState


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


class Meter(Protocol):
    """What counts how long something took."""

    def __call__(self, seconds: float, /) -> None:
        """Count seconds."""
        ...


class Recorder(Protocol):
    """Where a session's results go: checkpoints and scalars."""

    def save(self, snapshot: dict[str, Any], meters: Mapping[int, Meter]) -> None:
        """Write a snapshot as a checkpoint; one that is committed is not written again.

        Args:
            snapshot: the content.
            meters: count how long values in it take to be encoded, by address.
        """
        ...

    def has_saved(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this iteration is committed."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether this process has an error of a save that must end the training."""
        ...

    def raise_failure(self) -> None:
        """Raise the error of a save, in all processes; all call it at one place."""
        ...

    @property
    def logs_scalars(self) -> bool:
        """Whether scalars are written anywhere."""
        ...

    def show_scores(
        self, scores: Mapping[str, float], state: TrainingState, *, has_improved: bool
    ) -> None:
        """Log the scores of a validation, by name."""
        ...

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write numbers of an iteration, by name."""
        ...
