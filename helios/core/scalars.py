"""Single numbers out of what users hand in: losses, scores, what is logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from helios.errors import UsageError


def as_number(name: str, value: Any) -> float:
    """Return what is logged under a name as a number; reads a tensor from its device.

    Raises:
        UsageError: if it is no single number.
    """
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"What is logged must be one number, but {name!r} is {value!r}. Log a number, or a "
            "tensor of one element."
        ) from error


def as_numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return those scores that are single numbers, as such."""
    numbers = {}
    for name, score in scores.items():
        if isinstance(score, torch.Tensor) and score.numel() == 1:
            score = score.item()
        if isinstance(score, int | float):
            numbers[str(name)] = float(score)
    return numbers
