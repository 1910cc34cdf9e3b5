"""The norm of gradients as a sum over rows, whose order does not depend on who holds which row.

Each row is a row of a parameter's first dimension. Its squares are added by halving, element by
element, in float32; the rows are then added at once, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from helios.core.sharded_tensors import is_sharded, local_of
from helios.distributed.process_groups import collective
from helios.errors import UsageError


def norm_by_rows(
    gradients: Sequence[Tensor], num_processes: int = 1, *, norm_type: float = 2.0
) -> Tensor:
    """Return a norm of all gradients, with the same bits for any number of processes.

    Args:
        gradients: at least one; all are sharded over the processes, or none is.
        num_processes: number of processes that hold shards; all of them call this together.
        norm_type: 2, or ``inf`` for the largest magnitude.

    Returns:
        A float32 tensor without dimensions, on the device of the gradients.

    Raises:
        UsageError: for another norm.
    """
    if norm_type not in (2.0, math.inf):
        raise UsageError(
            f"The norm of sharded gradients must be of type 2 or inf, got {norm_type}: others "
            "depend on the number of processes. Pass norm_type=2.0."
        )
    is_largest = norm_type == math.inf
    measure = _largest_of_rows if is_largest else _row_squares
    with torch.no_grad():
        rows = [measure(local_of(gradient)) for gradient in gradients]
        if is_sharded(gradients[0]):
            counts = [gradient.shape[0] if gradient.dim() else 1 for gradient in gradients]
            rows = _gather_rows(rows, counts, num_processes)
        values = torch.cat(rows)
        return values.max() if is_largest else values.double().sum().sqrt().float()


def _largest_of_rows(local: Tensor) -> Tensor:
    count = local.shape[0] if local.dim() else 1
    if local.numel() == 0:
        return local.new_zeros(count, dtype=torch.float32)
    return local.to(torch.float32).reshape(count, -1).abs().amax(1)


def _row_squares(local: Tensor) -> Tensor:
    """Return the sum of squares of each row; its bits depend on that row only."""
    count = local.shape[0] if local.dim() else 1
    if local.numel() == 0:
        return local.new_zeros(count, dtype=torch.float32)
    squares = local.detach().to(torch.float32).reshape(count, -1).square()
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares[:, 0]


def _gather_rows(rows: list[Tensor], counts: list[int], num_processes: int) -> list[Tensor]:
    """Return the rows of all processes. The first processes have ceil(count / P) of each."""
    sizes = [-(-count // num_processes) for count in counts]
    own = torch.cat(
        [pad(part, (0, size - len(part))) for part, size in zip(rows, sizes, strict=True)]
    )
    found = [torch.empty_like(own) for _ in range(num_processes)]
    with collective("norm_by_rows"):
        dist.all_gather(found, own)
    parts = torch.split(torch.stack(found), sizes, dim=1)
    return [part.reshape(-1)[:count] for part, count in zip(parts, counts, strict=True)]
