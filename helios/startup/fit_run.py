"""One call of fit, from preparing the data to marking the run as finished."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from helios.audit.step_audit import StepAudit
from helios.best import BestSoFar
from helios.checkpoint.capture import Trained, apply
from helios.checkpoint.record import Record
from helios.checkpoint.reproducibility import list_missing
from helios.core.constructor_arguments import arguments_of
from helios.core.stored_values import stored_params
from helios.core.text import with_step
from helios.data.source import Source
from helios.engines.engine import numerics
from helios.errors import ArgumentError, StateError
from helios.ledger.scrubbing import scrub_table
from helios.loops.batch import BatchLoop
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import EvaluationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.loop_states import LoopStates
from helios.loops.optimizer import OptimizerLoop
from helios.loops.run_along import RunningAlong
from helios.model.new_settings import NewSettings, steps_of_epochs
from helios.model.schedulers import Schedulers
from helios.protocols import GradientAudit
from helios.session import Session
from helios.startup import resume_point, run_identity, run_log, run_saves
from helios.startup.base_run import Run
from helios.startup.best_validations import continue_best, find_best_rule, require_one_mode
from helios.startup.given_values import (
    DeclaredParams,
    GivenValues,
    begin_params,
    compare_given,
    compare_params,
    has_ended,
)
from helios.startup.hangs import forget_hang
from helios.startup.model_in_hand import ModelInHand
from helios.startup.objects import check_training_source, log_order
from helios.startup.processes import Plan, describe_processes, on_first
from helios.startup.reproducibility_level import (
    Claim,
    Reproducibility,
    determine_trust,
    find_reproducibility,
)
from helios.startup.resume_point import lock_folder, require_writable
from helios.startup.rewinding import (
    apply_rewinds,
    check_order,
    rewind_folder,
    settle,
)
from helios.startup.run_evidence import RunEvidence, make_evidence
from helios.startup.run_identity import find_cursor
from helios.startup.run_log import describe_run, warn_of_idle_options
from helios.startup.run_manifest import describe_topic, manifest_facts, report_changed_start
from helios.startup.state_owners import find_owners, find_stranded_generators
from helios.startup.trainer_call import Call
from helios.startup.trainer_options import Audit
from helios.state import Phase, TrainingState

_LOGGER = logging.getLogger(__name__)

_LOOP_PATH = "fit"


class FitRun(Run):
    """One training; see ``Run`` for the arguments."""

    verb = "Training"

    def __init__(self, call: Call, plan: Plan, device: torch.device) -> None:
        super().__init__(call, plan, device)
        self._can_save = self.options.can_save
        self._start = resume_point.Start()
        self._recorder: run_saves.FitRecorder | None = None
        self._evidence: RunEvidence | None = None
        self._params = begin_params({})
        self._given = GivenValues()
        self._stranded: dict[str, str] = {}
        self._seconds = 0.0

    def _run(self, stack: ExitStack) -> Any:
        self._prepare_data()
        name, checkpoints = self.model.save_name, self.options
        lock = lock_folder(checkpoints, name, stack, team=self.replicas)
        if self._run_folder is not None and self._can_save and self.replicas.rank == 0:
            # All ranks have read it before they have met.
            forget_hang(self._run_folder)
        types = self.model.types_for_safe_load()
        self._start = resume_point.find_start(
            checkpoints, name, types, run_name=self._name, replicas=self.replicas, share=self._share
        )
        self._start.lock = lock
        is_finished = self._is_finished()
        self._params = self._compare_params(is_finished=is_finished)
        if is_finished:
            # A script that uses the model after fit finds the weights and values of the run's end;
            # what only training needs, such as optimizers, is as setup creates it.
            assert self._start.loaded is not None
            record = self._start.loaded.record
            self._follow_rules(run_identity.find_rules(record.options))
            self._restore(Trained.of(self._detach(record)))
            self._keep_in_hand(replace(record, model={}, plugins={}, owners={}, by_rank=[], rng={}))
            self._report_finished()
            return True
        on_first(self.replicas, lambda: require_writable(checkpoints, name))
        reason = self._train(stack)
        session = self.session
        is_interrupted = session is not None and session.is_interrupted
        if session is not None:
            self._keep_in_hand(self._record_end(session), is_interrupted=is_interrupted)
        if self._recorder is not None:
            self._recorder.finish(None if is_interrupted else reason)
        cause = None if self.session is None else self.session.requests.interruption
        if self._evidence is not None:
            self._evidence.note_end(reason, interruption=cause if is_interrupted else None)
        if is_interrupted:
            rescue = f"{self._describe_rescue()}{self._describe_end()}"
            _LOGGER.warning("The training was interrupted: %s. %s", cause, rescue)
            return False
        self.call.runtime.listener.warn_of_late_signals()
        _LOGGER.info("Training has ended: %s.%s", reason, self._describe_end())
        return True

    def _train(self, stack: ExitStack) -> str:
        """Train from the start that was found; returns why training has ended."""
        self._prepare(stack)
        # Its tensors are copied to their destinations; kept, they would double the memory.
        self._start.forget_payload()
        if self._recorder is not None and self.session is not None and self._can_save:
            self._recorder.prepare(self.session.state)
        self._has_begun = True
        self.hooks.emit("on_fit_start")
        begin = time.perf_counter()
        reason: str = self.loop.run()
        self._seconds = time.perf_counter() - begin
        self.call.runtime.listener.note_safe_point()
        self.display.close()
        return reason

    def _keep_in_hand(self, end: Record, *, is_interrupted: bool = False) -> None:
        """Describe how the model is left, for evaluations in this process."""
        replicas, obstacle = self.replicas, ""
        if is_interrupted:
            obstacle = "fit was interrupted"
        elif not replicas.has_single_process:
            obstacle = f"{replicas.num_processes} processes trained it"
        elif replicas.is_sharded:
            obstacle = "it is sharded"
        plugins = dict(self.plugins)
        self.in_hand = ModelInHand(self.model, obstacle, end, plugins)

    def _record_end(self, session: Session) -> Record:
        """Return counters and logs at the end, without what the objects themselves hold."""
        return Record(
            training_state=session.state.dict(),
            cursor=session.cursor.dict(),
            model={},
            rng={},
            num_threads=torch.get_num_threads(),
            num_replicas=self.replicas.num_replicas,
            options=self._start.definition,
            # Other processes have no logs.
            **(run_log.log_places() if self.replicas.rank == 0 else {}),
        )

    def _prepare(self, stack: ExitStack) -> None:
        record = self._record
        known = self._find_known(record)
        stack.enter_context(self._numerics(known))
        self._open_logs(record)
        self._start.rules = (
            run_identity.adopt_rules(None)
            if known is None
            else run_identity.adopt_rules(known.options, place=with_step(*known.counters))
        )
        self._follow_rules(self._start.rules)
        self._set_up(is_inference=False)
        session = self._build()
        session.audit = make_audit(self.options.audit, session, self.loop)
        self._take_session(session)
        log_order(self.plugins, self.hooks)
        if record is not None:
            self._load(session, record)
            on_first(self.replicas, lambda: self._compare_start(record))
        folder, plans = self._start.folder, self._start.plans
        if folder is not None and plans:
            on_first(self.replicas, lambda: rewind_folder(folder, plans))
        run_log.cut_logs()
        if record is None or self._start.is_branch:
            params = stored_params(self._params.options)
            named = {f"params.{name}": value for name, value in params.items()}
            run_log.log_hparams(named | self._given.all)
        if self._evidence is not None:
            self._evidence.open(self._start)

    def _compare_start(self, record: Record) -> None:
        """Warn once of all that differs from the start that wrote the checkpoint, or refuse."""
        machine = run_log.describe_other_machine(record.machine, self.engine)
        others = "" if self._evidence is None else self._evidence.check()
        if machine or others:
            _LOGGER.warning("%s", " ".join(filter(None, (machine, others))))

    def _open_logs(self, record: Record | None) -> None:
        # Logs of another run must not be truncated: a branch starts its own.
        logged = None if self._start.is_branch else record
        run_log.open_logs(self.options, self._name, logged, is_training=True)

    @property
    def _record(self) -> Record | None:
        return None if self._start.loaded is None else self._start.loaded.record

    @property
    def _name(self) -> str:
        return self.options.name_for(self.model.save_name)

    def _is_finished(self) -> bool:
        loaded = self._start.loaded
        if loaded is None or loaded.sidecar is None or not loaded.sidecar.finished:
            return False
        return run_identity.is_still_finished(self.options, loaded.record, loaded.sidecar.finished)

    def _report_finished(self) -> None:
        loaded = self._start.loaded
        assert loaded is not None
        assert loaded.sidecar is not None
        is_passed = run_identity.is_shortened(self.options, loaded.record.options)
        reason = loaded.sidecar.finished or ""
        changes = "" if is_passed else self._compare_given().changes
        if not is_passed and self.replicas.rank == 0 and self.options.writes_ledger:
            report_changed_start(
                loaded.path.parent,
                lambda: manifest_facts(self.call, None),
                after=loaded.record.place[1],
                allowed=self.options.allow_changes,
            )
        run_identity.report_finished(
            self._name, loaded, reason, is_passed=is_passed, changes=changes
        )
        self._params.report()

    def _compare_params(self, *, is_finished: bool) -> DeclaredParams:
        """Compare what rank 0 declares with the checkpoint, before anything is built."""
        options, loaded = self.options, self._start.loaded

        def compare() -> DeclaredParams:
            params = scrub_table(options.params)
            if loaded is None:
                return begin_params(params)
            return compare_params(
                params,
                loaded.record,
                options,
                name=self._name,
                path=loaded.path,
                is_finished=is_finished,
            )

        return on_first(self.replicas, compare)

    def _compare_given(self) -> GivenValues:
        """Compare what the constructors of rank 0 were given with the checkpoint."""
        model, record, options = self.model, self._record, self.options

        def compare() -> GivenValues:
            owners = {"model": model, "data": self.datamodule}
            arguments = {
                f"{prefix}.{name}": value
                for prefix, owner in owners.items()
                for name, value in arguments_of(owner).items()
                # The name of the run is compared by itself.
                if value != model.save_name
            }
            parts = {**model.discovery.optimizers(), **model.discovery.schedulers()}
            settings = scrub_table(self._constructor_calls.settings(parts))
            allowed = self.options.allow_changes
            stored = None if record is None else record.options
            is_over = record is not None and has_ended(options, record)
            return compare_given(scrub_table(arguments), settings, stored, allowed, is_over=is_over)

        return on_first(self.replicas, compare)

    def _find_known(self, record: Record | None) -> Record | None:
        """Return a record that knows how the run began; ``None`` for a new run."""
        return record

    def _numerics(self, known: Record | None) -> Any:
        threads = None if known is None else known.num_threads
        if threads not in (None, torch.get_num_threads()):
            _LOGGER.info(
                "Threads of this process: %d, as at the first start of the run (%d were set), "
                "because their number changes bits.",
                threads,
                torch.get_num_threads(),
            )
        return numerics(
            is_deterministic=self.options.enable_deterministic,
            use_cudnn_benchmark=self.options.enable_cudnn_benchmark,
            num_threads=threads,
        )

    def _build(self) -> Session:
        source = self._open_training_source()
        has_validation = self._open_source(Phase.VALIDATION) is not None
        owners = find_owners(
            self.plugins,
            self.model,
            self.datamodule,
            engine=self.engine,
            loop=(_LOOP_PATH, self.loop),
            source=source,
        )
        if self._start.folder is not None:
            owners.limit(self._start.folder.options.max_plain_bytes)
        self.owners = owners
        self._require_alike_setup()
        warn_of_idle_options(
            self.options.schedule,
            self.options.store if self._can_save else None,
            self.model,
            has_validation=has_validation,
        )
        claim = determine_trust(source, self._record, can_save=self._can_save)
        self._stranded = find_stranded_generators(source)
        claim = replace(claim, missing=claim.missing | self._stranded)
        schedulers = Schedulers(self.model.discovery.schedulers(), self.model.scheduler_interval)
        checkpoints, plugins = self.options, self.plugins.values()
        require_one_mode(checkpoints, plugins, schedulers)
        self._recorder = self._make_recorder(source, claim)
        session = Session(
            model=self.model,
            engine=self.engine,
            hooks=self.hooks,
            display=self.display,
            seed=self.options.seed,
            training_seed=self.options.seed_of("training"),
            schedule=self.options.schedule,
            sources=self.sources,
            plugins=self.plugins,
            schedulers=schedulers,
            best=BestSoFar(find_best_rule(checkpoints, plugins, self.model)),
            recorder=self._recorder,
            can_save=self._can_save,
            opens_early=not self._start.rules[run_identity.LATE_OPENING],
            trial_steps=self.options.sanity_steps,
            loop_states=LoopStates(self.loop, _LOOP_PATH),
            owner_states=self.owners,
            missing=claim.missing,
            claims=claim.words,
            check_record=self._check_record,
            note_last_safe_point=self.call.runtime.listener.note_safe_point,
            outside=self._make_outside(),
        )
        folder = self._start.folder
        session.moment.run_folder = None if folder is None else folder.path
        session.moment.went_back = self._start.is_branch or bool(self._start.plans)
        return session

    def _check_record(self, record: Record) -> None:
        if record.missing and self.options.on_incomplete == "raise":
            raise StateError(
                'Trainer(on_incomplete="raise") requires complete checkpoints, but the one of '
                f"iteration {with_step(*record.counters)} lacks {list_missing(record.missing)}. "
                "Nothing was written. Change what is named, or declare what need not be saved: "
                "unsaved = (...,)."
            )

    def _make_outside(self) -> Callable[[], str]:
        """Return what returns why the run is to be interrupted; empty if nothing asks for it."""
        return partial(self.call.runtime.listener.ask, saves=self._can_save)

    def _make_recorder(self, source: Source, claim: Claim) -> run_saves.FitRecorder:
        """Log the banner, with the level that the run reaches, and return the recorder."""
        reproducibility = find_reproducibility(
            self.options,
            self.engine,
            source,
            model=self.model,
            loop=self.loop,
            record=self._record,
            claim=claim,
        )
        identity = self._identify(source) | {"fingerprint": source.description.get("fingerprint")}
        limits = run_identity.limits(self.options)
        rules = {run_identity.KEY: self._start.rules}
        self._start.definition = identity | limits | rules
        self._given = self._compare_given()
        self._start.definition |= self._params.options | self._given.options
        self._start.definition[run_log.KEY] = run_log.read_arguments()
        self._evidence = self._make_evidence(source, identity, reproducibility)
        if self._evidence is not None:
            self._settings.callback(self._evidence.close)
        recorder = run_saves.FitRecorder(
            self._name,
            self.model,
            self._start,
            reproducibility=reproducibility,
            engine=self.engine,
            schedule=self.options.schedule,
            evidence=self._evidence,
            plugins=self.plugins.values(),
        )
        self._settings.callback(recorder.close)
        recorder.show_on(self.display)
        loaded = self._start.loaded
        run = self.options
        if loaded is None and run.random_seed is None:
            run_log.say_what_does_not_seed(self.call.torch_seed, run.seed)
        if self.options.print_banner:
            run_log.show_banner(
                self.model,
                {
                    "run": self._name,
                    "seed": run.describe_seed(),
                    **describe_run(self.model, self.sources, self.options.schedule),
                    "processes": describe_processes(self.replicas),
                    "reproducibility": str(reproducibility),
                },
                where=None if loaded is None else loaded.path.name,
            )
        return recorder

    def _make_evidence(
        self, source: Source, identity: dict[str, Any], reproducibility: Reproducibility
    ) -> RunEvidence | None:
        """Return what the run records of itself; ``None`` for nothing."""
        if self._start.folder is None or not self.options.writes_ledger:
            return None

        def describe() -> dict[str, Any]:
            return {
                **manifest_facts(self.call, source),
                "processes": {"number": self.replicas.num_processes},
                "level": {"level": reproducibility.level.value, "text": str(reproducibility)},
                **describe_topic("params", stored_params(self._params.options)),
                **describe_topic("found", self._given.all),
            }

        return make_evidence(
            self._start,
            self.model,
            self.replicas,
            identity,
            describe=describe,
            options=self.options,
        )

    def _identify(self, source: Source) -> dict[str, Any]:
        """Return what defines the run, by name."""
        return run_identity.identity(self.options, source.description, self.engine)

    def _open_training_source(self) -> Source:
        source = self._open_source(Phase.TRAINING)
        if source is None:
            raise ArgumentError(
                f"{type(self.datamodule).__name__} must have training data for fit, got none. "
                "Assign self._train_dataset in setup()."
            )
        check_training_source(
            source, can_save=self._can_save, is_by_epoch=self.options.schedule.is_by_epoch
        )
        start = self._start
        start.rewinds, start.plans = settle(start.rewinds, start.plans, source)
        apply_rewinds(start.rewinds, source)
        return source

    def _load(self, session: Session, record: Record) -> None:
        record = self._detach(record, is_shown="on_load_checkpoint" in session.hooks.active)
        state = TrainingState(**record.training_state)
        source = session.training_source
        cursor = find_cursor(record, source.description, session.replicas)
        if run_identity.is_extended(self.options, record.options):
            cursor.go_on()
        identity = self._identify(source)
        changes = run_identity.reconcile(
            record.options,
            identity,
            tuple(self.options.allow_changes),
            state=state,
            cursor=cursor,
        )
        self._start.is_shortened = run_identity.is_shortened(self.options, record.options)
        check_order(self._start.rewinds, changes, cursor)
        self._start.changes += changes
        self._start.changes += self._params.report()
        # What held at the end of a stage that the run has passed is not known.
        if not (self._start.is_shortened and has_ended(self.options, record)):
            self._start.changes += self._given.report()
        self._start.changes += [str(each.rewind) for each in self._start.plans]
        self._start.changes += run_identity.note_fingerprint(source.description, record.options)
        if record.options.get("length") == identity["length"]:
            session.saved_length = record.data.get("length")
            session.allows_other_length = "length" in self.options.allow_changes
        limits = run_identity.note_limits(self.options, record.options)
        self._start.changes += limits
        texts = map(run_log.as_change, (*changes, *limits))
        told = (*self._params.named, *self._given.named, *texts)
        run_log.report_arguments(record.options, told)
        self._start.changes += self._note_missing(record)
        payload = record.to_payload()
        session.hooks.emit("on_load_checkpoint", payload)
        adopt_settings = self._make_adoption(session)
        apply(Record.from_payload(payload), session, state=state, cursor=cursor)
        adopt_settings()
        session.requests.stop_reason = cursor.stop_reason
        folder = None if self._start.is_branch else self._start.folder
        session.best = continue_best(
            record.best_validations,
            session.best.rule,
            after=record.place[1],
            folder=None if folder is None else folder.path,
            replicas=self.replicas,
        )
        if session.schedulers is not None:
            session.schedulers.remember()
        session.hooks.emit("on_checkpoint_loaded")

    def _make_adoption(self, session: Session) -> Callable[[], None]:
        """Return what puts the settings of ``setup`` back after the load, if they are allowed."""
        given, schedule = self._given, self.options.schedule
        if not given.are_settings_adopted or session.schedulers is None:
            return lambda: None
        new = NewSettings(
            self.model.discovery.optimizers(),
            session.schedulers,
            self._constructor_calls.names_of,
        )
        steps = steps_of_epochs(
            session.training_source.num_batches(),
            schedule.accumulation_steps,
            is_by_epoch=schedule.is_by_epoch,
        )
        return lambda: new.apply(given.old_settings, steps)

    def _note_missing(self, record: Record) -> list[str]:
        """Warn of what the checkpoint lacks; returns it as text, to be recorded.

        The first save does not name it again, and this does not repeat what the start has named.
        """
        if not record.missing:
            return []
        lacking = {p: text for p, text in record.missing.items() if p not in self._stranded}
        if lacking:
            _LOGGER.warning(
                "The checkpoint of iteration %s is incomplete: it lacks %s. The resumed run has "
                "the values from setup() there, so bits may differ from those of an uninterrupted "
                "run. Declare what need not be saved: unsaved = (...,). "
                'Trainer(on_incomplete="raise") refuses to write such a checkpoint.',
                with_step(*record.counters),
                list_missing(lacking, most=len(lacking)),
            )
            self.model.discovery.note_named(lacking)
            self.owners.note_named(lacking)
        return [f"resumed without: {', '.join(record.missing)}"]

    def _report(self, error: BaseException) -> None:
        if self._evidence is not None:
            self._evidence.note_error(error)
        super()._report(error)

    def _describe_end(self) -> str:
        if self._recorder is None or self.session is None:
            return ""
        return self._recorder.describe_end(self.session, seconds=self._seconds)

    def _describe_rescue(self) -> str:
        loaded = self._start.loaded
        if not self._has_begun:
            return "" if loaded is None else f"Nothing was trained; {loaded.path} is unchanged."
        newest = None if self._recorder is None else self._recorder.settle()
        if newest is not None:
            return f"Run the same command again to resume from {newest.name}."
        return "No checkpoint was saved."


def make_audit(options: Audit | None, session: Session, loop: Loop) -> GradientAudit | None:
    """Return the audit of a run, or what computes along for others; ``None`` if there is neither.

    Args:
        options: which steps are audited; ``None`` for none.
        session: the run.
        loop: the root of all loops.
    """
    if session.engine.has_idle_turn:
        return RunningAlong(session)
    if options is None:
        return None
    own = sorted({type(part).__name__ for part in _other_loops(loop)})
    if own:
        _LOGGER.warning(
            "Trainer(audit=...) has no effect: %s takes the place of Helios' own BatchLoop or "
            "OptimizerLoop, so Helios does not know how to compute a gradient a second time.",
            ", ".join(own),
        )
        return None
    return StepAudit(session, every=options.every, is_strict=options.on_mismatch == "raise")


def _other_loops(loop: Loop) -> Iterator[Loop]:
    """Yield the loops that may compute gradients in another way."""
    is_outer = isinstance(loop, FitLoop | EpochLoop | EvaluationLoop)
    if not is_outer and type(loop) not in (BatchLoop, OptimizerLoop):
        yield loop
    for child in loop.children().values():
        yield from _other_loops(child)
