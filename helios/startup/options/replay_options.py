"""Options of a replay: which part of a run is repeated, and on how many processes."""

from __future__ import annotations

from dataclasses import dataclass

from helios.errors import ArgumentError


@dataclass(frozen=True)
class ReplayOptions:
    """Which part of a run is repeated; see ``Trainer.replay`` for ``start`` and ``stop``.

    Attributes:
        start: the iteration at or before which the replay begins.
        stop: the last iteration to compare.
        nproc: takes the place of ``Trainer(nproc=...)``; ``None`` for the trainer's own.
        has_bars: whether to show bars on a terminal also where the trainer shows none.
    """

    start: int | None = None
    stop: int | None = None
    nproc: int | None = None
    has_bars: bool = False

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("stop", 1), ("nproc", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                rule = f"None or an int of at least {least}"
                raise replay_argument_error(name, rule, value, "Omit it for the default.")
        if self.start is not None and self.stop is not None and self.stop <= self.start:
            rule = f"above start={self.start}"
            raise replay_argument_error("stop", rule, self.stop, "Pass a later iteration.")


def replay_argument_error(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    """Return the error for an argument of a replay: name, rule, value and remedy."""
    return ArgumentError(f"Trainer.replay({name}=...) must be {rule}, got {value!r}. {remedy}")
