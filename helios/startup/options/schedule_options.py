"""Options that decide when something happens, as a ``Schedule``."""

from __future__ import annotations

import math

from helios.schedule import Schedule
from helios.startup.options.validators import check_count, refusal
from helios.state import TrainingUnit


def make_schedule(
    *,
    train_unit: TrainingUnit | str,
    total_steps: float,
    valid_frequency: int | None,
    chkpt_frequency: int | None,
    print_frequency: int | None,
    accumulation_steps: int,
    early_stop_cycles: int | None,
) -> Schedule:
    """Return the schedule of a trainer; see ``Trainer`` for the meaning of each option.

    Raises:
        ArgumentError: if a value is invalid.
    """
    unit = _as_unit(train_unit)
    _check_total(total_steps)
    check_count("valid_frequency", valid_frequency)
    check_count("chkpt_frequency", chkpt_frequency)
    check_count("print_frequency", print_frequency)
    if type(accumulation_steps) is not int or accumulation_steps < 1:
        rule = "a positive int"
        raise refusal("accumulation_steps", rule, accumulation_steps, "Pass 1 for none.")
    check_count("early_stop_cycles", early_stop_cycles, least=0)
    if total_steps == math.inf and early_stop_cycles == 0:
        rule = "at least 1 with total_steps=inf"
        raise refusal("early_stop_cycles", rule, 0, "Pass a patience, or None for no limit.")
    return Schedule(
        unit=unit,
        total_steps=total_steps,
        valid_frequency=valid_frequency,
        chkpt_frequency=chkpt_frequency,
        print_frequency=print_frequency,
        accumulation_steps=accumulation_steps,
        early_stop_cycles=early_stop_cycles,
    )


def _as_unit(value: object) -> TrainingUnit:
    if isinstance(value, TrainingUnit):
        return value
    if value == "step":
        return TrainingUnit.ITERATION
    if value in ("epoch", "iteration"):
        return TrainingUnit.from_str(str(value))
    rule = '"epoch", "iteration", "step" or a TrainingUnit'
    raise refusal("train_unit", rule, value, "Correct the unit.")


def _check_total(value: object) -> None:
    is_count = type(value) is int and value >= 0
    if not is_count and value != math.inf:
        raise refusal(
            "total_steps", "a non-negative int or inf", value, "Pass e.g. 10, or float('inf')."
        )
