"""Detects how this process was started, and starts the processes of a run.

torchrun and srun start all processes before the script runs; a script run with plain Python can
start them itself with :func:`spawn`. This module reads the environment variables of SLURM.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from helios.core.logger_settings import LoggerSettings
from helios.core.signal_watch import SignalReceiver
from helios.distributed.collectives import TORCHRUN_VARIABLES, get_dist_info
from helios.distributed.process_groups import DEFAULT_TIMEOUT, DistributedInfo, is_dist_active
from helios.errors import ArgumentError, UsageError
from helios.launch.ipc import RANK_NAME, Job, LaunchQueue, pickle_value, refuse_nested_start
from helios.launch.supervisor import Supervisor
from helios.launch.worker import WorkerConfig

_CUBLAS_VARIABLE, _CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
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
        restart_count: how often the launcher has restarted all processes.
        meeting: URL of the rendezvous, for ``join_group``; empty for a single process, and in ranks
            of :func:`spawn`, which have joined their group already.
    """

    kind: LaunchKind = LaunchKind.PYTHON
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
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
        return cls(restart_count=_number(variables, "SLURM_RESTART_COUNT", default=0))


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
        restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT"),
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
        restart_count=_number(variables, "SLURM_RESTART_COUNT", default=0),
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


def require_deterministic_cublas() -> None:
    """Make cuBLAS deterministic by an environment variable, which CUDA reads when it starts.

    Raises:
        UsageError: if it is too late to set the variable, or if it has another value (a
            ``RuntimeError``).
    """
    present = os.environ.get(_CUBLAS_VARIABLE)
    if present in _CUBLAS_VALUES:
        return
    has_begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if present is None and not has_begun:
        os.environ[_CUBLAS_VARIABLE] = _CUBLAS_VALUES[0]
        return
    reason = (
        "CUDA was used before the trainer was created, so it is too late to set it now"
        if present is None
        else f"it is {present!r}"
    )
    raise UsageError(
        f"Trainer(enable_deterministic=True) on a GPU needs the environment variable "
        f"{_CUBLAS_VARIABLE} to be {' or '.join(_CUBLAS_VALUES)}, but {reason}. Set it before the "
        f"script starts: export {_CUBLAS_VARIABLE}={_CUBLAS_VALUES[0]}"
    )


def spawn(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    devices: Sequence[int] | None = None,
    queue: LaunchQueue | None = None,
    signals: SignalReceiver | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Run ``function(rank, *args)`` in several processes that form a process group.

    Each process is a new interpreter that imports the script and gets copies of all arguments,
    tensors by value. It joins the groups before the function is called and leaves them afterwards.
    The processes share the number of threads of this process, unless ``OMP_NUM_THREADS`` is set. If
    one fails, the others end within ten seconds. When this process ends, for whatever reason, all
    of them end, including their child processes.

    Args:
        function: the function to run; defined at the top level of a module.
        num_processes: the number of processes.
        args: further arguments of the function, after the rank.
        devices: the indices of their GPUs; None for the CPU.
        queue: receives the items that ranks put; must also be in ``args``.
        signals: records signals in this process, which are passed on to the ranks. Any other
            signal, or a second Ctrl-C, ends all of them.
        timeout: timeout of collectives in the default group.

    Returns:
        The results by rank, which must be picklable.

    Raises:
        BaseException: the error of the rank that failed first, of the same type if it can be
            pickled; its cause shows the rank and the traceback.
        RankError: if a rank was ended by a signal, or exited unexpectedly (a ``RuntimeError``).
        Interrupted: if a rank exited because of a signal, or asked for another start.
        UsageError: if something cannot be pickled, or if the script cannot be imported or starts
            training while it is imported (a ``RuntimeError``).
        ArgumentError: if the number of processes or devices is invalid (a ``ValueError``).
    """
    refuse_nested_start()
    _check_counts(num_processes, devices)
    if is_dist_active():
        raise UsageError(
            "spawn(...) must be called outside a process group, but this process is in one. "
            "Leave it first, or use torchrun instead of spawn."
        )
    job = pickle_value(Job(function, tuple(args)), "spawn(function=..., args=...)", "", queue)
    start_method = multiprocessing.get_start_method(allow_none=True)
    loggers = LoggerSettings.read()
    with tempfile.TemporaryDirectory(prefix="helios-") as folder:
        places = [
            WorkerConfig(
                info=DistributedInfo(rank, rank, num_processes, num_processes),
                backend="gloo" if devices is None else "nccl",
                meeting=Path(folder, "meeting").as_uri(),
                timeout=timeout,
                device=None if devices is None else devices[rank],
                num_threads=_share_threads(num_processes),
                start_method=start_method,
                loggers=loggers,
            )
            for rank in range(num_processes)
        ]
        return Supervisor(places, job, queue=queue, signals=signals).run()


def _share_threads(num_processes: int) -> int | None:
    """Return the number of threads of each rank; together, as many as this process has."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, torch.get_num_threads() // num_processes)


def _check_counts(num_processes: int, devices: Sequence[int] | None) -> None:
    if type(num_processes) is not int or num_processes < 1:
        raise ArgumentError(
            f"spawn(num_processes=...) must be a positive int, got {num_processes!r}. Pass e.g. 2."
        )
    if devices is not None and len(set(devices)) != num_processes:
        raise ArgumentError(
            f"spawn(devices=...) must name a different GPU for each of {num_processes} processes, "
            f"got {list(devices)}. Pass as many different indices, or None for the CPU."
        )
