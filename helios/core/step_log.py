"""The numbers that a step logs with ``Model.log``: sums of values times weights, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from helios.core.loss_means import as_summand
from helios.errors import ArgumentError, ArgumentTypeError


@final
class StepLog:
    """Adds up the numbers of a step, in float64 and without waiting for the device.

    Args:
        find_size: returns the number of samples of the batch; ``None`` if it is unknown.

    Attributes:
        sums: the sum and the weight of each name; its reader begins with an empty table again.
    """

    def __init__(self, find_size: Callable[[], int | None]) -> None:
        self._find_size = find_size
        self.sums: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, weight: float | None) -> None:
        """Add a value.

        Args:
            name: its name.
            value: a number, or a tensor of one element.
            weight: how many items it is the mean of; ``None`` for the samples of the batch.

        Raises:
            ArgumentTypeError: for a name that is not a string, or a value that is not a number.
            ArgumentError: if no weight is given, and the samples of the batch are not known.
        """
        # Operations on Python's floats are those of float64, and cost a tenth.
        if type(value) is Tensor and value.is_cpu and value.numel() == 1:
            value = value.item()
        if type(value) is not float or type(name) is not str:
            value = _check(name, value)
        if weight is None:
            weight = self._find_size()
        if weight is None or not 0 <= weight < math.inf:
            raise _make_weight_error(name, weight)
        known = self.sums.get(name)
        if known is None:
            self.sums[name] = value * weight, weight
        else:
            self.sums[name] = known[0] + value * weight, known[1] + weight


def _check(name: str, value: Any) -> float | Tensor:
    """Return a value as a summand, if it is a single real number under a name."""
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"self.log(name, value) must get the name first, got {name!r}. Write e.g. "
            'self.log("accuracy", accuracy).'
        )
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.numel() == 1 and not value.is_complex():
        summand: Tensor = as_summand(value.reshape(()))
        return summand
    if is_tensor or not _is_real(value):
        shown = tuple(value.shape) if is_tensor else repr(value)
        raise ArgumentTypeError(
            f"self.log({name!r}, ...) must get a number or a tensor of one element, got "
            f"{shown}. Reduce it, e.g. value.mean()."
        )
    return float(value)


def _make_weight_error(name: str, weight: float | None) -> ArgumentError:
    rule = "a finite number of at least 0"
    if weight is None:
        rule = "passed, because the loader does not say how many samples a batch has"
    return ArgumentError(
        f"self.log({name!r}, ..., weight=...) must be {rule}, got {weight!r}. Pass how many "
        "samples the value is the mean of."
    )


def _is_real(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
