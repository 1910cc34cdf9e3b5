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
from dataclasses import dataclass
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
        rank: the global rank, from 0.
        world_size: the number of all processes.
        local_rank: the rank on this machine, from 0.
        local_world_size: the number of processes on this machine.
        meeting: URL of the rendezvous, for ``join_group``; empty for a single process, and in ranks
            of ``spawn``, which have joined their group already.
    """

    kind: LaunchKind = LaunchKind.PYTHON
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = ""

    @property
    def is_external(self) -> bool:
        """Whether a launcher has started all processes before the script ran."""
        return self.kind in (LaunchKind.TORCHRUN, LaunchKind.SRUN)

    @property
    def info(self) -> DistributedInfo:
        """The ranks of this process and the number of processes."""
        return DistributedInfo(
            local_rank=self.local_rank,
            rank=self.rank,
            local_world_size=self.local_world_size,
            world_size=self.world_size,
        )

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
            return _describe_spawned()
        if all(name in variables for name in TORCHRUN_VARIABLES):
            return _read_torchrun(variables)
        if all(name in variables for name in _SRUN_VARIABLES):
            launch = _read_srun(variables)
            if launch.world_size > 1:
                return launch
        _refuse_other_launchers(variables)
        return cls()


def _describe_spawned() -> Launch:
    info = get_dist_info()
    return Launch(
        kind=LaunchKind.SPAWN,
        rank=info.rank,
        world_size=info.world_size,
        local_rank=info.local_rank,
        local_world_size=info.local_world_size,
    )


def _read_torchrun(variables: Mapping[str, str]) -> Launch:
    return Launch(
        kind=LaunchKind.TORCHRUN,
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE"),
        meeting="env://",
    )


def _read_srun(variables: Mapping[str, str]) -> Launch:
    # The variables of the step take precedence, as it may have fewer tasks than the job.
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return Launch(
        kind=LaunchKind.SRUN,
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=_count_local_tasks(variables, world_size),
        meeting=_find_srun_meeting(variables) if world_size > 1 else "",
    )


def _find_srun_meeting(variables: Mapping[str, str]) -> str:
    """Return where the tasks of a step meet: the same for all of them, of no other step."""
    nodes = _number(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
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
    if "RANK" not in variables or _number(variables, "WORLD_SIZE", default=1) == 1:
        return
    missing = [name for name in TORCHRUN_VARIABLES if name not in variables]
    raise UsageError(
        f"The environment variable WORLD_SIZE={variables['WORLD_SIZE']} means that there are "
        f"several processes, but torchrun has not started them: {', '.join(missing)} are not set. "
        "Start the script with torchrun on every machine, or unset RANK and WORLD_SIZE to train in "
        "a single process."
    )


def _number(variables: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Return the first of these variables that is set."""
    for name in names:
        text = variables.get(name)
        if text:
            try:
                return int(text)
            except ValueError:
                raise UsageError(
                    f"The environment variable {name} must be an integer, got {text!r}. Start the "
                    "script with torchrun, srun or plain python, or correct the variable."
                ) from None
    if default is None:
        raise UsageError(
            f"The environment variable {names[0]} must be set by the launcher, but is not. Start "
            "the script with torchrun, srun or plain python."
        )
    return default
