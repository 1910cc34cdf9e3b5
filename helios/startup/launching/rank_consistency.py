"""Checks that all processes of a run match: a difference could leave one of them waiting forever.

A script under torchrun creates its trainer in every process. A plugin that is registered on rank 0
only would wait for answers of the others that never come. All processes compare what they have
before they do anything together, and again after the setup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from helios.data.source import Source
from helios.errors import RankError, UsageError
from helios.hooks.bus import Bus
from helios.hooks.events import EVENTS, Verb
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.startup.options.trainer_options import TrainerOptions
from helios.state import Phase

_NOTHING = "nothing"
_FREE = ("num_workers", "fingerprint")
"""Keys of a data description that may differ between processes."""


def options_that_must_match(
    options: TrainerOptions, plugins: Mapping[str, Plugin], replicas: Replicas
) -> dict[str, str]:
    """Return what processes must have in common before the setup, by name.

    Args:
        options: options of the trainer.
        plugins: by id; their order counts, because they receive events in it.
        replicas: replicas of the run.
    """
    known = [f"{name} ({type(plugin).__qualname__})" for name, plugin in plugins.items()]
    engine, checkpoints = options.engine, options.checkpoints
    schedule = {
        field.name: getattr(options.schedule, field.name)
        for field in dataclasses.fields(options.schedule)
    }
    values = schedule | {
        "unit": options.schedule.unit.name.lower(),
        "random_seed": options.run.seed,
        "seeds": options.run.seeds,
        "init": options.run.init,
        "clip_norm": engine.clip_norm,
        "clip_value": engine.clip_value,
        "precision": None if engine.precision is None else engine.precision.value,
        "engine": None if engine.engine is None else type(engine.engine).__qualname__,
        "enable_deterministic": options.numerics.enable_deterministic,
        "resume": str(checkpoints.resume),
        "rewind_to": checkpoints.rewind_to,
        "skip_batches": checkpoints.skip_batches,
        "on_incomplete": checkpoints.on_incomplete,
        "sanity_steps": options.trial.sanity_steps,
        "audit": options.audit,
        "batch_limits": options.trial.batch_limits,
        "hang_timeout": options.waiting.hang_timeout,
    }
    return {
        "the plugins": ", ".join(known) or _NOTHING,
        "num_replicas": str(replicas.num_replicas),
        # The path of the folder may differ: a process that does not see a file reports it.
        "a folder for checkpoints": str(checkpoints.chkpt_root is not None),
        "checkpoints to write": str(checkpoints.can_save),
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


def require_alike(team: Replicas, own: Mapping[str, str]) -> None:
    """Compare what all processes have; all of them call this at the same place.

    Args:
        team: the processes.
        own: the values of this process, by name.

    Raises:
        UsageError: in all of them, if one differs from rank 0.
    """
    if team.has_single_process:
        return
    first, *others = team.gather_objects(dict(own))
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            here, there = first.get(name, _NOTHING), other.get(name, _NOTHING)
            if here != there:
                # Rank 0 reports it; the errors of the others follow from that.
                cause = None if team.rank == 0 else RankError("Rank 0 has raised the same error.")
                raise UsageError(
                    f"All processes must agree on {name}, but rank {rank} of {team.num_processes} "
                    f"has {there}, and rank 0 has {here}. Create the trainer, its plugins and the "
                    "data in the same way on all processes; to let a plugin act on rank 0 only, "
                    "check context.global_rank in it."
                ) from cause
