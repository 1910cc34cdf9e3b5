"""How many processes run how many replicas, and the rank of this process.

The number of processes (P) is the world size of torchrun or srun, else ``nproc``, else the number
of selected GPUs, else 1. The number of replicas (V) is that of the existing run, else
``num_replicas``, else P.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from helios.distributed.collectives import get_dist_info
from helios.distributed.process_groups import DistributedInfo, is_dist_active, membership
from helios.engines.device import device_of_rank
from helios.errors import ArgumentError, RunMismatchError, UsageError
from helios.launch.launcher import Launch, LaunchKind
from helios.replicas.replicas import Replicas
from helios.startup.options.engine_options import EngineOptions, ProcessOptions

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """Facts about a run that its checkpoint holds.

    Attributes:
        num_replicas: number of its replicas; 0 if a migrated file does not say it.
        path: the checkpoint.
        origin: the path of ``resume=<path>`` from which the run was started, if any.
    """

    num_replicas: int
    path: Path
    origin: str | None = None


@dataclass(frozen=True)
class ThisProcess:
    """How this process was started, and its rank, before a call of the trainer.

    Attributes:
        launch: how it was started.
        info: its rank among all processes.
        is_given: whether the number of processes is already fixed.
    """

    launch: Launch
    info: DistributedInfo
    is_given: bool

    @classmethod
    def find(cls) -> ThisProcess:
        """Detect it; a process group that the script has joined counts as a launcher."""
        launch = Launch.read()
        if is_dist_active():
            return cls(launch, get_dist_info(), is_given=True)
        return cls(launch, launch.info, is_given=launch.kind is not LaunchKind.PYTHON)

    @property
    def text(self) -> str:
        """A text that says what has started the processes, and how many."""
        kind, count = self.launch.kind, self.info.world_size
        if self.launch.is_external:
            return f"{kind.value} has started {_count(count, 'process')}"
        return f"the script has joined a group of {_count(count, 'process')}"

    def device_for(self, options: EngineOptions) -> torch.device:
        """Return the device of this process.

        Raises:
            UsageError: if there is none for it.
        """
        if options.engine is not None:
            return options.engine.device
        return device_of_rank(options.gpu_ids, self.info.local_rank)

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """Join the group of all processes for a block; does nothing with a single process."""
        if self.info.world_size == 1:
            yield
            return
        is_gpu = device.type == "cuda"
        if is_gpu:
            index = self.info.local_rank if device.index is None else device.index
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        with membership(
            self.info,
            backend="nccl" if is_gpu else "gloo",
            meeting=self.launch.meeting,
            device=device if is_gpu else None,
        ):
            yield


@dataclass(frozen=True)
class Plan:
    """Which processes run which replicas.

    Attributes:
        num_replicas: V; 0 if every process works on its own.
        num_processes: P.
        info: the rank of this process.
        has_prepared: whether the process that started this one has already prepared the data.
    """

    num_replicas: int
    num_processes: int
    info: DistributedInfo = field(default_factory=DistributedInfo)
    has_prepared: bool = False

    def make_team(self) -> Replicas:
        """Return all processes, for what they do together."""
        return Replicas(self.info.world_size, self.info)

    def make_replicas(self, device: torch.device, *, is_sharded: bool) -> Replicas:
        """Return the replicas of the run, assigned as planned.

        Args:
            device: the device of this process.
            is_sharded: whether models are sharded over the processes.
        """
        if self.num_replicas == 0:
            return Replicas()
        return Replicas(self.num_replicas, self.info, device=device, is_sharded=is_sharded)


def choose_processes(
    options: ProcessOptions, engine: EngineOptions, process: ThisProcess, stored: Stored | None
) -> int:
    """Return the number of processes, P.

    Raises:
        ArgumentError: if ``nproc`` contradicts the launcher or the GPUs.
    """
    nproc = options.nproc
    if process.is_given:
        if nproc not in (None, process.info.world_size):
            raise ArgumentError(
                f"Trainer(nproc=...) must be None or the number of processes that exist, but "
                f"{process.text}, and nproc is {nproc}. Omit it."
            )
        if engine.gpus is not None and len(engine.gpus) < process.info.local_world_size:
            raise ArgumentError(
                "Trainer(gpus=...) must name a GPU for each process of this machine, of which "
                f"there are {process.info.local_world_size}, got {engine.gpus}. Name more, or "
                "start fewer processes."
            )
        return process.info.world_size
    num_gpus = len(engine.gpu_ids)
    if nproc is not None:
        _check_gpus(engine, nproc)
        return nproc
    limit = options.num_replicas if stored is None else stored.num_replicas
    count = max(1, num_gpus if engine.engine is None else 1)
    if limit is not None and limit < count:
        _LOGGER.info("Of %d GPUs, %d are used: the run has %d replicas.", count, limit, limit)
        return limit
    return count


def _check_gpus(engine: EngineOptions, nproc: int) -> None:
    num_gpus = len(engine.gpu_ids)
    if num_gpus == 0 or nproc <= num_gpus:
        return
    if engine.engine is not None:
        raise ArgumentError(
            f"Trainer(nproc=...) must be 1 with an engine on {engine.engine.device}, since each "
            f"process needs its own GPU, got {nproc}. Omit engine, or start the processes with "
            "torchrun, where each creates its engine."
        )
    raise ArgumentError(
        f"Trainer(nproc=...) must be at most the number of GPUs, {num_gpus}, got {nproc}. Start "
        "fewer processes, each of which runs several replicas, or pass use_cpu=True."
    )


def choose_replicas(
    options: ProcessOptions, process: ThisProcess, stored: Stored | None, num_processes: int
) -> int:
    """Return the number of replicas, V.

    Raises:
        RunMismatchError: if the run was started with another number than ``num_replicas``.
        UsageError: if there are more processes than replicas.
    """
    asked = options.num_replicas
    if stored is not None and asked not in (None, stored.num_replicas):
        raise RunMismatchError(
            f"The run was started with {_count(stored.num_replicas, 'replica')} ({stored.path}), "
            f"but Trainer(num_replicas={asked}) sets another number. It defines what a batch and a "
            "step are, so it must not change. Omit num_replicas to resume (nproc may change), or "
            "start a new run: with another save_name, or resume='never'."
        )
    count = asked if stored is None else stored.num_replicas
    if count is None:
        return num_processes
    if num_processes > count:
        who = process.text if process.is_given else f"Trainer(nproc={num_processes}) requests more"
        where = f"num_replicas is {count}" if stored is None else f"as started: {stored.path}"
        raise UsageError(
            f"A run of {_count(count, 'replica')} ({where}) can use at most "
            f"{_count(count, 'process')}, but {who}. Start fewer, or start a new run with more "
            "replicas."
        )
    return count


def describe_processes(replicas: Replicas) -> str:
    """Return how many processes run how many replicas, for the banner."""
    carriers = _count(replicas.num_processes, "process")
    return f"{carriers}, {_count(replicas.num_replicas, 'replica')}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
