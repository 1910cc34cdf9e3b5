"""One call of fit, from the data's preparation to the note that the run is finished."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from helios.data.source import Source
from helios.engines.engine import numerics
from helios.errors import ArgumentError
from helios.hooks.bus import naming
from helios.model.schedulers import Schedulers
from helios.session import Session
from helios.startup import banner, outputs, resume
from helios.startup.call import Call
from helios.startup.folder import lock_folder
from helios.startup.mapped import detach
from helios.startup.migrated import find_cursor
from helios.startup.own_parts import take_own_parts
from helios.startup.processes import Plan, describe_processes
from helios.startup.promise import find_promise
from helios.startup.registration import log_order
from helios.startup.run import Run
from helios.startup.watch import PluginWatch
from helios.state import Phase, TrainingState

_LOGGER = logging.getLogger(__name__)

_LOOP_PATH = "fit"


class FitRun(Run):
    """One training; see ``Run`` for the arguments."""

    verb = "Training"

    def __init__(self, call: Call, plan: Plan, device: torch.device) -> None:
        super().__init__(call, plan, device)
        self._start = resume.Start()
        self._recorder: outputs.FitRecorder | None = None

    def _run(self, stack: ExitStack) -> bool:
        self._prepare_data()
        name = self.model.save_name
        lock = lock_folder(self.arguments, name, stack, team=self.replicas)
        self._start = resume.find_start(
            self.arguments, name, self.model.types_for_safe_load(), replicas=self.replicas
        )
        self._start.lock = lock
        if self._is_finished():
            # A script that uses the model after fit finds the weights and values of the run's end;
            # what only a training needs, such as optimizers, is as setup makes it.
            assert self._start.loaded is not None
            self._restore(detach(self._start.loaded.payload, self.model))
            return True
        self._prepare(stack)
        # Its tensors are copied where they belong; kept, they would double the state's memory.
        self._start.forget_payload()
        if self._recorder is not None and self.session is not None and self.arguments.can_save:
            self._recorder.prepare(self.session.state)
        self._has_begun = True
        self.hooks.emit("on_fit_start")
        reason = self.loop.run()
        self.call.standing.listener.note_safe_point()
        self.display.close()
        is_interrupted = self.session is not None and self.session.is_interrupted
        if self._recorder is not None:
            self._recorder.finish(None if is_interrupted else reason)
        if self.session is not None and is_interrupted:
            _LOGGER.warning(
                "The training was interrupted: %s. %s",
                self.session.requests.interruption,
                self._describe_rescue(),
            )
            return False
        self.call.standing.listener.tell_of_late_ones()
        _LOGGER.info("The training has ended: %s.", reason)
        return True

    def _prepare(self, stack: ExitStack) -> None:
        payload = self._payload
        stack.enter_context(self._numerics(payload))
        # Another run's logs are not this run's to cut back: a branch begins its own.
        logged = None if self._start.is_branch else payload
        outputs.open_logs(self.arguments, self._name, logged, is_training=True)
        self._set_up(is_inference=False)
        session = self._build()
        self._take_session(session)
        log_order(self.plugins, self.hooks)
        if payload is not None:
            self._load(session, payload)

    @property
    def _payload(self) -> dict[str, Any] | None:
        return None if self._start.loaded is None else self._start.loaded.payload

    @property
    def _name(self) -> str:
        return self.arguments.run_name or self.model.save_name

    def _is_finished(self) -> bool:
        loaded = self._start.loaded
        if loaded is None or loaded.sidecar is None or not loaded.sidecar.finished:
            return False
        if not resume.is_still_finished(self.arguments, loaded.payload, loaded.sidecar.finished):
            return False
        resume.report_finished(self._name, loaded, loaded.sidecar.finished)
        return True

    def _numerics(self, payload: dict[str, Any] | None) -> Any:
        threads = None if payload is None else payload["num_threads"]
        if threads not in (None, torch.get_num_threads()):
            _LOGGER.info(
                "Threads of this process: %d, as at the run's first start (%d were set), since "
                "their number changes bits.",
                threads,
                torch.get_num_threads(),
            )
        return numerics(
            is_deterministic=self.arguments.enable_deterministic,
            use_cudnn_benchmark=self.arguments.enable_cudnn_benchmark,
            num_threads=threads,
        )

    def _build(self) -> Session:
        source = self._open_training_source()
        has_validation = self._open_source(Phase.VALIDATION) is not None
        self._require_alike_setup()
        if self.arguments.valid_frequency is not None and not has_validation:
            _LOGGER.warning(
                "There is no validation data, so valid_frequency and early_stop_cycles have no "
                "effect. Assign self._valid_dataset in the data module's setup()."
            )
        promise = find_promise(
            self.arguments,
            self.engine,
            source,
            model=self.model,
            loop=self.loop,
            payload=self._payload,
        )
        self._recorder = outputs.FitRecorder(
            self.arguments,
            self.model,
            self._start,
            promise=promise,
            engine=self.engine,
            options=resume.identity(self.arguments, source.description, self.engine)
            | {"fingerprint": source.description.get("fingerprint")}
            | resume.limits(self.arguments),
            watch=PluginWatch(self.plugins, self.model),
        )
        self._settings.callback(self._recorder.close)
        loaded = self._start.loaded
        banner.show_banner(
            self.arguments,
            self.model,
            {
                "run": self._name,
                "processes": describe_processes(self.replicas),
                "promise": f"{promise.level} ({promise.text})",
            },
            where=None if loaded is None else loaded.path.name,
        )
        return Session(
            model=self.model,
            engine=self.engine,
            hooks=self.hooks,
            display=self.display,
            seed=self.arguments.seed,
            schedule=self.arguments.schedule,
            sources=self.sources,
            plugins=self.plugins,
            schedulers=Schedulers(self.model.discovery.schedulers(), self.model.scheduler_interval),
            recorder=self._recorder,
            can_save=self.arguments.can_save,
            loop_states=self._collect_loops,
            outside=partial(self.call.standing.listener.ask, saves=self.arguments.can_save),
        )

    def _collect_loops(self) -> dict[str, Any]:
        """Return the state of the loops, which is asked for at safe points only."""
        if self.session is not None and self.session.is_leaving:
            self.call.standing.listener.note_safe_point()
        return self.loop.collect_states(_LOOP_PATH)

    def _open_training_source(self) -> Source:
        source = self._open_source(Phase.TRAINING)
        if source is None:
            raise ArgumentError(
                f"{type(self.datamodule).__name__} must have training data for fit, got none. "
                "Assign self._train_dataset in setup()."
            )
        if self.arguments.can_save and not source.can_resume:
            raise ArgumentError(
                f"The training loader, a {type(source.loader).__name__}, can neither seek nor be "
                f"saved, so a checkpoint could not resume exactly. {source.remedy} Or leave out "
                "chkpt_frequency."
            )
        return source

    def _load(self, session: Session, payload: dict[str, Any]) -> None:
        is_shown = session.hooks.is_heard("on_load_checkpoint")
        payload = detach(payload, self.model, is_shown=is_shown)
        state = TrainingState(**payload["training_state"])
        source = session.training_source
        cursor = find_cursor(payload, source.description, session.replicas)
        if resume.is_extended(self.arguments, payload["options"]):
            cursor.go_on()
        identity = resume.identity(self.arguments, source.description, self.engine)
        self._start.changes += resume.reconcile(
            payload["options"],
            identity,
            tuple(self.arguments.allow_changes),
            state=state,
            cursor=cursor,
        )
        self._start.changes += resume.note_fingerprint(source.description, payload["options"])
        if payload["options"].get("length") == identity["length"]:
            session.saved_length = payload["data"].get("length")
            session.allows_other_length = "length" in self.arguments.allow_changes
        self._start.changes += resume.note_limits(self.arguments, payload["options"])
        self._start.is_shortened = resume.is_shortened(self.arguments, payload["options"])
        banner.warn_of_other_machine(payload.get("machine", {}), self.engine)
        session.hooks.emit("on_load_checkpoint", payload)
        payload = take_own_parts(payload, session.replicas)
        session.state, session.cursor, session.is_resumed = state, cursor, True
        session.requests.stop_reason = cursor.stop_reason
        session.is_manual = payload["is_manual"]
        session.obstacles += payload.get("obstacles", [])
        session.unshared += payload.get("unshared", [])
        self.engine.load_state_dict(payload["engine"])
        self.model.load_state_dict(payload["model"])
        self._load_tables(payload["tables"])
        source.load_state_dict(payload["data"]["state"])
        self._load_plugins(session, payload["plugins"])
        self._load_loops(session, payload["loops"])
        session.saved_randomness = payload["rng"]
        if session.schedulers is not None:
            session.schedulers.remember()
        session.hooks.emit("on_checkpoint_loaded")

    def _load_plugins(self, session: Session, states: dict[str, Any]) -> None:
        for name, state in states.items():
            if name in self.plugins:
                with naming(self.plugins[name], "load_state_dict"):
                    self.plugins[name].load_state_dict(state)
            elif state:
                session.carried_plugins[name] = state
        _warn_of_left_over("plugin", list(session.carried_plugins))

    def _load_loops(self, session: Session, states: dict[str, Any]) -> None:
        left = dict(states)
        self.loop.spread_states(_LOOP_PATH, left)
        session.carried_loops.update(left)
        _warn_of_left_over("loop", list(left))

    def _describe_rescue(self) -> str:
        loaded = self._start.loaded
        if not self._has_begun:
            return "" if loaded is None else f"Nothing was trained; {loaded.path} is as it was."
        newest = None if self._recorder is None else self._recorder.settle()
        if newest is not None:
            return f"The same command goes on from {newest.name}."
        return "No checkpoint was saved."


def _warn_of_left_over(kind: str, names: list[str]) -> None:
    if names:
        _LOGGER.warning(
            "The checkpoint holds the state of a %s that is not there: %s. It is carried along "
            "unread; register it again to use it.",
            kind,
            ", ".join(names),
        )
