"""Numbers as sums take them: in float64, whatever type a model computes in; and single ones.

A total of a coarse type stops growing: in bf16, 256 + 1 is 256, and fp16 ends at 65504.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from helios.errors import UsageError


def as_summand(value: Any) -> Any:
    """Return a number for a sum: tensors and NumPy's numbers in float64, all others as they are.

    A tensor stays on its device, without its graph; where the device lacks float64, as Apple's GPUs
    do, it is in float32.
    """
    if isinstance(value, Tensor):
        try:
            return _cast(value, torch.float64)
        except (TypeError, RuntimeError):
            return _cast(value, torch.float32)
    return float(value) if isinstance(value, np.number | np.bool_) else value


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A complex number stays one: it is refused where a real number is needed.
    return value.detach().to(torch.promote_types(value.dtype, dtype))


@final
class RunningSums:
    """Sums of losses by name, in float64 and on their device.

    Sums of plain tensors of the CPU are numbers meanwhile, which cost a fraction of an operation on
    tensors, and become tensors where the table is read.

    Args:
        table: the sums so far.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table
        # Newer than what the table has under the same names.
        self._numbers: dict[str, float] = {}

    def add(self, losses: Mapping[str, Any]) -> None:
        """Add losses: numbers or tensors, which are not changed."""
        numbers = self._numbers
        for name, loss in losses.items():
            if type(loss) is Tensor and loss.is_cpu and not loss.ndim:
                value = loss.item()
                known = numbers.get(name)
                if known is None and type(value) is float:
                    known = self._as_number(name)
                if known is not None:
                    numbers[name] = known + value
                    continue
            table = self.table()
            part = loss.detach() if isinstance(loss, Tensor) and loss.requires_grad else loss
            # Not in place: a sum that a hook has kept would change, but not after a resume. The
            # first loss gives the sum its type, so later ones need no cast of their own.
            table[name] = table[name] + part if name in table else as_summand(part)

    def _as_number(self, name: str) -> float | None:
        """Return the sum of a name as a number; ``None`` if it must be a tensor."""
        # Adding to negative zero returns each number as it is; the entry keeps the place.
        known = self._table.setdefault(name, -0.0)
        if isinstance(known, Tensor):
            is_number = known.is_cpu and not known.ndim and known.dtype is torch.float64
            return known.item() if is_number and type(known) is Tensor else None
        return known if type(known) is float else None

    def table(self) -> dict[str, Any]:
        """Return the table, in which sums of tensors are tensors."""
        for name, number in self._numbers.items():
            self._table[name] = torch.tensor(number, dtype=torch.float64, device="cpu")
        self._numbers.clear()
        return self._table


def as_number(name: str, value: Any) -> float:
    """Return a logged value as a number; copies a tensor from its device.

    Args:
        name: the name that it is logged under, for the error message.
        value: a number, or a tensor of one element.

    Raises:
        UsageError: if it is not a single number.
    """
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"A logged value must be a single number, but {name!r} is {value!r}. Log a number, or "
            "a tensor of one element."
        ) from error


def as_numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores that are single numbers, as floats."""
    numbers = {}
    for name, score in scores.items():
        if isinstance(score, Tensor) and score.numel() == 1:
            score = score.item()
        if isinstance(score, int | float):
            numbers[str(name)] = float(score)
    return numbers
