"""Decides which processes run which replicas, and compares the processes.

The number of processes (P) is the world size of torchrun or srun, else ``nproc``, else the number
of selected GPUs, else 1. The number of replicas (V) is that of the existing run, else
``num_replicas``, else P.

A plugin that is registered on rank 0 only would wait for answers that never come:
:func:`require_alike` compares what all processes have before they do anything together, and again
after the setup.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from helios.counters import Phase
from helios.data.fingerprint import describe_content, describe_values, length_of
from helios.data.loader import KeyedLoader
from helios.data.source import Source
from helios.distributed.process_groups import membership
from helios.engines.device import device_of_rank
from helios.errors import ArgumentError, RankError, RunMismatchError, UsageError
from helios.hooks.bus import Bus
from helios.hooks.events import EVENTS, Verb
from helios.launch.launcher import Launch
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.start.options import ROWS, Options, Scope
from helios.start.stateful import find_data_sets
from helios.text import count_text

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


def device_for(options: Options, launch: Launch) -> torch.device:
    """Return the device of this process.

    Raises:
        UsageError: if there is none for it.
    """
    if options.engine is not None:
        return options.engine.device
    return device_of_rank(options.gpu_ids, launch.info.local_rank)


@contextmanager
def joined(launch: Launch, device: torch.device) -> Iterator[None]:
    """Join the group of all processes for a block; does nothing with a single process."""
    info, gpu = launch.info, None
    if info.world_size == 1:
        yield
        return
    if device.type == "cuda":
        gpu = torch.device("cuda", info.local_rank if device.index is None else device.index)
        torch.cuda.set_device(gpu)
    with membership(info, backend="nccl" if gpu else "gloo", meeting=launch.meeting, device=gpu):
        yield


def choose_processes(options: Options, launch: Launch, stored: Stored | None) -> int:
    """Return the number of processes, P.

    Raises:
        ArgumentError: if ``nproc`` contradicts the launcher or the GPUs.
    """
    nproc, num_gpus = options.nproc, len(options.gpu_ids)
    if launch.is_given:
        if nproc not in (None, launch.info.world_size):
            raise ArgumentError(
                f"Trainer(nproc=...) must be None or the number of processes that exist, but "
                f"{_describe(launch)}, and nproc is {nproc}. Omit it."
            )
        return launch.info.world_size
    if nproc is not None:
        if 0 < num_gpus < nproc:
            raise ArgumentError(
                "Trainer(nproc=...) must be at most the number of GPUs, or 1 with your own engine "
                f"on a GPU, got {nproc}. Start fewer processes, each of which runs several "
                "replicas, or pass use_cpu=True. With torchrun, each process creates its engine."
            )
        return nproc
    limit = options.num_replicas if stored is None else stored.num_replicas
    count = max(1, num_gpus)
    if limit is not None and limit < count:
        _LOGGER.info("Of %d GPUs, %d are used: the run has %d replicas.", count, limit, limit)
        return limit
    return count


def _describe(launch: Launch) -> str:
    """Say what has started the processes, and how many."""
    count = count_text(launch.info.world_size, "process")
    if launch.is_external:
        return f"{launch.kind.value} has started {count}"
    return f"the script has joined a group of {count}"


def choose_replicas(
    options: Options, launch: Launch, stored: Stored | None, num_processes: int
) -> int:
    """Return the number of replicas, V.

    Raises:
        RunMismatchError: if the run was started with another number than ``num_replicas``.
        UsageError: if there are more processes than replicas.
    """
    asked = options.num_replicas
    if stored is not None and asked not in (None, stored.num_replicas):
        raise RunMismatchError(
            f"The run was started with {count_text(stored.num_replicas, 'replica')} "
            f"({stored.path}), but Trainer(num_replicas={asked}) sets another number. It defines "
            "what a batch and a step are, so it must not change. Omit num_replicas to resume "
            "(nproc may change), or start a new run: with another save_name, or resume='never'."
        )
    count = asked if stored is None else stored.num_replicas
    if count is None:
        return num_processes
    if num_processes > count:
        who = (
            _describe(launch)
            if launch.is_given
            else f"Trainer(nproc={num_processes}) requests more"
        )
        where = f"num_replicas is {count}" if stored is None else f"as started: {stored.path}"
        raise UsageError(
            f"A run of {count_text(count, 'replica')} ({where}) can use at most "
            f"{count_text(count, 'process')}, but {who}. Start fewer, or start a new run with more "
            "replicas."
        )
    return count


_NOTHING = "nothing"
_FREE = ("num_workers", "fingerprint")
"""Keys of a data description that may differ between processes."""


def options_that_must_match(
    options: Options, plugins: Mapping[str, Plugin], replicas: Replicas
) -> dict[str, str]:
    """Return what processes must have in common before the setup, by name.

    Args:
        options: options of the trainer.
        plugins: by id; their order counts, because they receive events in it.
        replicas: replicas of the run.
    """
    known = [f"{name} ({type(plugin).__qualname__})" for name, plugin in plugins.items()]
    values = {
        name: options.plain(name) for name, row in ROWS.items() if row.scope is not Scope.NONE
    }
    return {
        "the plugins": ", ".join(known) or _NOTHING,
        "num_replicas": str(replicas.num_replicas),
        # The path of the folder may differ: a process that does not see a file reports it.
        "a folder for checkpoints": str(options.chkpt_root is not None),
        "checkpoints to write": str(options.can_save),
    } | {f"Trainer({name}=...)": repr(value) for name, value in values.items()}


def describe_setup(hooks: Bus, sources: Mapping[Phase, list[Source]]) -> dict[str, str]:
    """Return what processes must have in common after the setup, by name.

    Args:
        hooks: the receivers of the events whose answers all processes combine.
        sources: the data of each phase.
    """
    asked = [name for name, event in EVENTS.items() if event.verb is Verb.ASK]
    table = {
        f"what answers {name}": ", ".join(hooks.names_of_receivers(name)) or _NOTHING
        for name in asked
    }
    for phase, found in sources.items():
        for index, source in enumerate(found):
            description = {
                name: value for name, value in source.description.items() if name not in _FREE
            }
            table[f"the {phase.value} data, loader {index}"] = repr(description)
    return table


def describe_data_sets(sources: Mapping[Phase, list[Source]]) -> dict[str, str]:
    """Return what the data sets of all processes must have in common, by name.

    Each process may split what a loader reads that Helios did not create.
    """
    table: dict[str, str] = {}
    known: dict[int, dict[str, str]] = {}
    for phase, found in sources.items():
        for index, source in enumerate(found):
            if not isinstance(source.loader, KeyedLoader):
                continue
            place = f"the {phase.value} data, loader {index}"
            # A sampler of the user's may have drawn an order that is not in the data sets.
            table[f"{place}, the first samples"] = describe_content(source.indices(0) or [])
            for name, part in find_data_sets(source):
                table[f"{place}, length of {name}"] = str(length_of(part))
                if id(part) not in known:
                    known[id(part)] = describe_values(part)
                for attribute, text in known[id(part)].items():
                    table[f"{place}, {name}.{attribute}".removesuffix(".")] = text
    return table


_ALIKE = (
    "Create the trainer, its plugins and the data in the same way on all processes; to let a "
    "plugin act on rank 0 only, check context.global_rank in it."
)
SAME_DATA = (
    "Create the same data in all processes: in setup(), draw from random, torch or numpy.random, "
    "which Helios seeds, or from a generator with a fixed seed, and sort listings of folders. "
    "List attributes that may differ in the class of the data set: unsaved = (...,)."
)
"""The remedy where the data sets of processes differ."""


def require_alike(
    team: Replicas, describe: Callable[[], Mapping[str, str]], remedy: str = _ALIKE
) -> None:
    """Compare what all processes have; all of them call this at the same place.

    Args:
        team: the processes.
        describe: returns the values of this process, by name; not called for a single one.
        remedy: what to do about a difference.

    Raises:
        UsageError: in all of them, if one differs from rank 0.
    """
    if team.has_single_process:
        return
    first, *others = team.gather_objects(dict(describe()))
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            here, there = first.get(name, _NOTHING), other.get(name, _NOTHING)
            if here != there:
                # Rank 0 reports it; the errors of the others follow from that.
                cause = None if team.rank == 0 else RankError("Rank 0 has raised the same error.")
                raise UsageError(
                    f"All processes must agree on {name}, but rank {rank} of {team.num_processes} "
                    f"has {there}, and rank 0 has {here}. {remedy}"
                ) from cause
