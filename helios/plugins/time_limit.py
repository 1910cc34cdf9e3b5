"""``TimeLimit``: end a training in time, at the end of a job or after a total time.

Both take effect at a safe point, so the run can resume with the same bits.
"""

from __future__ import annotations

import logging
import math
import re
import time
from datetime import timedelta
from typing import Any, ClassVar, Literal

from helios.counters import TrainingState
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.protocols import Clock

_LOGGER = logging.getLogger(__name__)
_UNITS = ("launch", "run")
_FORM = re.compile(
    r"(?:(?P<days>\d+)-(?=[01]\d:|2[0-3]:|\d:))?(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)"
)
_REMEDY = 'Pass e.g. 3600, "23:30:00", "1-12:00:00" or a timedelta.'


def parse_duration(name: str, value: object) -> float:
    """Return a duration in seconds.

    Args:
        name: name of the value in messages.
        value: seconds, ``"HH:MM:SS"``, ``"D-HH:MM:SS"`` or a ``timedelta``.

    Raises:
        ArgumentError: for a string of another form, and for a negative or infinite value.
        ArgumentTypeError: for anything else.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        found = _FORM.fullmatch(value.strip())
        if found is None:
            rule = 'of the form "HH:MM:SS" or "D-HH:MM:SS"'
            raise ArgumentError(f"{name} must be {rule}, got {value!r}. {_REMEDY}")
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ArgumentTypeError(f"{name} must be a duration, got {value!r}. {_REMEDY}")
    if not math.isfinite(seconds) or seconds < 0:
        raise ArgumentError(f"{name} must be a finite duration, got {value!r}. {_REMEDY}")
    return seconds


@PLUGIN_REGISTRY.register
class TimeLimit(Plugin):
    """End a training when its time is over, at the next safe point.

    Checked after every step and every validation; every start makes at least one step.

    Args:
        limit: seconds, ``"HH:MM:SS"``, ``"D-HH:MM:SS"`` or a ``timedelta``.
        counts: ``"launch"`` counts from the setup of this start, and interrupts: a checkpoint is
            written, ``fit`` raises ``helios.Interrupted``, and the same command resumes.
            ``"run"`` counts the time of training in all starts together, and ends the run
            regularly.
        margin: how much earlier to interrupt, so that there is time to write the checkpoint.
        clock: returns the time in seconds.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: if a value is invalid.
        ArgumentTypeError: for a duration of another type.
    """

    _internals: ClassVar[str] = (
        "_clock _counts_run _launch_began _limit _margin _spent_before _training_began"
    )

    def __init__(
        self,
        limit: float | str | timedelta,
        counts: Literal["launch", "run"] = "launch",
        *,
        margin: float | str | timedelta = 0.0,
        clock: Clock = time.monotonic,
        plug_id: str = "time-limit",
    ) -> None:
        super().__init__(plug_id)
        self._limit = parse_duration("TimeLimit(limit=...)", limit)
        self._margin = parse_duration("TimeLimit(margin=...)", margin)
        if self._limit == 0:
            raise ArgumentError(f"TimeLimit(limit=...) must be positive, got {limit!r}. {_REMEDY}")
        if counts not in _UNITS:
            raise ArgumentError(
                f'TimeLimit(counts=...) must be "launch" or "run", got {counts!r}. "launch" ends '
                'one start of the command, "run" the whole run.'
            )
        if self._margin >= self._limit:
            raise ArgumentError(
                f"TimeLimit(margin=...) must be less than the limit of {self._limit:g} s, got "
                f"{margin!r}. Pass a little more than the time that a checkpoint takes."
            )
        if self._margin and counts == "run":
            _LOGGER.warning(
                'TimeLimit(margin=...) has no effect with counts="run": the process is not killed.'
            )
        self._counts_run = counts == "run"
        self._clock = clock
        self._launch_began = clock()
        self._spent_before = 0.0
        self._training_began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of training, in all starts of the run together.

        Work that was lost in a kill, and is repeated, counts once.
        """
        if self._training_began is None:
            return self._spent_before
        return self._spent_before + self._clock() - self._training_began

    def setup(self) -> None:
        """Start the clock of this start."""
        self._launch_began = self._clock()
        self._spent_before = 0.0

    def on_training_start(self) -> None:
        """Start the clock of the training, and warn if an interruption would lose progress."""
        if not self._counts_run and not self.context.can_save:
            _LOGGER.warning(
                "TimeLimit interrupts after %s, but this run writes no checkpoints: all progress "
                "will be lost. Pass chkpt_root and chkpt_frequency to the trainer.",
                _spell(self._limit),
            )
        self._training_began = self._clock()

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Check the clock after a step: a safe point follows."""
        self._look()

    def on_validation_end(self, validation_cycle: int) -> None:
        """Check the clock after a validation: a safe point follows."""
        self._look()

    def _look(self) -> None:
        if self._counts_run:
            if self.elapsed >= self._limit:
                self.context.request_stop(f"{_spell(self._limit)} of training are over")
        elif self._clock() - self._launch_began >= self._limit - self._margin:
            text = f", less a margin of {_spell(self._margin)}," if self._margin else ""
            self.context.interrupt(f"the time limit of {_spell(self._limit)}{text} is reached")

    def teardown(self) -> None:
        """Stop the clock."""
        self._spent_before, self._training_began = self.elapsed, None

    def state_dict(self) -> dict[str, Any]:
        """Return the time spent on training."""
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time spent in earlier starts."""
        self._spent_before = state_dict["elapsed"]


def _spell(seconds: float) -> str:
    return str(timedelta(seconds=seconds))
