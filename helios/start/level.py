"""The level of reproducibility that a run reaches, and what prevents the next one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import isgeneratorfunction
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from helios.checkpoint.record import Record
from helios.core.wrappers import COMPILED, compiled_call
from helios.data.external_loader import try_state
from helios.data.source import ByOwnState, ByPosition, CannotResume, Source
from helios.data.stream import StreamSource
from helios.errors import UsageError
from helios.findings import Finding, FindingKind, Findings, Level, level_of, list_missing
from helios.loops.optimizer import SEPARATE_UPDATES
from helios.model.model import Model
from helios.replicas.replicas import Replicas

if TYPE_CHECKING:
    from helios.start.run import Run

_CONFIGURATION = "get_compiler_config"
_MANUAL = "train_step returns None, and so steps by itself"


@dataclass(frozen=True)
class Reproducibility:
    """The changes between start and resume that do not affect the results.

    Attributes:
        level: its level, for a checkpoint that lacks nothing.
        text: what prevents the next level.
        findings: what is already known to be missing in checkpoints, and what is taken at its word.
        requested: the level that the options ask for.
    """

    level: Level
    text: str
    findings: Findings = field(default_factory=Findings)
    requested: Level = Level.NONE

    def describe_shortfall(self) -> dict[str, str]:
        """Return a line for the banner, by label, if the run does not reach the requested level."""
        is_reached = level_of(self.findings, self.level).height >= self.requested.height
        return {} if is_reached else {"reproducibility": str(self)}

    def __str__(self) -> str:
        """Return the level and its text."""
        if missing := self.findings.missing:
            level = level_of(self.findings, self.level)
            return f"{level.value} (lacks {list_missing(missing)})"
        claims = self.findings.names(FindingKind.CLAIM)
        return f"{self.level.value} ({'; '.join([*claims, self.text])})"

    def level_after(self, record: Record, *, is_compiled: bool = False) -> Level:
        """Return the level of a checkpoint, lowered by what training has found until then.

        Args:
            record: the content to save.
            is_compiled: whether a network is compiled by now.
        """
        level = level_of(record.findings, self.level)
        if record.is_manual:
            level = level.at_most(Level.RESTART)
        return level.at_most(Level.ORDER) if is_compiled else level


def find_reproducibility(
    run: Run, source: Source, record: Record | None, known: Findings
) -> Reproducibility:
    """Find the level that a run reaches.

    Args:
        run: the call, whose model is set up.
        source: the training data.
        record: the checkpoint that the run resumes from, if any.
        known: what is known of the loader's own state.

    Raises:
        UsageError: if the run needs a process for each replica and has fewer.
    """
    bound = [*dict.fromkeys(_find_bound(run.replicas, run.model, record))]
    level, text = _find_level(run, source, bound)
    stored = Findings() if record is None else record.findings
    findings = Findings(stored.of(FindingKind.MISSING))
    findings.extend(known)
    # What several replicas, arithmetic that repeats, or checkpoints ask for.
    requested = Level.ORDER if run.options.can_save else Level.NONE
    if not run.replicas.has_single_replica:
        requested = Level.ELASTIC
    elif run.options.enable_deterministic:
        requested = Level.RESTART
    return Reproducibility(level, text, findings, requested)


def _find_level(run: Run, source: Source, bound: list[str]) -> tuple[Level, str]:
    if isinstance(source.resumes_by, CannotResume):
        return Level.NONE, "the training loader can neither seek nor be saved"
    if run.engine.device.type != "cpu" and not run.options.enable_deterministic:
        return Level.ORDER, "enable_deterministic=True makes arithmetic exact on this device"
    if compiled := find_compiled(run.model):
        return Level.ORDER, f"torch.compile with inductor ({', '.join(compiled)})"
    if source.resumes_by != ByPosition():
        return Level.RESTART, "the training loader has its own state or split"
    if run.replicas.has_single_replica:
        one = "one replica: set num_replicas to change the number of processes later"
        return Level.RESTART, one
    if bound:
        return Level.RESTART, "; ".join(bound)
    return Level.ELASTIC, "any number of processes, up to the number of replicas"


def find_compiled(model: Model) -> list[str]:
    """Return the paths of what inductor, or an unknown backend, compiles.

    It is unknown whether two processes choose the same kernels. Functions are found if they are
    attributes of the model or methods of its class.
    """
    found = [
        f"{path}.{name}".rstrip(".")
        for path, network in model.discovery.modules().items()
        for name, module in network.named_modules()
        if (compiled_call(module) is not None or COMPILED in vars(module).get("_modules", {}))
        and _is_of_inductor(module)
    ]
    places = (*reversed(type(model).__mro__), model)
    functions = {name: value for place in places for name, value in vars(place).items()}
    return found + [
        name
        for name, value in functions.items()
        if isinstance(value, FunctionType)
        and _CONFIGURATION in vars(value)
        and _is_of_inductor(value)
    ]


def _is_of_inductor(compiled: Any) -> bool:
    configure: Any = getattr(compiled_call(compiled) or compiled, _CONFIGURATION, None)
    # Inductor has a configuration; other backends have none.
    return configure is None or configure() is not None


def _find_bound(replicas: Replicas, model: Model, record: Record | None) -> Iterator[str]:
    """Yield what binds a run of several replicas to its number of processes."""
    if replicas.has_single_replica:
        return
    if record is not None and record.is_manual:
        _check_one_each(replicas, f"{_MANUAL}, which", "Return the loss")
        yield _MANUAL
    if isgeneratorfunction(model.train_step):
        yield SEPARATE_UPDATES
    names = [
        f"{path}.{name}".rstrip(".")
        for path, network in model.discovery.modules().items()
        for name, module in network.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    if names:
        _check_one_each(replicas, f"SyncBatchNorm ({', '.join(names)})", "Use BatchNorm")
        yield f"SyncBatchNorm ({', '.join(names)}) sums in its own order"
    if record is not None:
        yield from record.findings.names(FindingKind.OBSTACLE)


def _check_one_each(replicas: Replicas, what: str, remedy: str) -> None:
    if not replicas.has_one_per_process:
        raise UsageError(
            f"{what} needs a process for each replica, but there are {replicas.num_processes} "
            f"for {replicas.num_replicas} replicas. Start {replicas.num_replicas} processes, with "
            f"Trainer(nproc={replicas.num_replicas}) or torchrun. {remedy} to train on fewer."
        )


_LOGGER = logging.getLogger(__name__)
_REASON = (
    "its state does not restore the next batch: its state_dict() must hold everything that the "
    "next batch depends on"
)


def determine_trust(source: Source, record: Record | None, *, can_save: bool) -> Findings:
    """Determine whether the state of the training data has to be trusted.

    Returns:
        What claims that it is complete, or what a trial has found to be missing.

    It is tested once in a run, at its first start, if no loader workers are involved.

    Args:
        source: the training data, before its first pass.
        record: the checkpoint that the run resumes from.
        can_save: whether checkpoints are written.
    """
    if isinstance(source, StreamSource):
        return _judge_stream(source, record, can_save=can_save)
    if not isinstance(source.resumes_by, ByOwnState):
        return Findings()
    name = type(source.resumes_by.holder).__qualname__
    word, place = f"claimed by {name}", f"data: {name}"
    tried = f"{word}, tried at the first start"
    if record is not None:
        missing = record.findings.missing
        if place in missing:
            return Findings([Finding(FindingKind.MISSING, place, missing[place])])
        return _claimed(tried if tried in record.findings.names(FindingKind.CLAIM) else word)
    is_here = source.description.get("num_workers", 0) == 0
    is_kept = try_state(source) if is_here and can_save else None
    if is_kept is not False:
        return _claimed(tried if is_kept else word)
    _LOGGER.warning(
        "The state of %s does not restore the next batch: a copy that loaded it returned another "
        "one. A resumed run would train on other samples, so the level of this run is incomplete. "
        "Save everything that the next batch depends on in state_dict() (e.g. the content of a "
        "shuffle buffer), remove the buffer, or use a map-style data set with create_dataloader.",
        name,
    )
    return Findings([Finding(FindingKind.MISSING, place, _REASON)])


def _claimed(*words: str) -> Findings:
    return Findings(Finding(FindingKind.CLAIM, text=word) for word in words)


def _judge_stream(source: StreamSource, record: Record | None, *, can_save: bool) -> Findings:
    """Determine whether a resume uses the states of a stream's parts; otherwise it reads again.

    The states are only used if they were tested and found to be complete.
    """
    if record is not None:
        holds_states = source.holds_states(record.data["state"])
        return _claimed(*(record.findings.names(FindingKind.CLAIM) if holds_states else ()))
    if not can_save:
        return Findings()
    name = source.find_stateful()
    if name and try_state(source.for_trial()):
        source.uses_state = True
        return _claimed(f"claimed by {name}, tried at the first start")
    _LOGGER.info(
        "The parts of the stream have no state that restores the next batch, so a resume inside "
        "an epoch reads the epoch again up to its position. This takes time, but does not affect "
        "the results."
    )
    return Findings()
