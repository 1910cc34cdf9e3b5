"""Joins the process group of a run by hand, for scripts without a trainer."""

from __future__ import annotations

import torch

from helios.distributed.process_groups import DistributedInfo, is_dist_active, join_group
from helios.errors import ArgumentError, UsageError
from helios.launch.launcher import Launch, LaunchKind


def join_process_group(
    device: torch.device, rank: int | None, world_size: int | None, meeting: str
) -> tuple[torch.device, bool]:
    """Join the process group, if there is one to join; see ``Engine.setup_process``.

    Returns:
        The device of this process, and whether it has joined.
    """
    launch = Launch.read()
    info = _find_place(launch, rank, world_size)
    if device.type == "cuda":
        device = _choose_gpu(device, launch, info)
        torch.cuda.set_device(device)
    if is_dist_active() or (rank is None and info.world_size == 1):
        return device, False
    meeting = meeting or launch.meeting
    if info.world_size > 1 and not meeting:
        raise UsageError(
            f"Engine.setup_process(world_size={info.world_size}) must know where the processes "
            'meet. Pass e.g. meeting="file:///tmp/run-17" of a file that does not exist yet, start '
            "the script with torchrun, or let Engine.spawn start the processes."
        )
    is_gpu = device.type == "cuda"
    backend = "nccl" if is_gpu else "gloo"
    join_group(info, backend=backend, meeting=meeting, device=device if is_gpu else None)
    return device, True


def _find_place(launch: Launch, rank: int | None, world_size: int | None) -> DistributedInfo:
    if rank is None and world_size is None:
        return launch.info
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ArgumentError(
            "Engine.setup_process(rank=..., world_size=...) must get both, with 0 <= rank < "
            f"world_size, or neither, got rank={rank}, world_size={world_size}. Omit both "
            "if torchrun, srun or Engine.spawn has started the processes."
        )
    known = launch.info
    if (known.rank, known.world_size) == (rank, world_size):
        return known
    if known.world_size > 1:
        raise UsageError(
            f"Engine.setup_process(rank={rank}, world_size={world_size}) must agree with the "
            f"launcher: rank {known.rank} of {known.world_size}. Omit both."
        )
    return DistributedInfo(rank, rank, world_size, world_size)


def _choose_gpu(device: torch.device, launch: Launch, info: DistributedInfo) -> torch.device:
    """Return the GPU of a process: the one given by number, or else its own on its machine."""
    if device.index is not None:
        return device
    is_chosen = launch.kind is LaunchKind.SPAWN
    return torch.device("cuda", torch.cuda.current_device() if is_chosen else info.local_rank)
