"""A process on its device among the other processes of a run: ranks and collective calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from helios.distributed.collectives import get_dist_info, safe_barrier
from helios.distributed.process_groups import (
    DistributedInfo,
    is_dist_active,
    join_group,
    leave_group,
)
from helios.engines import metric_sync
from helios.engines.device import sync_to_device
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.launch.launcher import Launch, LaunchKind, spawn


def _as_device(device: object) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device, torch.device):
        return device
    rule = "Engine(device=...) must be a torch.device, the name of one or None"
    if not isinstance(device, str):
        raise ArgumentTypeError(f'{rule}, got {device!r}. Pass e.g. "cuda:1".')
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f'{rule}, got {device!r}. Pass e.g. "cuda:1". ({error})') from error


def redefines(owner: object, base: type, name: str) -> bool:
    """Return whether a user has redefined a method, in a subclass or on an object."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


class _Unmade:
    """Placeholder for the device of an engine whose constructor has not set it."""

    def __get__(self, engine: ProcessMember, kind: type[ProcessMember]) -> Any:
        raise UsageError(
            f"{kind.__name__}.__init__ must call super().__init__(device): without it the engine "
            "has neither a device nor a precision. Add the call as its first line."
        )


class ProcessMember:
    """A process on a device; the base of ``Engine``.

    Everything here also works outside of a process group, as the only process of a run.

    Args:
        device: the device of this process, by object or name; ``None`` for the first GPU, or the
            CPU if there is none.

    Attributes:
        device: as given.

    Raises:
        ArgumentError: if the name of the device is unknown.
        ArgumentTypeError: if it is not a device.
    """

    _internals: ClassVar[str] = "_has_joined _means device"

    device: torch.device = _Unmade()  # type: ignore[assignment]

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = _as_device(device)
        self._means: metric_sync.MetricMean | None = None
        self._has_joined = False

    def sync_device(self, value: Any) -> Any:
        """Return a value with its tensors, arrays and modules on the device.

        Copies dicts, lists, tuples, named tuples and dataclasses, moves tensors and modules, and
        converts NumPy arrays to tensors. Other values are returned unchanged.
        """
        return sync_to_device(value, self.device)

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0; -1 outside of a process group."""
        return get_dist_info().rank if self.is_ddp else -1

    @property
    def global_rank(self) -> int:
        """Number of this process among all, from 0; 0 outside of a process group too."""
        return max(self.rank, 0)

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0; -1 outside of a process group."""
        return get_dist_info().local_rank if self.is_ddp else -1

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return get_dist_info().world_size

    @property
    def backend(self) -> str | None:
        """Name of the process group's backend; ``None`` outside of a process group."""
        return str(dist.get_backend()) if self.is_ddp else None

    @property
    def is_ddp(self) -> bool:
        """Whether this process is in a process group."""
        return is_dist_active()

    @property
    def is_master_process(self) -> bool:
        """Whether this process is the first or the only one."""
        return self.rank <= 0

    @property
    def is_worker_process(self) -> bool:
        """Whether this process is not the first one."""
        return self.rank > 0

    def sync_tensor(self, tensor: Tensor, mode: str | None = None) -> Any:
        """Return a tensor's sum, mean or values over all processes; a collective call.

        Sums run along the tree over processes, so they do not depend on the backend.

        Args:
            tensor: the tensor of this process, which is not changed. No gradient flows back.
            mode: ``"sum"``; ``"mean"``, floating point also for integers; or ``"all"``, the list of
                the tensors in the order of ranks, whose shapes and types may differ. May be omitted
                in a single process, which gets the same tensor back in every mode.

        Raises:
            ArgumentError: if the mode is unknown, or missing with several processes.
            UsageError: if shapes or types differ in a sum or mean.
        """
        return metric_sync.sync_tensor(tensor, mode)

    def sync_metrics(self, metrics: Mapping[str, Any], weight: float = 1) -> Mapping[str, Any]:
        """Return the weighted mean of each metric over all processes, in one exchange.

        Args:
            metrics: numbers by name; a process may lack one.
            weight: the weight of this process's metrics, such as its number of samples.

        Raises:
            ArgumentError: if the weight is negative or not finite.
            UsageError: if all weights of a metric are zero.
        """
        if not (isinstance(weight, int | float) and 0 <= weight < math.inf):
            raise ArgumentError(
                "Engine.sync_metrics(weight=...) must be a number of at least 0, got "
                f"{weight!r}. Pass the number of samples, or omit it."
            )
        if not self.is_ddp:
            return metrics
        if self._means is None or not self._means.is_of_present_group():
            self._means = metric_sync.MetricMean()
        return self._means.mean(metrics, weight)

    def barrier(self) -> None:
        """Wait until all processes have reached this call. Returns at once outside of a group."""
        safe_barrier()

    def ddp_sync_run(self) -> AbstractContextManager[None]:
        """Return a context whose block runs on rank 0 first, then on all others.

        Use it to download on rank 0 what the others then read. If the block fails on one process,
        that process raises its error and all others a ``RankError`` that names it.
        """
        return metric_sync.first_rank_first("ddp_sync_run")

    def spawn(self, function: Callable[..., Any], *args: Any, num_processes: int = 1) -> list[Any]:
        """Run ``function(rank, *args)`` in processes that form a group, and return the results.

        Args:
            function: the function to run, defined at the top level of a module.
            *args: its arguments after the rank.
            num_processes: number of processes. One is a plain call in this process, without a
                group. On GPUs each process gets its own, starting with the first.
        """
        if num_processes == 1:
            return [function(max(self.rank, 0), *args)]
        devices = range(num_processes) if self.device.type == "cuda" else None
        return spawn(function, num_processes, args, devices=devices)

    def setup_process(
        self, rank: int | None = None, world_size: int | None = None, *, meeting: str = ""
    ) -> None:
        """Join the other processes, if there are any; not needed with a trainer.

        Afterwards a device without a number is this process's own.

        Args:
            rank: number of this process, from 0; omit it with a launcher (torchrun, srun).
            world_size: number of all processes; omit it with a launcher.
            meeting: where they connect, such as ``"file:///path"`` of a new file, or
                ``"tcp://host:port"``; omit it with a launcher.

        Raises:
            ArgumentError: if only one of ``rank`` and ``world_size`` is given.
            UsageError: if there is neither ``meeting`` nor a launcher.
        """
        self.device, has_joined = _join_process_group(self.device, rank, world_size, meeting)
        self._has_joined |= has_joined

    def cleanup_process(self, *, is_failing: bool = False) -> None:
        """Leave the group that :meth:`setup_process` has joined, if it has joined one.

        Args:
            is_failing: whether an error is being raised; then it does not wait for other processes.
        """
        if self._has_joined:
            self._has_joined = False
            leave_group(is_failing=is_failing)


def _join_process_group(
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
