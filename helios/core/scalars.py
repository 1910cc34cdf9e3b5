"""Converts losses, scores and logged values to numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from helios.errors import UsageError


def as_number(name: str, value: Any) -> float:
    """Return a logged value as a number; copies a tensor from its device.

    Args:
        name: the name that it is logged under, for the error message.
        value: a number, or a tensor of one element.

    Raises:
        UsageError: if it is not a single number.
    """
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"A logged value must be a single number, but {name!r} is {value!r}. Log a number, or "
            "a tensor of one element."
        ) from error


def as_numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores that are single numbers, as floats."""
    numbers = {}
    for name, score in scores.items():
        if isinstance(score, torch.Tensor) and score.numel() == 1:
            score = score.item()
        if isinstance(score, int | float):
            numbers[str(name)] = float(score)
    return numbers


def as_json(value: float) -> float | str:
    """Return a number as JSON has it: NaN and infinities become strings that ``float`` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
