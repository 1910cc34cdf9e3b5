"""Other processes: who we are among them, and the collectives that users call by name.

Everything here also works without a process group, as rank 0 of one process; only the two
collectives ask for one. The environment variables of a launcher are read here.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from helios.errors import ArgumentError, UsageError

# The port that the historical API used; a launcher that knows a free one sets MASTER_PORT.
_FALLBACK_PORT = "12355"
_TORCHRUN_VARIABLES = (
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)


@dataclasses.dataclass(frozen=True)
class DistributedInfo:
    """Where this process stands among all.

    Attributes:
        local_rank: its number on this machine, from 0.
        rank: its number among all processes, from 0.
        local_world_size: processes on this machine.
        world_size: all processes.
    """

    local_rank: int = 0
    rank: int = 0
    local_world_size: int = 1
    world_size: int = 1


def is_using_torchrun() -> bool:
    """Return whether torchrun started this process: all of its variables are set (H48)."""
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def launched_world_size() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if is_using_torchrun() else 1


def init_dist(
    backend: str = "nccl", rank: int | None = None, world_size: int | None = None
) -> None:
    """Join the process group.

    Under torchrun its variables say who takes part. Otherwise pass ``rank`` and ``world_size``:
    the processes meet at ``MASTER_ADDR`` and ``MASTER_PORT`` where these are set, else at a fixed
    port of this machine; a single process needs no port.

    Args:
        backend: ``"nccl"`` for CUDA, ``"gloo"`` for CPU.
        rank: number of this process, from 0.
        world_size: number of processes.

    Raises:
        ArgumentError: when only one of ``rank`` and ``world_size`` is given (a ``ValueError``).
    """
    if rank is None and world_size is None:
        dist.init_process_group(backend)
        return
    if rank is None or world_size is None:
        raise ArgumentError(
            "init_dist(rank=..., world_size=...) must get both or neither, got "
            f"rank={rank}, world_size={world_size}; pass both, or none under torchrun."
        )
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("MASTER_PORT", _FALLBACK_PORT)
    meeting: dict[str, Any] = {"init_method": f"tcp://{host}:{port}"}
    if world_size == 1:
        meeting = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    device = torch.device("cuda", rank) if backend == "nccl" else None
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device, **meeting)


def shutdown_dist() -> None:
    """Leave the process group; nothing where there is none."""
    if is_dist_active():
        dist.destroy_process_group()


def is_dist_active() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def get_dist_info() -> DistributedInfo:
    """Return where this process stands; without a process group, rank 0 of 1 (DESIGN C9).

    A launcher that does not set ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` is taken to have started
    all processes on this machine.
    """
    if not is_dist_active():
        return DistributedInfo()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return DistributedInfo(
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        rank=rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        world_size=world_size,
    )


def get_local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return get_dist_info().local_rank


def get_global_rank() -> int:
    """Return the number of this process among all, from 0."""
    return get_dist_info().rank


def get_local_world_size() -> int:
    """Return the number of processes on this machine."""
    return get_dist_info().local_world_size


def get_world_size() -> int:
    """Return the number of all processes."""
    return get_dist_info().world_size


def gather_into_tensor(tensor: torch.Tensor, size: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
    """Join the tensors of all processes into one, on the device of ``tensor`` (H64).

    Args:
        tensor: what this process adds; of the same shape everywhere.
        size: shape of the result: the tensors concatenated, or stacked, in the order of ranks.
        **kwargs: further arguments of ``torch.distributed.all_gather_into_tensor``.

    Raises:
        UsageError: without a process group (a ``RuntimeError``).
    """
    _require_group("gather_into_tensor")
    out = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(out, tensor.contiguous(), **kwargs)
    return out


def all_reduce_tensors(
    tensor: torch.Tensor | list[torch.Tensor] | list[float], **kwargs: Any
) -> torch.Tensor:
    """Sum a tensor over all processes (H64).

    The order in which ranks are added is the backend's, so the sum of floats is not promised to
    be the same on another number of processes.

    Args:
        tensor: a tensor, which is changed in place; or a list of tensors of one shape, or of
            numbers, which is stacked into a new one.
        **kwargs: further arguments of ``torch.distributed.all_reduce``, such as ``op``.

    Returns:
        The reduced tensor.

    Raises:
        UsageError: without a process group (a ``RuntimeError``).
    """
    _require_group("all_reduce_tensors")
    if isinstance(tensor, list):
        tensor = torch.stack([torch.as_tensor(item).detach() for item in tensor])
        if dist.get_backend() == "nccl":
            tensor = tensor.cuda()
    dist.all_reduce(tensor, **kwargs)
    return tensor


def _require_group(caller: str) -> None:
    if not is_dist_active():
        raise UsageError(
            f"{caller}(...) needs a process group, and this process is in none; train on several "
            "processes, call init_dist(...) first, or ask is_dist_active() before."
        )


def global_print(*args: Any, global_rank: int = 0, **kwargs: Any) -> None:
    """Print on one rank only; takes the arguments of ``print``."""
    if not is_dist_active() or get_global_rank() == global_rank:
        print(*args, **kwargs)  # noqa: T201


def local_print(*args: Any, local_rank: int = 0, **kwargs: Any) -> None:
    """Print on one rank of each machine only; takes the arguments of ``print``."""
    if not is_dist_active() or get_local_rank() == local_rank:
        print(*args, **kwargs)  # noqa: T201


def safe_barrier(**kwargs: Any) -> None:
    """Wait until all processes are here; nothing without a process group."""
    if is_dist_active():
        dist.barrier(**kwargs)
