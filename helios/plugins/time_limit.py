"""``TimeLimit``: interrupt a run before its job ends.

It takes effect at a safe point, so the run can resume with the same bits.
"""

from __future__ import annotations

import logging
import math
import re
import time
from datetime import timedelta
from typing import ClassVar

from helios.core.utils import Clock
from helios.counters import TrainingState
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

_LOGGER = logging.getLogger(__name__)
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
    """Interrupt a run at the next safe point once this start has run for a given time.

    A checkpoint is written, ``fit`` raises ``helios.Interrupted``, and the same command resumes.
    The clock starts with ``setup``, and is checked after every step and validation; every start
    takes at least one step.

    Args:
        limit: seconds, ``"HH:MM:SS"``, ``"D-HH:MM:SS"`` or a ``timedelta``; shorter than that of
            the job, so that there is time to write the checkpoint.
        clock: returns the time in seconds.
        plug_id: unique id of the plugin.

    Raises:
        ArgumentError: if a value is invalid.
        ArgumentTypeError: for a duration of another type.
    """

    _internals: ClassVar[str] = "_began _clock _limit"

    def __init__(
        self,
        limit: float | str | timedelta,
        *,
        clock: Clock = time.monotonic,
        plug_id: str = "time-limit",
    ) -> None:
        super().__init__(plug_id)
        self._limit = parse_duration("TimeLimit(limit=...)", limit)
        if self._limit == 0:
            raise ArgumentError(f"TimeLimit(limit=...) must be positive, got {limit!r}. {_REMEDY}")
        self._clock = clock
        self._began = clock()

    def setup(self) -> None:
        """Start the clock."""
        self._began = self._clock()

    def on_training_start(self) -> None:
        """Warn if an interruption would lose progress."""
        if not self.context.can_save:
            _LOGGER.warning(
                "TimeLimit interrupts after %s, but this run writes no checkpoints: all progress "
                "will be lost. Pass chkpt_root and chkpt_frequency to the trainer.",
                self,
            )

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Check the clock after a step: a safe point follows."""
        self._look()

    def on_validation_end(self, validation_cycle: int) -> None:
        """Check the clock after a validation: a safe point follows."""
        self._look()

    def _look(self) -> None:
        if self._clock() - self._began >= self._limit:
            self.context.interrupt(f"the time limit of {self} is reached")

    def __str__(self) -> str:
        return str(timedelta(seconds=self._limit))
