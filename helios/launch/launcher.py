"""Detects how this process was started.

torchrun and srun start all processes before the script runs; a script run with plain Python starts
them itself, with :func:`helios.launch.spawning.spawn`. This module reads SLURM's variables.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import zlib
from dataclasses import dataclass, field
from enum import Enum

from helios.distributed.collectives import (
    TORCHRUN_VARIABLES,
    get_dist_info,
    is_using_torchrun,
    read_place,
)
from helios.distributed.process_groups import DistributedInfo, is_dist_active
from helios.errors import UsageError
from helios.launch.rank import RANK_NAME

_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID")
# Below the ports that systems use for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15000, 15000


class LaunchKind(Enum):
    """The launcher that started this process; ``JOINED`` if the script has joined a group."""

    PYTHON = "python"
    TORCHRUN = "torchrun"
    SRUN = "srun"
    SPAWN = "spawn"
    JOINED = "joined"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        kind: the launcher.
        info: the ranks of this process and the number of processes.
        meeting: URL of the rendezvous, for ``join_group``; empty for a single process, and for
            processes that have joined their group already.
    """

    kind: LaunchKind = LaunchKind.PYTHON
    info: DistributedInfo = field(default_factory=DistributedInfo)
    meeting: str = ""

    @property
    def is_external(self) -> bool:
        """Whether a launcher has started all processes before the script ran."""
        return self.kind in (LaunchKind.TORCHRUN, LaunchKind.SRUN)

    @property
    def is_given(self) -> bool:
        """Whether the number of processes is already fixed."""
        return self.kind is not LaunchKind.PYTHON

    @classmethod
    def read(cls) -> Launch:
        """Detect how this process was started.

        A single srun task is treated as plain Python, which may start more processes.

        Raises:
            UsageError: if the variables describe several processes, but not how they connect (a
                ``RuntimeError``).
        """
        if multiprocessing.current_process().name.startswith(RANK_NAME):
            return cls(LaunchKind.SPAWN, get_dist_info())
        launch = _read_torchrun() if is_using_torchrun() else _read_srun()
        if is_dist_active():
            kind = launch.kind if launch.is_external else LaunchKind.JOINED
            return cls(kind, get_dist_info())
        if not launch.is_external:
            _refuse_other_launchers()
        return launch


def _read_torchrun() -> Launch:
    place = read_place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return Launch(LaunchKind.TORCHRUN, place, "env://")


def _read_srun() -> Launch:
    world_size = _number("SLURM_STEP_NUM_TASKS", default=1)
    if world_size == 1 or any(name not in os.environ for name in _SRUN_VARIABLES):
        return Launch()
    info = DistributedInfo(
        local_rank=int(os.environ["SLURM_LOCALID"]),
        rank=int(os.environ["SLURM_PROCID"]),
        local_world_size=_count_local_tasks(world_size),
        world_size=world_size,
    )
    return Launch(LaunchKind.SRUN, info, _find_srun_meeting())


def _find_srun_meeting() -> str:
    """Return where the tasks of a step meet: the same for all of them, of no other step."""
    host = os.environ.get("MASTER_ADDR") or _find_first_node()
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restarts = map(_number, names)
    # Jobs of an array have consecutive numbers, and often share a machine: no two have one port.
    free = _FIRST_PORT + (job + zlib.crc32(b"%d" % step)) % _NUM_PORTS
    return f"tcp://{host}:{os.environ.get('MASTER_PORT') or free}/{job}.{step}.{restarts}"


def _find_first_node() -> str:
    """Return the machine of rank 0, the first of e.g. ``"gpu[003-005,009],cpu1"``."""
    if _number("SLURM_STEP_NUM_NODES", default=1) == 1:
        return "127.0.0.1"
    first = re.match(r"(\[[^]]*\]|[^,[])*", os.environ["SLURM_STEP_NODELIST"])
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else "")


def _count_local_tasks(world_size: int) -> int:
    """Return the number of tasks on this machine, from e.g. ``"4(x2),3"`` for three machines."""
    counts: list[int] = []
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for number, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(repeats or 1)
    node = _number("SLURM_NODEID")
    return counts[node] if node < len(counts) else world_size


def _refuse_other_launchers() -> None:
    """Raise an error if an unknown launcher has started several processes."""
    if "RANK" not in os.environ or _number("WORLD_SIZE", default=1) == 1:
        return
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    raise UsageError(
        f"The environment variable WORLD_SIZE={os.environ['WORLD_SIZE']} means that there are "
        f"several processes, but torchrun has not started them: {', '.join(missing)} are not set. "
        "Start the script with torchrun on every machine, or unset RANK and WORLD_SIZE to train in "
        "a single process."
    )


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name) or default)
