"""A training that is set up: its data, what saves and records it, and what its loops see."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch

from helios.best import BestRule, BestSoFar, Mode
from helios.checkpoint.frozen import FrozenWeights, references_of
from helios.checkpoint.record import Record
from helios.core.environment import describe_machine
from helios.counters import Phase
from helios.data.source import Source
from helios.engines.numerics import choose_threads, numerics
from helios.errors import ArgumentError, RunMismatchError, StateError
from helios.findings import Level, level_of, list_missing
from helios.ledger.run_file import without_secret_words
from helios.listeners import Recorder, RunListener
from helios.model.model import Model
from helios.model.schedulers import Schedulers
from helios.plugins.early_stopping import EarlyStopping
from helios.run_parts import RunParts
from helios.run_state import RunState
from helios.start import run_log
from helios.start.changes import (
    Declared,
    StartChanges,
    compare_fresh,
    describe_identity,
    limits,
    name_params,
)
from helios.start.level import Reproducibility, determine_trust, find_reproducibility
from helios.start.objects import check_training_source
from helios.start.options import ROWS
from helios.start.origin import Origin
from helios.start.resume import PendingLoad
from helios.start.run import Run
from helios.start.run_log import ScoreLog, warn_of_idle_options
from helios.start.stateful import find_stranded_generators
from helios.start.writers import Saves, SaveTimer, make_recorders
from helios.terminal import root_logger as log
from helios.text import count_text, with_step
from helios.version import __version__

_LOGGER = logging.getLogger(__name__)

MakeRecorders: TypeAlias = Callable[[dict[str, Any], Reproducibility], list[Recorder]]
"""Takes what defines a run and the level that it reaches; returns what records it."""


@final
@dataclass
class Training:
    """A training that is set up, and not loaded yet.

    Attributes:
        run: the call.
        origin: where it starts.
        params: what the run declares.
        setup_changes: what setup has made, compared with the checkpoint.
        parts: what its loops get.
        pending: what its load leaves to be done when training resumes.
        saves: completes its checkpoints.
        scores: logs the scores of validations.
        stranded: generators that loader workers copy, by place, with the reason.
        begun_at: the iteration at which this start began.
        seconds: the time that training has taken.
    """

    run: Run
    origin: Origin
    params: dict[str, Any]
    setup_changes: StartChanges
    parts: RunParts
    pending: PendingLoad
    saves: Saves
    scores: ScoreLog
    stranded: dict[str, str]
    begun_at: int = 0
    seconds: float = 0.0

    def describe_rescue(self) -> str:
        """Return what an error or an interruption leaves to the user."""
        if not self.run.has_begun:
            return self.origin.describe_rescue()
        newest = self.saves.writer.wait()
        if newest is not None:
            return f"Run the same command again to resume from {newest.name}."
        return "No checkpoint was saved."


def set_up_training(
    run: Run,
    origin: Origin,
    declared: Declared,
    *,
    make: MakeRecorders | None = None,
    ask: Callable[[], str] | None = None,
    known: Record | None = None,
) -> Training:
    """Set everything up, but load nothing yet.

    Args:
        run: the call.
        origin: where it starts.
        declared: what it declares.
        make: makes what follows a replay; ``None`` for what writes files.
        ask: returns why the run is to be interrupted, empty if nothing asks for it; by default,
            signals do.
        known: a record that knows how the run began, where it starts without a checkpoint.
    """
    options, record = run.options, origin.record
    run.settings.enter_context(_numerics(run, known if record is None else record))
    if run.replay is None:
        # Logs of another run must not be truncated: a branch starts its own.
        logged = None if origin.is_branch else record
        run_log.open_logs(options, run.name, logged, is_training=True)
    store = options.store if options.can_save else None
    has_references = store is not None and store.frozen == "reference"
    refers = record is not None and references_of(record.model) is not None
    if record is None and run.model.discovery.baseline is not None:
        _LOGGER.info(
            "An earlier call has set this model up. This run begins with new weights, made by "
            "setup(); a run with chkpt_root goes on from its checkpoints."
        )
    run.set_up(
        is_inference=False, is_resumed=record is not None, makes_base=has_references or refers
    )
    source = _open_training_source(run)
    has_validation = run.open_source(Phase.VALIDATION) is not None
    schedule = options.plan(source.num_batches(), has_validation=has_validation)
    run.find_owners(source)
    if origin.folder is not None:
        run.owners.limit(origin.folder.options.max_plain_bytes)
    run.require_alike_setup()
    rule = options.find_rule(run.plugins.values())
    warn_of_idle_options(schedule, rule, run.model, has_validation=has_validation)
    findings = determine_trust(source, record, can_save=options.can_save)
    stranded = find_stranded_generators(source)
    findings.add_missing(stranded)
    schedulers = Schedulers(run.model.discovery.schedulers(), run.model.scheduler_interval)
    _require_one_mode(run, schedulers)
    level = find_reproducibility(run, source, record, findings)
    _require_level(run, origin, level)
    identity = describe_identity(options, source.description, run.engine)
    identity |= {"fingerprint": source.description.get("fingerprint")}
    setup_changes = compare_fresh(run, origin, declared)
    defined = identity | limits(options) | {"params": declared.params} | setup_changes.options
    defined |= {"horizon": run.horizon} if run.horizon else {}
    machine, changes = describe_machine(run.engine.device), [*origin.changes]
    recorders = []
    if make is not None:
        recorders = make(identity, level)
    elif origin.folder is not None and options.can_save and options.ledger != "off":
        facts = _describe_start(run, declared.params, setup_changes, level, machine)
        recorders = make_recorders(
            origin, run.model, run.replicas, identity, facts, changes=changes
        )
    folder = origin.folder if options.can_save else None
    scores = ScoreLog(None if folder is None else folder.options.keep_best)
    state = RunState(
        best=BestSoFar(_find_best_rule(run)), has_changed=origin.is_branch or origin.goes_back
    )
    how = "saves and ends" if options.can_save else "ends, without saving,"
    ask = ask or partial(run.signals.ask, f"the run {how} at the next safe point")
    listeners: list[RunListener] = [scores, *recorders]
    if schedule.save_seconds is not None and options.can_save and run.replicas.rank == 0:
        # Its wishes travel with the requests, so that all processes save at the same step.
        timer = SaveTimer(state, schedule.save_seconds)
        listeners.append(timer)
        ask = partial(timer.ask, ask)
    run.listeners = listeners
    # The last one is called first.
    for listener in reversed(listeners):
        run.settings.callback(listener.closed)
    saves = Saves(run, origin, options=defined, changes=changes, level=level, machine=machine)
    run_log.show_banner(run, origin, level, schedule)
    run_log.say_how_schedulers_step(run.model, schedulers, schedule)
    pending = PendingLoad(allows_length="length" in options.allow_changes)
    parts = run.make_parts(
        run=state,
        schedule=schedule,
        schedulers=schedulers,
        writer=saves.writer,
        can_save=options.can_save,
        recorders=recorders,
        get_scalars=log.get_tensorboard_writer if run.replicas.rank == 0 else lambda: None,
        sanity_steps=options.sanity_steps,
        findings=findings,
        frozen=FrozenWeights(run.model, run.base) if has_references else None,
        is_replay=run.replay is not None,
        outside=ask,
        check_record=partial(_require_complete, run),
        note_last_safe_point=run.signals.note_safe_point,
        finish_load=pending.finish,
        check_data=pending.check_data,
    )
    run.begin(parts)
    made = (parts, pending, saves, scores, stranded)
    return Training(run, origin, declared.params, setup_changes, *made)


def _find_best_rule(run: Run) -> BestRule | None:
    """Return what decides which validation of a run is the best; ``None`` if nothing does.

    That is the score of ``KeepBest``, or else that of ``EarlyStopping``, or else the model, if it
    overrides ``have_metrics_improved``.
    """
    declared = run.options.find_rule(run.plugins.values())
    watches = any(isinstance(each, EarlyStopping) for each in run.plugins.values())
    judges = type(run.model).have_metrics_improved is not Model.have_metrics_improved
    return BestRule() if declared is None and judges and not watches else declared


def _require_one_mode(run: Run, schedulers: Schedulers) -> None:
    """Check that nothing takes small values of a score as good, and something else large ones."""
    rule = None if run.options.store is None else run.options.store.keep_best
    found = [] if rule is None else [(rule.metric, rule.mode, "KeepBest")]
    for plugin in run.plugins.values():
        if isinstance(plugin, EarlyStopping):
            found.append((*plugin.monitored, f"EarlyStopping {plugin.plug_id!r}"))
    for path, metric, mode in schedulers.find_plateaus():
        found.append((metric, mode, f"the ReduceLROnPlateau model.{path}"))
    known: dict[str, tuple[Mode, str]] = {}
    for metric, mode, owner in found:
        first, other = known.setdefault(metric, (mode, owner))
        if first != mode:
            raise ArgumentError(
                f"The score {metric!r} must have one mode, but {other} has mode={first!r}, and "
                f'{owner} has mode={mode!r}. Change one of them: "min" if small scores are good, '
                '"max" if large ones are.'
            )


def _numerics(run: Run, known: Record | None) -> AbstractContextManager[None]:
    stored = None if known is None else known.num_threads
    # Of several machines, the first one decides.
    threads = run.replicas.on_first(partial(choose_threads, stored, run.replicas.num_replicas))
    if threads != torch.get_num_threads():
        _LOGGER.info(
            "Using %s per process (%d were set), because the number of threads affects the "
            "results: %s.",
            count_text(threads, "thread"),
            torch.get_num_threads(),
            "a run with several replicas begins with OMP_NUM_THREADS, or with one"
            if stored is None
            else "it stays that of the first start",
        )
    return numerics(
        is_deterministic=run.options.enable_deterministic,
        use_cudnn_benchmark=run.options.enable_cudnn_benchmark,
        num_threads=threads,
    )


def _open_training_source(run: Run) -> Source:
    source, options = run.open_source(Phase.TRAINING), run.options
    if source is None:
        raise ArgumentError(
            "The data module must have training data for fit, got none. Assign self.train_dataset "
            "in setup(), or pass train=... to DataModule.from_datasets."
        )
    check_training_source(source, can_save=options.can_save, is_by_epoch=options.limits.is_by_epoch)
    source.skip_numbers(options.skip_batches)
    return source


def _require_level(run: Run, origin: Origin, reproducibility: Reproducibility) -> None:
    """Refuse a lower level than that of the checkpoint, if the user demands it."""
    loaded = origin.loaded
    sidecar = None if loaded is None or origin.is_branch else loaded.sidecar
    if run.options.on_incomplete != "raise" or sidecar is None or not sidecar.level:
        return
    level = level_of(reproducibility.findings, reproducibility.level)
    if level.height < Level(sidecar.level).height:
        raise RunMismatchError(
            f'Trainer(on_incomplete="raise") requires the level {sidecar.level!r}, which the run '
            f"had so far, but this start reaches {reproducibility}. Undo the change, or omit "
            "on_incomplete to continue at the lower level."
        )


def _require_complete(run: Run, record: Record) -> None:
    """Refuse a checkpoint that lacks state, if the user demands it."""
    missing = record.findings.missing
    if missing and run.options.on_incomplete == "raise":
        raise StateError(
            'Trainer(on_incomplete="raise") requires complete checkpoints, but the one of '
            f"iteration {with_step(*record.counters)} lacks {list_missing(missing)}. "
            "Nothing was written. Change what is named, or declare what need not be saved: "
            "unsaved = (...,)."
        )


def _describe_start(
    run: Run,
    params: dict[str, Any],
    changes: StartChanges,
    level: Reproducibility,
    machine: dict[str, str],
) -> dict[str, Any]:
    """Return what the file of the run's events says of this start."""
    given = {name: run.options.plain(name) for name in ROWS if name not in ("params", "plugins")}
    return {
        "helios": __version__,
        "machine": machine,
        "level": str(level),
        "command": without_secret_words(sys.argv),
        "params": params,
        "given": name_params(params) | changes.all_values,
        "options": {name: value for name, value in given.items() if value is not None},
    }
