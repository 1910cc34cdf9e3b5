"""A call of fit, from preparing the data to marking the run as finished; see docs/order.md."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from helios.best import BestSoFar
from helios.checkpoint import file_names
from helios.checkpoint.capture import apply, choose_trained
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import Level, level_of, list_missing
from helios.core.stored_values import stored_params
from helios.counters import Phase, TrainingState
from helios.data.source import Source
from helios.engines.numerics import numerics
from helios.errors import ArgumentError, Interrupted, RunMismatchError, StateError
from helios.findings import Findings
from helios.hooks.live_run import find_none
from helios.ledger.environment import describe_machine
from helios.ledger.run_file import without_secret_words, without_secrets
from helios.listeners import Recorder, RunListener
from helios.loops.loop import LoopStates
from helios.model.new_settings import NewSettings
from helios.model.schedulers import Schedulers
from helios.replicas.on_all_ranks import on_first
from helios.session import Session
from helios.startup import run_identity, run_log
from helios.startup.best_validations import continue_best, find_best_rule, require_one_mode
from helios.startup.changed_start import (
    StartChanges,
    compare_fresh,
    compare_params,
    name_params,
    refuse_other_values,
)
from helios.startup.data_check import DataCheck
from helios.startup.model_in_hand import ModelInHand
from helios.startup.objects import check_training_source, log_order
from helios.startup.recorders import make_recorders
from helios.startup.reproducibility_level import (
    Reproducibility,
    determine_trust,
    find_reproducibility,
)
from helios.startup.resume_point import (
    Start,
    find_start,
    lock_folder,
    require_writable,
    set_newer_aside,
)
from helios.startup.run_identity import find_cursor
from helios.startup.run_log import ScoreLog, describe_run, warn_of_idle_options
from helios.startup.run_saves import RunSaves
from helios.startup.run_setup import LOOP_PATH, Run
from helios.startup.state_owners import find_stranded_generators
from helios.startup.trainer_options import ROWS, allows
from helios.terminal import root_logger as log
from helios.text import count_text, with_step
from helios.version import __version__

_LOGGER = logging.getLogger(__name__)


def fit(run: Run) -> bool | Interrupted:
    """Train until the run is finished, which returns True, or interrupted."""
    run.prepare_data()
    options, name, replicas = run.options, run.model.save_name, run.replicas
    lock = lock_folder(options, name, run.settings, team=replicas)
    start = find_start(
        options,
        name,
        run.model.types_for_safe_load(),
        run_name=options.name_for(name),
        replicas=replicas,
        share=run.share,
    )
    start.lock = lock
    training = Training(run, start)
    run.describe_rescue = training.describe_rescue
    reason_to_stay = training.find_end()
    training.compare_params(is_finished=bool(reason_to_stay))
    if reason_to_stay:
        training.restore_end(reason_to_stay)
        return True
    on_first(replicas, lambda: require_writable(options, name))
    return training.finish(training.train())


def keep_in_hand(run: Run, end: Record, *, is_interrupted: bool = False) -> None:
    """Describe how a training leaves its model, for evaluations in this process."""
    replicas, obstacle = run.replicas, ""
    if is_interrupted:
        obstacle = "fit was interrupted"
    elif not replicas.has_single_process:
        obstacle = f"{replicas.num_processes} processes trained it"
    elif replicas.is_sharded:
        obstacle = "it is sharded"
    run.in_hand = ModelInHand(run.model, obstacle, end, dict(run.plugins), run.owners)


MakeRecorders: TypeAlias = Callable[[dict[str, Any], Reproducibility], list[Recorder]]
"""Takes what defines a run and the level that it reaches; returns what records it."""


@final
class Training:
    """A training from a start that was found.

    Args:
        run: the call, of which nothing is set up yet.
        start: where it starts.
        make_recorders: returns what follows a replay; ``None`` for what writes files.
        outside: returns why the run is to be interrupted, empty if nothing asks for it; by default,
            signals do.
    """

    def __init__(
        self,
        run: Run,
        start: Start,
        *,
        make_recorders: MakeRecorders | None = None,
        outside: Callable[[], str] | None = None,
    ) -> None:
        self._run = run
        self._start = start
        self._can_save = run.options.can_save
        self._make_recorders = make_recorders
        listener = run.call.runtime.listener
        what = run_log.describe_signal(saves=self._can_save)
        self._outside = outside or partial(listener.ask, what)
        store = start.folder.options if start.folder is not None and self._can_save else None
        self._scores = ScoreLog(None if store is None else store.keep_best)
        self._saves: RunSaves | None = None
        self._recorders: list[Recorder] = []
        self._listeners: list[RunListener] = [self._scores]
        self._is_over = False
        self._params: dict[str, Any] = {}
        self._changes = StartChanges()
        self._stranded: dict[str, str] = {}
        self._begun_at = 0 if self._record is None else self._record.place[1]
        self._machine: dict[str, str] = {}
        self._seconds = 0.0

    def train(self, *, known: Record | None = None) -> str:
        """Train from the start that was found; returns why training has ended.

        Args:
            known: a record that knows how the run began, where it starts without a checkpoint.
        """
        run = self._run
        self._prepare(known if self._record is None else self._record)
        # Its tensors are copied to their destinations; kept, they would double the memory.
        self._start.forget_payload()
        run.has_begun = True
        run.hooks.emit("on_fit_start")
        begin = time.perf_counter()
        reason: str = run.loop.run()
        self._seconds = time.perf_counter() - begin
        run.call.runtime.listener.note_safe_point()
        run.display.close()
        return reason

    def finish(self, reason: str) -> bool | Interrupted:
        """Wait for the last checkpoint, and say how training has ended; returns True if it has."""
        run = self._run
        session = run.session
        assert session is not None
        assert self._saves is not None
        is_interrupted, cause = session.is_interrupted, session.agreement.asked.interruption
        keep_in_hand(run, self._record_end(session), is_interrupted=is_interrupted)
        self._saves.finish(None if is_interrupted else reason)
        for listener in self._listeners:
            listener.ended(reason, interruption=cause if is_interrupted else None)
        if is_interrupted:
            rescue = self.describe_rescue()
            end = self._describe_end(session)
            _LOGGER.warning("The training was interrupted: %s. %s%s", cause, rescue, end)
            return run.interrupt(cause)
        run.call.runtime.listener.warn_of_late_signals()
        end = self._describe_end(session)
        _LOGGER.info("Training has ended: %s.%s", reason, end)
        return True

    def _describe_end(self, session: Session) -> str:
        """Return how far the training has come, as lines for the log; waits for saves."""
        newest, best = self._wait_for_saves(), session.best.best
        file_name = None
        if best is not None and newest is not None:
            paths = file_names.find_checkpoints(newest.parent)
            names = {file_names.iteration_of(path): path.name for path in paths}
            file_name = names.get(best.iteration, "")
        return run_log.describe_progress(
            session.state,
            seconds=self._seconds,
            begun_at=self._begun_at,
            scores=self._scores.summarize(best, file_name),
            nonfinite=session.nonfinite,
            newest=newest,
            has_report=bool(self._recorders),
        )

    def _wait_for_saves(self) -> Path | None:
        return None if self._saves is None else self._saves.writer.wait()

    def _record_end(self, session: Session) -> Record:
        """Return counters and logs at the end, without what the objects themselves hold."""
        run = self._run
        return Record(
            training_state=session.state.dict(),
            cursor=session.cursor.dict(),
            model={},
            rng={},
            num_threads=torch.get_num_threads(),
            num_replicas=run.replicas.num_replicas,
            options=self._start.definition,
            # Other processes have no logs.
            **(run_log.log_places() if run.replicas.rank == 0 else {}),
        )

    def _prepare(self, known: Record | None) -> None:
        run, record = self._run, self._record
        run.settings.enter_context(self._numerics(known))
        if self._make_recorders is None:
            # Logs of another run must not be truncated: a branch starts its own.
            logged = None if self._start.is_branch else record
            run_log.open_logs(run.options, self._name, logged, is_training=True)
        run.set_up(is_inference=False, is_resumed=record is not None)
        session = self._build()
        run.take_session(session)
        log_order(run.plugins, run.hooks)
        if record is not None:
            self._load(session, record)
            on_first(run.replicas, lambda: self._compare_machine(record))
        on_first(run.replicas, lambda: set_newer_aside(self._start))
        run_log.cut_logs()
        if record is None or self._start.is_branch:
            run_log.log_hparams(name_params(self._params) | self._changes.all_values)
        for listener in self._listeners:
            listener.opened()

    def _compare_machine(self, record: Record) -> None:
        """Warn once of versions, devices and settings other than those of the checkpoint."""
        changes = [
            f"{name}: {before} -> {self._machine[name]}"
            for name, before in record.machine.items()
            if self._machine.get(name, before) != before
        ]
        if changes:
            _LOGGER.warning(
                "The run resumes where equal bits are not guaranteed: %s. Order and randomness "
                "stay exact; arithmetic may differ in the last bits.",
                ", ".join(changes),
            )
            self._start.changes += changes

    @property
    def _record(self) -> Record | None:
        return None if self._start.loaded is None else self._start.loaded.record

    @property
    def _name(self) -> str:
        run = self._run
        return run.options.name_for(run.model.save_name)

    def find_end(self) -> str:
        """Return why the run has ended before, with nothing left to train; else empty."""
        loaded = self._start.loaded
        reason = None if loaded is None or loaded.sidecar is None else loaded.sidecar.finished
        if loaded is None or not reason:
            return ""
        is_over = run_identity.is_still_finished(self._run.options, loaded.record, reason)
        return reason if is_over else ""

    def restore_end(self, reason: str) -> None:
        """Set up, restore the end of a finished run, and say that there is nothing to do.

        A script that uses the model after fit finds everything as at the run's end.
        """
        run, loaded = self._run, self._start.loaded
        assert loaded is not None
        record, options = loaded.record, run.options
        run.restore(choose_trained(run.detach(record), run.replicas))
        changes = self._compare_fresh()
        keep_in_hand(run, replace(record, model={}, plugins={}, owners={}, by_rank=[], rng={}))
        is_passed = run_identity.is_shortened(options, record.options)
        run_identity.report_finished(self._name, loaded, reason, is_passed=is_passed)
        changes.report()
        on_first(run.replicas, lambda: set_newer_aside(self._start))

    def compare_params(self, *, is_finished: bool) -> None:
        """Find what rank 0 declares, and whether the run has ended with other values."""
        options, loaded = self._run.options, self._start.loaded

        def compare() -> tuple[bool, dict[str, Any]]:
            params = without_secrets(options.params)
            if loaded is None or not (
                is_finished or run_identity.has_ended(options, loaded.record)
            ):
                return False, params
            stored, allowed = loaded.record.options, options.allow_changes
            found = compare_params(stored, params)
            if not self._shows_end():
                found = [x for x in found if not any(allows(name, x.name) for name in allowed)]
            refuse_other_values(found, (), self._name, loaded.path)
            return True, stored_params(stored)

        self._is_over, self._params = on_first(self._run.replicas, compare)

    def _shows_end(self) -> bool:
        """Whether a start with nothing left to train shows the scores of the run as its own."""
        options, loaded = self._run.options, self._start.loaded
        # A script in stages starts those again that the run has passed.
        return (
            loaded is not None
            and self._make_recorders is None
            and not run_identity.is_shortened(options, loaded.record.options)
        )

    def _compare_fresh(self) -> StartChanges:
        """Compare what setup has made in rank 0 with the checkpoint, before anything is loaded."""
        run, loaded, is_over = self._run, self._start.loaded, self._is_over

        def compare() -> StartChanges:
            record = None if loaded is None else loaded.record
            allowed = run.options.allow_changes
            found = compare_fresh(run.fresh, record, allowed, is_over=is_over)
            if loaded is not None and is_over and self._shows_end():
                refuse_other_values(found.values, found.code, self._name, loaded.path)
            return found

        return on_first(run.replicas, compare)

    def _numerics(self, known: Record | None) -> AbstractContextManager[None]:
        run = self._run
        threads = None if known is None else known.num_threads
        if threads not in (None, torch.get_num_threads()):
            _LOGGER.info(
                "Threads of this process: %d, as at the first start of the run (%d were set), "
                "because their number changes bits.",
                threads,
                torch.get_num_threads(),
            )
        return numerics(
            is_deterministic=run.options.enable_deterministic,
            use_cudnn_benchmark=run.options.enable_cudnn_benchmark,
            num_threads=threads,
        )

    def _build(self) -> Session:
        run = self._run
        source = self._open_training_source()
        has_validation = run.open_source(Phase.VALIDATION) is not None
        run.find_owners(source)
        if self._start.folder is not None:
            run.owners.limit(self._start.folder.options.max_plain_bytes)
        run.require_alike_setup()
        warn_of_idle_options(
            run.options.schedule,
            run.options.store if self._can_save else None,
            run.model,
            has_validation=has_validation,
        )
        known = determine_trust(source, self._record, can_save=self._can_save)
        self._stranded = find_stranded_generators(source)
        known.add_missing(self._stranded)
        schedulers = Schedulers(run.model.discovery.schedulers(), run.model.scheduler_interval)
        require_one_mode(run.options, run.plugins.values(), schedulers)
        self._saves = self._make_saves(source, known)
        run_log.say_how_schedulers_step(run.model, schedulers, run.options.schedule)
        session = Session(
            model=run.model,
            engine=run.engine,
            hooks=run.hooks,
            display=run.display,
            seed=run.options.seed,
            schedule=run.options.schedule,
            sources=run.sources,
            plugins=run.plugins,
            schedulers=schedulers,
            best=BestSoFar(find_best_rule(run.options, run.plugins.values(), run.model)),
            find_scalars=log.get_tensorboard_writer if run.replicas.rank == 0 else find_none,
            writer=self._saves.writer,
            recorders=self._recorders,
            run_listeners=self._listeners,
            can_save=self._can_save,
            sanity_steps=run.options.sanity_steps,
            loop_states=LoopStates(run.loop, LOOP_PATH, carries=True),
            owner_states=run.owners,
            findings=known,
            check_record=self._check_record,
            note_last_safe_point=run.call.runtime.listener.note_safe_point,
            outside=self._outside,
        )
        folder = self._start.folder
        session.is_replay = self._make_recorders is not None
        session.run_folder = None if folder is None else folder.path
        session.has_changed = self._start.is_branch or self._start.goes_back
        return session

    def _check_record(self, record: Record) -> None:
        missing = record.findings.missing
        if missing and self._run.options.on_incomplete == "raise":
            raise StateError(
                'Trainer(on_incomplete="raise") requires complete checkpoints, but the one of '
                f"iteration {with_step(*record.counters)} lacks {list_missing(missing)}. "
                "Nothing was written. Change what is named, or declare what need not be saved: "
                "unsaved = (...,)."
            )

    def _make_saves(self, source: Source, known: Findings) -> RunSaves:
        """Log the banner, and return what saves the run."""
        run = self._run
        reproducibility = find_reproducibility(
            run.options,
            run.engine,
            source,
            model=run.model,
            record=self._record,
            known=known,
        )
        self._require_level(reproducibility)
        self._machine = describe_machine(run.engine.device)
        identity = self._identify(source) | {"fingerprint": source.description.get("fingerprint")}
        limits = run_identity.limits(run.options)
        self._start.definition = identity | limits
        self._changes = self._compare_fresh()
        self._start.definition |= {"params": self._params} | self._changes.options
        self._start.definition[run_log.KEY] = run_log.read_arguments()
        if self._make_recorders is not None:
            self._recorders = self._make_recorders(identity, reproducibility)
        elif self._start.folder is not None and run.options.writes_ledger:
            self._recorders = self._make_files(identity, reproducibility)
        run.listeners = self._recorders
        self._listeners += self._recorders
        # The last one is called first.
        for listener in reversed(self._listeners):
            run.settings.callback(listener.closed)
        saves = RunSaves(
            self._name,
            run.model,
            self._start,
            reproducibility=reproducibility,
            machine=self._machine,
            engine=run.engine,
            schedule=run.options.schedule,
            listeners=self._listeners,
            plugins=run.plugins.values(),
        )
        run.settings.callback(saves.writer.close)
        loaded = self._start.loaded
        options = run.options
        processes = count_text(run.replicas.num_processes, "process")
        replicas = count_text(run.replicas.num_replicas, "replica")
        if loaded is None and options.random_seed is None:
            run_log.say_what_does_not_seed(run.call.torch_seed, options.seed)
        run_log.show_banner(
            run.model,
            {
                "run": self._name,
                "seed": options.describe_seed(),
                **describe_run(run.model, run.sources, options, run.engine),
                "processes": f"{processes}, {replicas}",
                **reproducibility.describe_shortfall(),
            },
            where=None if loaded is None else loaded.path.name,
            is_wanted=options.print_banner,
        )
        return saves

    def _make_files(
        self, identity: dict[str, Any], reproducibility: Reproducibility
    ) -> list[Recorder]:
        """Return what records the run in files."""
        run, options = self._run, self._run.options
        given = {name: options.plain(name) for name in ROWS if name != "params"}
        facts = {
            "helios": __version__,
            "machine": self._machine,
            "level": str(reproducibility),
            "command": without_secret_words(sys.argv),
            "params": self._params,
            "given": self._changes.all_values,
            "options": {name: value for name, value in given.items() if value is not None},
        }
        return make_recorders(self._start, run.model, run.replicas, identity, facts)

    def _require_level(self, reproducibility: Reproducibility) -> None:
        """Refuse a lower level than that of the checkpoint, if the user demands it."""
        loaded = self._start.loaded
        sidecar = None if loaded is None or self._start.is_branch else loaded.sidecar
        if self._run.options.on_incomplete != "raise" or sidecar is None or not sidecar.level:
            return
        level = level_of(reproducibility.findings, reproducibility.level)
        if level.height < Level(sidecar.level).height:
            raise RunMismatchError(
                f'Trainer(on_incomplete="raise") requires the level {sidecar.level!r}, which the '
                f"run had so far, but this start reaches {reproducibility}. Undo what has changed, "
                "or omit on_incomplete to go on at the lower level."
            )

    def _identify(self, source: Source) -> dict[str, Any]:
        """Return what defines the run, by name."""
        run = self._run
        return run_identity.identity(run.options, source.description, run.engine)

    def _open_training_source(self) -> Source:
        run = self._run
        source = run.open_source(Phase.TRAINING)
        if source is None:
            raise ArgumentError(
                f"{type(run.datamodule).__name__} must have training data for fit, got none. "
                "Assign self._train_dataset in setup()."
            )
        check_training_source(
            source, can_save=self._can_save, is_by_epoch=run.options.schedule.is_by_epoch
        )
        source.skip_numbers(run.options.skip_batches)
        return source

    def _load(self, session: Session, record: Record) -> None:
        run = self._run
        record = run.detach(record, is_shown="on_load_checkpoint" in session.hooks.active)
        state = TrainingState(**record.training_state)
        source = session.training_source
        cursor = find_cursor(record, source.description, session.replicas)
        if run_identity.is_extended(run.options, record.options):
            cursor.go_on()
        identity = self._identify(source)
        changes = run_identity.reconcile(
            record.options | name_params(stored_params(record.options)),
            identity | name_params(self._params),
            run.options.allow_changes,
            state=state,
            cursor=cursor,
        )
        self._start.is_shortened = run_identity.is_shortened(run.options, record.options)
        skipped = (record.options.get("skip_batches", ()), run.options.skip_batches)
        run_identity.check_skipped(*skipped, source, cursor)
        num_known = len(self._start.changes)
        self._start.changes += changes
        self._start.changes += self._changes.report()
        session.has_changed |= len(self._start.changes) > num_known
        renamed = run_identity.note_fingerprint(source.description, record.options)
        self._start.changes += renamed
        if record.options.get("length") == identity["length"]:
            session.saved_length = record.data.get("length")
            session.allows_other_length = "length" in run.options.allow_changes
        limits = run_identity.note_limits(run.options, record.options)
        self._start.changes += limits
        run_log.report_arguments(record.options)
        self._start.changes += self._note_missing(record)
        self._check_data(session, record, changes + renamed)
        payload = record.to_payload()
        session.hooks.emit("on_load_checkpoint", payload)
        adopt_settings = self._make_adoption(session)
        apply(Record.from_payload(payload), session, state=state, cursor=cursor)
        adopt_settings()
        session.agreement.asked.stop_reason = cursor.stop_reason
        folder = None if self._start.is_branch else self._start.folder
        session.best = continue_best(
            record.best_validations,
            session.best.rule,
            after=record.place[1],
            folder=None if folder is None else folder.path,
            replicas=run.replicas,
        )
        if session.schedulers is not None:
            session.schedulers.remember()
        session.hooks.emit("on_checkpoint_loaded")

    def _check_data(self, session: Session, record: Record, changes: list[str]) -> None:
        """Fetch the last batch again, unless the data is known to be another, or is replayed."""
        loaded = self._start.loaded
        names = {text.partition(":")[0] for text in changes}
        if session.is_replay or loaded is None or names & {*run_identity.ORDERING, "fingerprint"}:
            return
        check = DataCheck(
            record,
            loaded.path.parent,
            session.training_source,
            replicas=self._run.replicas,
            is_strict=self._run.options.on_incomplete == "raise",
            note=self._start.changes.append,
        )
        check.before_load()
        session.check_data = check.after_hooks

    def _make_adoption(self, session: Session) -> Callable[[], None]:
        """Return what puts the settings of ``setup`` back after the load, if they are allowed."""
        if not self._changes.adopts or session.schedulers is None:
            return lambda: None
        return NewSettings(self._run.model.discovery.optimizers(), session.schedulers).apply

    def _note_missing(self, record: Record) -> list[str]:
        """Warn of what the checkpoint lacks; returns it as text, to be recorded.

        The first save does not name it again, and this does not repeat what the start has named.
        """
        run = self._run
        missing = record.findings.missing
        if not missing:
            return []
        lacking = {p: text for p, text in missing.items() if p not in self._stranded}
        if lacking:
            _LOGGER.warning(
                "The checkpoint of iteration %s is incomplete: it lacks %s. There the resumed "
                "run is as setup() makes it, so bits may differ from those of an uninterrupted "
                "run. Declare what need not be saved: unsaved = (...,). "
                'Trainer(on_incomplete="raise") refuses to write such a checkpoint.',
                with_step(*record.counters),
                list_missing(lacking, most=len(lacking)),
            )
            run.model.discovery.note_named(lacking)
            run.owners.note_named(lacking)
        return [f"resumed without: {', '.join(missing)}"]

    def describe_rescue(self) -> str:
        """Return what an error or an interruption leaves to the user."""
        loaded = self._start.loaded
        if not self._run.has_begun:
            return "" if loaded is None else f"Nothing was trained; {loaded.path} is unchanged."
        newest = self._wait_for_saves()
        if newest is not None:
            return f"Run the same command again to resume from {newest.name}."
        return "No checkpoint was saved."
