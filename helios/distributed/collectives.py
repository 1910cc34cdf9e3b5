"""Ranks, world sizes, and the collectives that users call.

Everything also works without a process group, as rank 0 of one process, except the two
collectives. This module reads the environment variables of torchrun;
:mod:`helios.distributed.process_groups` joins and leaves groups.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from helios.distributed.process_groups import (
    DistributedInfo,
    collective,
    destroy_group,
    is_dist_active,
    join_group,
    own_membership,
)
from helios.errors import ArgumentError, UsageError

TORCHRUN_VARIABLES = (
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


# Not all collectives of gloo support GPU tensors, and those of NCCL support only GPU tensors.
_HOMES = {"gloo": "cpu", "nccl": "cuda"}
# all_gather_into_tensor is the name before PyTorch 2.13, which deprecates it.
_GATHER = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor


def is_using_torchrun() -> bool:
    """Return whether torchrun started this process, that is, whether its variables are set."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def init_dist(
    backend: str = "nccl", rank: int | None = None, world_size: int | None = None
) -> None:
    """Join the process group.

    Under torchrun, its variables determine rank and world size. Otherwise pass both; the
    processes connect through ``MASTER_ADDR`` (by default this machine) and ``MASTER_PORT``, which
    a single process does not need.

    Args:
        backend: ``"nccl"`` for CUDA, ``"gloo"`` for CPU.
        rank: global rank of this process, from 0.
        world_size: number of processes.

    Raises:
        ArgumentError: if only one of ``rank`` and ``world_size`` is given (a ``ValueError``).
        UsageError: if a required environment variable is not set (a ``RuntimeError``).
    """
    if (rank is None) != (world_size is None):
        raise ArgumentError(
            "init_dist(rank=..., world_size=...) needs both or neither, got "
            f"rank={rank}, world_size={world_size}. Pass both, or neither under torchrun."
        )
    meeting = "env://"
    if rank is None or world_size is None:
        rank, world_size = int(_read("RANK")), int(_read("WORLD_SIZE"))
    elif world_size > 1:
        meeting = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{_read('MASTER_PORT')}"
    info = read_place(rank, world_size)
    device = torch.device("cuda", info.local_rank) if backend == "nccl" else None
    join_group(info, backend=backend, meeting=meeting, device=device)


def _read(name: str) -> str:
    if name not in os.environ:
        raise UsageError(
            f"init_dist(...) needs the environment variable {name}, which is not set. Start the "
            "script with torchrun, or pass rank and world_size, and set MASTER_PORT to a free port "
            "on the machine of rank 0, and MASTER_ADDR to that machine, for all processes."
        )
    return os.environ[name]


def read_place(rank: int, world_size: int) -> DistributedInfo:
    """Return the place of a process; on this machine, torchrun's variables know it."""
    return DistributedInfo(
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        rank=rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        world_size=world_size,
    )


def shutdown_dist() -> None:
    """Leave the process group without waiting for other ranks; does nothing without a group."""
    if is_dist_active():
        destroy_group()


def get_dist_info() -> DistributedInfo:
    """Return the ranks and world sizes of this process; without a process group, rank 0 of 1.

    In a group that Helios has not joined, all processes are assumed to be on this machine unless
    the launcher sets ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
    """
    if not is_dist_active():
        return DistributedInfo()
    known = own_membership()
    if known is not None:
        return known.info
    return read_place(dist.get_rank(), dist.get_world_size())


def describe_rank() -> str:
    """Return e.g. ``"rank 2 of 4"`` for log lines; empty if there is only one process."""
    info = get_dist_info()
    return f"rank {info.rank} of {info.world_size}" if info.world_size > 1 else ""


def get_local_rank() -> int:
    """Return the rank of this process on its machine, from 0."""
    return get_dist_info().local_rank


def get_global_rank() -> int:
    """Return the global rank of this process, from 0."""
    return get_dist_info().rank


def get_local_world_size() -> int:
    """Return the number of processes on this machine."""
    return get_dist_info().local_world_size


def get_world_size() -> int:
    """Return the number of all processes."""
    return get_dist_info().world_size


def gather_into_tensor(tensor: torch.Tensor, size: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
    """Gather the tensors of all processes into one, on the device of ``tensor``.

    If the backend does not support that device, the tensor is moved, and the result moved back.

    Args:
        tensor: the tensor of this process; of the same shape in all processes.
        size: shape of the result: the tensors concatenated, or stacked, in the order of ranks.
        **kwargs: further arguments of ``torch.distributed.all_gather_single``, such as ``group``.

    Raises:
        UsageError: without a process group, or after a collective has failed (a
            ``RuntimeError``).
    """
    group = kwargs.get("group")
    with collective("gather_into_tensor"):
        own = tensor.detach().to(home_of(tensor, group)).reshape(-1)
        # Backends disagree on which shapes are compatible, except for flat ones.
        out = own.new_empty(dist.get_world_size(group) * own.numel())
        _GATHER(out, own, **kwargs)
    return out.view(size).to(tensor.device)


def all_reduce_tensors(
    tensor: torch.Tensor | list[torch.Tensor] | list[float], **kwargs: Any
) -> torch.Tensor:
    """Sum a tensor over all processes.

    The backend determines the order of summation, so sums of floats may differ for another number
    of processes.

    Args:
        tensor: a tensor on any device, which is changed in place; or a list of tensors of the same
            shape, or of numbers, which are stacked into a new tensor on a device of the backend.
        **kwargs: further arguments of ``torch.distributed.all_reduce``, such as ``op``.

    Returns:
        The reduced tensor.

    Raises:
        UsageError: without a process group, or after a collective has failed (a
            ``RuntimeError``).
    """
    with collective("all_reduce_tensors"):
        if isinstance(tensor, list):
            tensor = torch.stack([torch.as_tensor(item).detach() for item in tensor])
            tensor = tensor.to(home_of(tensor, kwargs.get("group")))
        moved = tensor.detach().to(home_of(tensor, kwargs.get("group")))
        dist.all_reduce(moved, **kwargs)
        if moved.device != tensor.device:
            tensor.detach().copy_(moved)
    return tensor


def home_of(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that a group's backend needs a tensor on: its own one, if possible.

    Args:
        tensor: the tensor to be sent.
        group: the process group; None for the default group.
    """
    kind = _HOMES.get(dist.get_backend(group), tensor.device.type)
    if kind == tensor.device.type:
        return tensor.device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def global_print(*args: Any, global_rank: int = 0, **kwargs: Any) -> None:
    """Print on one global rank only; takes the arguments of ``print``."""
    if not is_dist_active() or get_global_rank() == global_rank:
        print(*args, **kwargs)  # noqa: T201


def local_print(*args: Any, local_rank: int = 0, **kwargs: Any) -> None:
    """Print on one local rank of each machine only; takes the arguments of ``print``."""
    if not is_dist_active() or get_local_rank() == local_rank:
        print(*args, **kwargs)  # noqa: T201


def safe_barrier(**kwargs: Any) -> None:
    """Wait for all processes; does nothing without a process group."""
    if is_dist_active():
        with collective("safe_barrier"):
            dist.barrier(**kwargs)
