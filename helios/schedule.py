"""Pure functions that decide what is due, from the counters and the options of a run."""

from __future__ import annotations

import dataclasses

from helios.counters import Cursor, TrainingState, TrainingUnit

_LIMITS = ("total_steps", "max_epochs", "max_steps")
_REACHED = "{} reached"
_IMPATIENCE = "no improvement in"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The options that decide when something happens; the trainer validates them.

    A frequency of ``None`` means never. Frequencies and ``total_steps`` are in ``unit``, except
    ``print_frequency``, which always counts ``current_iteration``. ``limit`` is the argument that
    has set ``total_steps``; ``max_steps`` limits the steps of a run that counts epochs. The last
    step of a run that counts them is validated if ``validates_last`` is set. A save is
    also due ``save_seconds`` after the last one, by the clock of rank 0, and after each validation
    if ``saves_validated`` is set. The screen shows losses by time if ``shows_by_time`` is set, or
    without a print frequency. ``is_by_epoch`` is true if the unit is EPOCH, ``logs`` if there is a
    print frequency.
    """

    unit: TrainingUnit = TrainingUnit.EPOCH
    total_steps: float = 0
    limit: str = _LIMITS[0]
    max_steps: int | None = None
    valid_frequency: int | None = None
    validates_last: bool = False
    chkpt_frequency: int | None = None
    save_seconds: float | None = None
    saves_validated: bool = False
    print_frequency: int | None = None
    shows_by_time: bool = False
    accumulation_steps: int = 1
    early_stop_cycles: int | None = None

    is_by_epoch: bool = dataclasses.field(init=False)
    logs: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Read in every iteration, so they are attributes, not properties.
        object.__setattr__(self, "is_by_epoch", self.unit is TrainingUnit.EPOCH)
        object.__setattr__(self, "logs", self.print_frequency is not None)
        object.__setattr__(self, "shows_by_time", self.shows_by_time or not self.logs)


def ends_window(
    schedule: Schedule, *, iteration: int, batch: int, is_last: bool, is_manual: bool
) -> bool:
    """Return whether a batch is the last one of its accumulation window.

    Args:
        schedule: the options.
        iteration: the batch's value of ``global_iteration``.
        batch: its number in the epoch, from 0.
        is_last: whether it is the last batch of the epoch.
        is_manual: whether the model steps its optimizers itself.
    """
    if not schedule.is_by_epoch:
        return iteration % schedule.accumulation_steps == 0
    return is_manual or is_last or (batch + 1) % schedule.accumulation_steps == 0


def _is_multiple(count: int, frequency: int | None) -> bool:
    return frequency is not None and count > 0 and count % frequency == 0


def is_log_due(schedule: Schedule, state: TrainingState) -> bool:
    """Return whether ``should_log`` is true: the count is a multiple of ``print_frequency``."""
    if schedule.print_frequency is None:
        return False
    has_moved = schedule.is_by_epoch or (state.is_step_boundary and state.is_step_committed)
    return has_moved and _is_multiple(state.current_iteration, schedule.print_frequency)


def _is_due(schedule: Schedule, state: TrainingState, frequency: int | None) -> bool:
    if schedule.is_by_epoch:
        return _is_multiple(state.global_epoch, frequency)
    # A skipped update is not counted: what is due at this count has been done already.
    return state.is_step_committed and _is_multiple(state.current_iteration, frequency)


def is_validation_due(schedule: Schedule, state: TrainingState) -> bool:
    """Return whether a validation follows this boundary, a step or the end of an epoch."""
    is_last = schedule.validates_last and state.current_iteration >= schedule.total_steps
    return _is_due(schedule, state, schedule.valid_frequency) or is_last


def is_save_due(schedule: Schedule, state: TrainingState) -> bool:
    """Return whether ``chkpt_frequency`` requires a checkpoint at this boundary."""
    return _is_due(schedule, state, schedule.chkpt_frequency)


def find_next(schedule: Schedule, state: TrainingState) -> float:
    """Return the next count of steps at which anything may be due; infinity if there is none.

    Only used in ITERATION unit, because in EPOCH unit nothing is due inside an epoch.
    """
    done = state.current_iteration
    frequencies = (schedule.valid_frequency, schedule.chkpt_frequency)
    counts = (done - done % frequency + frequency for frequency in frequencies if frequency)
    return min(schedule.total_steps, *counts, float("inf"))


def is_out_of_patience(schedule: Schedule, state: TrainingState) -> bool:
    """Return whether the metrics have not improved ``early_stop_cycles`` times in a row."""
    return (
        schedule.early_stop_cycles is not None
        and state.validation_cycles > 0
        and state.early_stop_count >= schedule.early_stop_cycles
    )


def find_limit(schedule: Schedule, state: TrainingState, cursor: Cursor) -> str:
    """Return why the options end the run here; empty if they do not."""
    if is_out_of_patience(schedule, state):
        return f"{_IMPATIENCE} {state.early_stop_count} validations"
    if is_out_of_steps(schedule, state):
        return _REACHED.format("max_steps")
    return _REACHED.format(schedule.limit) if is_total_reached(schedule, state, cursor) else ""


def is_limit(reason: str) -> bool:
    """Return whether a run ended by its options (see :func:`find_limit`), not on request."""
    return reason in map(_REACHED.format, _LIMITS) or reason.startswith(_IMPATIENCE)


def is_out_of_steps(schedule: Schedule, state: TrainingState) -> bool:
    """Return whether a run that counts epochs has made ``max_steps`` steps."""
    return schedule.max_steps is not None and state.global_step >= schedule.max_steps


def is_total_reached(schedule: Schedule, state: TrainingState, cursor: Cursor) -> bool:
    """Return whether the run has reached ``total_steps``."""
    done = cursor.epoch if schedule.is_by_epoch else state.current_iteration
    return done >= schedule.total_steps
