"""Detects how this process was started.

torchrun and srun start all processes before the script runs; a script run with plain Python starts
them itself, with :func:`helios.launch.spawning.spawn`. This module reads SLURM's variables.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from helios.distributed.collectives import TORCHRUN_VARIABLES, get_dist_info
from helios.distributed.process_groups import DistributedInfo, is_dist_active
from helios.errors import UsageError
from helios.launch.rank import RANK_NAME

_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID")
# Below the ports that systems use for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15000, 15000


class LaunchKind(Enum):
    """The launcher that started this process."""

    PYTHON = "python"
    TORCHRUN = "torchrun"
    SRUN = "srun"
    SPAWN = "spawn"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        kind: the launcher.
        info: the ranks of this process and the number of processes.
        meeting: URL of the rendezvous, for ``join_group``; empty for a single process, and in ranks
            of ``spawn``, which have joined their group already.
    """

    kind: LaunchKind = LaunchKind.PYTHON
    info: DistributedInfo = field(default_factory=DistributedInfo)
    meeting: str = ""

    @property
    def is_external(self) -> bool:
        """Whether a launcher has started all processes before the script ran."""
        return self.kind in (LaunchKind.TORCHRUN, LaunchKind.SRUN)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Detect how this process was started.

        A single srun task is treated as plain Python, which may start more processes.

        Args:
            environment: the environment variables; None for those of this process.

        Raises:
            UsageError: if the variables describe several processes, but not how they connect (a
                ``RuntimeError``).
        """
        variables: Mapping[str, str] = os.environ if environment is None else environment
        if multiprocessing.current_process().name.startswith(RANK_NAME):
            return cls(LaunchKind.SPAWN, get_dist_info())
        if all(name in variables for name in TORCHRUN_VARIABLES):
            return _read_torchrun(variables)
        if all(name in variables for name in _SRUN_VARIABLES):
            launch = _read_srun(variables)
            if launch.info.world_size > 1:
                return launch
        _refuse_other_launchers(variables)
        return cls()


def _read_torchrun(variables: Mapping[str, str]) -> Launch:
    info = DistributedInfo(
        local_rank=int(variables["LOCAL_RANK"]),
        rank=int(variables["RANK"]),
        local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
        world_size=int(variables["WORLD_SIZE"]),
    )
    return Launch(LaunchKind.TORCHRUN, info, "env://")


def _read_srun(variables: Mapping[str, str]) -> Launch:
    # The variables of the step take precedence, as it may have fewer tasks than the job.
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    info = DistributedInfo(
        local_rank=int(variables["SLURM_LOCALID"]),
        rank=int(variables["SLURM_PROCID"]),
        local_world_size=_count_local_tasks(variables, world_size),
        world_size=world_size,
    )
    return Launch(LaunchKind.SRUN, info, _find_srun_meeting(variables) if world_size > 1 else "")


def _find_srun_meeting(variables: Mapping[str, str]) -> str:
    """Return where the tasks of a step meet: the same for all of them, of no other step."""
    nodes = _number(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    host = variables.get("MASTER_ADDR") or _find_first_node(variables, nodes)
    if not host:
        raise UsageError(
            f"srun has started this training on {nodes} machines, but neither SLURM_STEP_NODELIST "
            "nor MASTER_ADDR, the machine of rank 0, is set. Add this line before srun: export "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    job, step, restarts = (
        _number(variables, f"SLURM_{name}", default=0)
        for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    )
    # Jobs of an array have consecutive numbers, and often share a machine: no two have one port.
    free = _FIRST_PORT + (job + zlib.crc32(b"%d" % step)) % _NUM_PORTS
    return f"tcp://{host}:{variables.get('MASTER_PORT') or free}/{job}.{step}.{restarts}"


def _find_first_node(variables: Mapping[str, str], nodes: int) -> str:
    """Return the machine of rank 0, the first of e.g. ``"gpu[003-005,009],cpu1"``; may be empty."""
    if nodes == 1:
        return "127.0.0.1"
    names = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(\[[^]]*\]|[^,[])*", names)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else "")


def _count_local_tasks(variables: Mapping[str, str], world_size: int) -> int:
    """Return the number of tasks on this machine, from e.g. ``"4(x2),3"`` for three machines."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for number, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(repeats or 1)
    node = _number(variables, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else world_size


def _refuse_other_launchers(variables: Mapping[str, str]) -> None:
    """Raise an error if an unknown launcher has started several processes."""
    if is_dist_active():
        # The script has joined a process group itself.
        return
    if "RANK" not in variables or _number(variables, "WORLD_SIZE") == 1:
        return
    missing = [name for name in TORCHRUN_VARIABLES if name not in variables]
    raise UsageError(
        f"The environment variable WORLD_SIZE={variables['WORLD_SIZE']} means that there are "
        f"several processes, but torchrun has not started them: {', '.join(missing)} are not set. "
        "Start the script with torchrun on every machine, or unset RANK and WORLD_SIZE to train in "
        "a single process."
    )


def _number(variables: Mapping[str, str], *names: str, default: int = 1) -> int:
    """Return the first of these variables that is set."""
    return int(next(filter(None, map(variables.get, names)), default))
