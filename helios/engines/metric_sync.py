"""Exchanges values between processes by name: sums, means, all values, and rank 0 first.

Sums run along the tree over processes, so their bits are the same on every backend. Tensors are
moved to the device that the backend needs, and the results back to the original device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from helios.distributed.collectives import home_of
from helios.distributed.process_groups import collective, has_failed, is_dist_active, own_membership
from helios.errors import ArgumentError, ArgumentTypeError, RankError, UsageError
from helios.replicas.named_sums import NumberReducer
from helios.replicas.tree_reducer import TreeReducer

MODES = ("sum", "mean", "all")


def sync_tensor(tensor: Tensor, mode: str | None) -> Any:
    """Return a tensor's sum, mean or values over all processes; see ``Engine.sync_tensor``."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"sync_tensor(tensor=...) must be a tensor, got {tensor!r}. Pass torch.tensor(value)."
        )
    if mode not in (*MODES, None):
        raise ArgumentError(
            f'sync_tensor(mode=...) must be "sum", "mean" or "all", got {mode!r}. Correct the name.'
        )
    if not is_dist_active():
        return tensor
    if mode is None:
        raise ArgumentError(
            'sync_tensor(mode=...) must be "sum", "mean" or "all" with several processes, got '
            "None. Pass one of them."
        )
    kinds = gather_objects("sync_tensor", (tensor.dtype, tuple(tensor.shape)))
    if mode == "all":
        return _gather(tensor, kinds)
    if len(set(kinds)) > 1:
        raise UsageError(
            f'sync_tensor(mode="{mode}") must get tensors of one type and shape on all processes, '
            f'got {kinds}. Use mode="all" for shapes that differ.'
        )
    total = add_over_processes(tensor)
    return total if mode == "sum" else total / len(kinds)


def add_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum over all processes along the tree; for bool tensors the count of True."""
    with torch.no_grad():
        whole = tensor.detach().long() if tensor.dtype is torch.bool else tensor.detach()
        flat = whole.to(home_of(tensor), copy=True).contiguous().reshape(-1)
        reducer = make_reducer()
        with collective("sync_tensor"):
            total = reducer.all_reduce({reducer.nodes[0]: flat})
        return total.view(tensor.shape).to(tensor.device)


def make_reducer() -> TreeReducer:
    """Return a reducer for one tensor of each process of the default group."""
    count, rank = dist.get_world_size(), dist.get_rank()
    return TreeReducer(count, num_processes=count, rank=rank)


def _gather(tensor: Tensor, kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Return the tensors of all processes, sent as bytes and padded to the longest."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
    home = home_of(tensor)
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=home)
    own[: sizes[dist.get_rank()]] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    found = [torch.empty_like(own) for _ in kinds]
    if max(sizes):
        with collective("sync_tensor"):
            dist.all_gather(found, own)
    return [
        part[:size].view(dtype).view(shape).to(tensor.device)
        for part, size, (dtype, shape) in zip(found, sizes, kinds, strict=True)
    ]


def gather_objects(name: str, value: Any) -> list[Any]:
    """Return a small value of every process, in the order of ranks.

    Args:
        name: the caller, for messages.
        value: the value of this process, which is pickled.
    """
    found: list[Any] = [None] * dist.get_world_size()
    known = own_membership()
    with collective(name):
        dist.all_gather_object(found, value, group=None if known is None else known.control)
    return found


@contextmanager
def first_rank_first(name: str) -> Iterator[None]:
    """Run a block on rank 0, then on all others; all processes leave it together.

    Args:
        name: the caller, for messages.

    Raises:
        RankError: on the other processes if the block fails on one (a ``RuntimeError``).
    """
    if not is_dist_active():
        yield
        return
    is_first = dist.get_rank() == 0
    if not is_first:
        _expect_success(name, gather_objects(name, ""))
    try:
        yield
    except BaseException as error:
        if not has_failed():
            gather_objects(name, f"{type(error).__name__}: {error}")
        raise
    if is_first:
        gather_objects(name, "")
    _expect_success(name, gather_objects(name, ""))


def _expect_success(name: str, texts: list[str]) -> None:
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise RankError(
            f"{name}() was aborted because its block failed on {'; '.join(failed)}. Fix the error "
            "there; this process has no error of its own."
        )


@final
class MetricMean:
    """Weighted means of metrics over processes, in one exchange unless a name is new.

    Valid for one membership of a process group.
    """

    def __init__(self) -> None:
        count, rank = dist.get_world_size(), dist.get_rank()
        like = torch.empty(0)
        self._world = dist.group.WORLD
        self._reducer = NumberReducer(count, num_processes=count, rank=rank, device=home_of(like))

    def is_of_present_group(self) -> bool:
        """Whether the process is still in the group that this object was created in."""
        return is_dist_active() and self._world is dist.group.WORLD

    def mean(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """Return the weighted mean of each metric over the processes that have it.

        Raises:
            UsageError: if all weights of a metric are zero.
        """
        table = {name: (float(value) * weight, weight) for name, value in metrics.items()}
        with collective("sync_metrics"):
            sums = self._reducer.sum_scores([table])
        empty = [name for name, (_, total) in sums.items() if total == 0]
        if empty:
            raise UsageError(
                f"sync_metrics(weight=...) must be positive on at least one process for {empty}, "
                "got 0 on all. Omit metrics without samples."
            )
        return {name: total / weights for name, (total, weights) in sums.items()}
