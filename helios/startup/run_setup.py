"""What every call of fit, validate, test or predict has: one set-up, one session, one tear-down.

Whatever happens, everything that was set up is torn down, and changed settings are restored.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from helios.checkpoint.capture import Trained, apply_trained, capture_trained, detach
from helios.checkpoint.record import Record
from helios.core import rng
from helios.core.registry import update_all_registries
from helios.core.sharded_tensors import RowShare
from helios.counters import Phase
from helios.data.datamodule import DataModule
from helios.data.phase_sources import open_sources
from helios.data.source import Shard, Source
from helios.distributed.pickling import pack_by_value
from helios.distributed.process_groups import is_lost_peer
from helios.engines.device import move_to_device
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentTypeError, Interrupted
from helios.hooks.bus import Bus
from helios.launch.launcher import Launch
from helios.listeners import RunListener
from helios.loops.loop import Loop, LoopStates
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.replicas.on_all_ranks import on_each, on_first
from helios.replicas.replicas import Replicas
from helios.session import Place, Session
from helios.startup.changed_start import read_fresh
from helios.startup.hangs import HangWatch, Whereabouts, showing_stacks
from helios.startup.model_in_hand import ModelInHand
from helios.startup.model_setup import (
    build_networks,
    set_train_mode,
    take_own_processor,
)
from helios.startup.objects import (
    check_batch_processor,
    check_model_state,
    check_plugins,
    warn_of_unknown_hooks,
)
from helios.startup.processes import (
    SAME_DATA,
    describe_data_sets,
    describe_setup,
    device_for,
    options_that_must_match,
    require_alike,
)
from helios.startup.state_owners import find_owners
from helios.startup.trainer_call import Call
from helios.startup.trainer_options import Options
from helios.state.owners import Owners
from helios.terminal import root_logger as log
from helios.terminal.progress import Display, create_display

_LOGGER = logging.getLogger(__name__)
Result = TypeVar("Result")

LOOP_PATH = "fit"
"""The role of the loop over all epochs."""

_PURPOSES = {
    Phase.TRAINING: "fetch",
    Phase.VALIDATION: "fetch-validation",
    Phase.TESTING: "fetch-testing",
    Phase.PREDICTION: "fetch-prediction",
}


def _make_engine(options: Options, device: torch.device) -> Engine:
    if options.engine is not None:
        return options.engine
    return Engine(
        device,
        clip_norm=options.clip_norm,
        clip_value=options.clip_value,
        precision=options.precision or Precision.FP32,
    )


@final
class Run:
    """What a call sets up, the session that its loop sees, and how all of it is torn down.

    Args:
        call: the call.
        launch: how this process was started, and its rank.
        num_replicas: V; 0 if every process works on its own.
        is_shown: whether this process does the work itself, so that its progress is shown.

    Attributes:
        team: the processes, for what they do together.
        settings: closed at the end of the call, whatever happens.
        sources: the data of each phase that was opened.
        session: what its loop sees; ``None`` before there is one.
        has_begun: whether ``on_fit_start`` was reached, which ``on_fit_end`` follows.
        is_reported: whether another process has logged the error of this one.
        listeners: what hears of an error that ends the call.
        describe_rescue: returns what an error leaves to the user, as sentences.
        fresh: what a training starts with, before anything is loaded.
        info: the rank of this process.
        has_prepared: whether the process that started this one has already prepared the data.
        collects: whether to keep the state at the end of the call for another process.
        collected: that state, packed; ``None`` before the regular end.
        in_hand: how a training leaves the model, for the evaluations that follow.
    """

    def __init__(
        self, call: Call, launch: Launch, num_replicas: int, *, is_shown: bool = True
    ) -> None:
        self.call = call
        self.info = call.runtime.info = launch.info
        self.options = call.options
        self.plugins: Mapping[str, Plugin] = call.plugins
        self.model: Model = call.model
        self.datamodule: DataModule = call.datamodule
        self.has_prepared = False
        self.collects = False
        self.collected: bytes | None = None
        self.in_hand: ModelInHand | None = None
        self.has_begun = False
        self.is_reported = False
        self.listeners: Sequence[RunListener] = ()
        self.describe_rescue: Callable[[], str] = str
        check_plugins(self.plugins)
        check_model_state(self.model)
        self.team = Replicas(self.info.world_size, self.info)
        self.engine = _make_engine(self.options, device_for(self.options, launch))
        self.engine.replicas = Replicas()
        if num_replicas:
            self.engine.replicas = Replicas(
                num_replicas,
                self.info,
                device=self.engine.device,
                is_sharded=self.options.sharding == "full",
            )
        self.hooks = self._make_bus()
        self.display = Display()
        self._is_shown = is_shown
        if is_shown:
            self.display = create_display(self.options.enable_progress_bar)
        self.sources: dict[Phase, list[Source]] = {}
        self.session: Session | None = None
        self.settings = ExitStack()
        self.fresh: dict[str, Any] = {}
        self.owners = Owners()

    def _make_bus(self) -> Bus:
        return Bus(
            plugins=list(self.plugins.values()),
            monitors=[plugin for plugin in self.plugins.values() if plugin.monitor],
            data=self.datamodule,
            model=self.model,
            engine=self.engine,
        )

    @property
    def loop(self) -> Loop:
        """The loop to run."""
        return self.call.loop

    @property
    def replicas(self) -> Replicas:
        """The replicas of the run, and which of them this process runs."""
        return self.engine.replicas

    def execute(self, work: Callable[[Run], Result]) -> Result:
        """Do the work of the call, and tear down whatever it has set up.

        Raises:
            BaseException: whatever the call raises, after everything was torn down.
        """
        is_regular = False
        log.create_default_loggers(
            enable_tensorboard=self.options.enable_tensorboard,
            capture_warnings=self.options.capture_warnings,
        )
        with rng.numpy_global_kept(), self._watching():
            try:
                for owner in (*self.plugins.values(), self.model, self.datamodule):
                    warn_of_unknown_hooks(owner)
                result = work(self)
                is_regular = True
                return result
            except BaseException as error:
                self._report(error)
                raise
            finally:
                self._tear_down(is_regular=is_regular)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Say which process is behind if nothing moves, and end this one after ``hang_timeout``."""
        if not self._is_shown:
            # It waits for the ranks, which watch themselves.
            yield
            return
        writes = self.options.can_save and self.call.replay is None
        watch = HangWatch(
            self.info,
            self._find_place,
            warning=self.options.hang_warning,
            timeout=self.options.hang_timeout,
            folder=self.folder if writes else None,
        )
        with showing_stacks(), self.call.runtime.listener.describing(watch), watch.watching():
            yield

    @property
    def folder(self) -> Path | None:
        """Where the checkpoints of the run are; ``None`` without ``chkpt_root``."""
        root = self.options.chkpt_root
        return None if root is None else root / self.model.save_name

    def _find_place(self) -> Whereabouts:
        session = self.session
        if session is None:
            return Whereabouts(self.call.verb, Place.STARTING.value, order=[-1])
        is_training = self.call.phase is Phase.TRAINING
        place = list(Place).index(session.place)
        order = [session.state.global_iteration, place, session.num_evaluated]
        return Whereabouts(
            f"step {session.state.global_step + 1}" if is_training else self.call.verb,
            session.place.value,
            order=order,
            progress=(session.num_read_again, *order),
        )

    def _report(self, error: BaseException) -> None:
        for listener in self.listeners:
            listener.ended("", error=error)
        if self.is_reported:
            return
        self.display.close()
        self.hooks.emit_to_all("on_exception", error)
        if isinstance(error, KeyboardInterrupt):
            _LOGGER.warning("Interrupted. %s", self.describe_rescue())
        elif isinstance(error, self.call.passed_through):
            return
        elif not self.team.has_single_process and is_lost_peer(error):
            # The cause is in the log of another process.
            _LOGGER.error("%s ends because another process has ended.", self.call.verb)
            _LOGGER.debug("This process noticed it as follows.", exc_info=error)
        else:
            text = f"{self.call.verb} ended with an error ({type(error).__name__}). "
            text = f"{text}{self.describe_rescue()}".rstrip()
            _LOGGER.error("%s", text, exc_info=error, extra=log.RAISED)

    def interrupt(self, reason: str) -> Interrupted:
        """Return what has interrupted the call, the same in all processes.

        Args:
            reason: what it was.
        """
        numbers = self.team.gather_objects(self.call.runtime.listener.number)
        number = next((number for number in numbers if number is not None), None)
        return Interrupted(on_first(self.team, lambda: self.call.find_code(number)), reason)

    def _tear_down(self, *, is_regular: bool) -> None:
        # A stack runs all of these, last first, even if one of them raises.
        with ExitStack() as stack:
            stack.callback(log.close_default_loggers)
            stack.callback(self._forget_session)
            stack.callback(self.loop._attach, None)
            for sources in self.sources.values():
                for source in sources:
                    stack.callback(source.close)
            stack.callback(self.hooks.emit_to_all, "teardown")
            if is_regular and self.in_hand is not None:
                stack.callback(self.in_hand.record_attributes)
            if is_regular and self.collects:
                stack.callback(self.collect)
            if is_regular and self.has_begun:
                stack.callback(self._emit_fit_end)
            stack.callback(self.engine.teardown)
            stack.callback(self.display.close)
            # After the loops: an interrupted evaluation restores the settings of the training.
            stack.callback(self.settings.close)
            stack.callback(self.loop.teardown)
            stack.callback(self.call.show, None)
        if is_regular and self.in_hand is not None:
            self.in_hand.record_contents()
            self.call.runtime.in_hand = self.in_hand

    def _emit_fit_end(self) -> None:
        try:
            self.hooks.emit("on_fit_end")
        except BaseException as error:
            # The teardown has started, so nothing else would report or log it.
            self._report(error)
            raise

    def collect(self) -> None:
        """Keep the state that a process needs to have the model as it is here.

        All processes build it, because a plugin may gather its state; rank 0 keeps it.
        """
        assert self.session is not None
        trained = capture_trained(self.session)
        if self.info.rank != 0:
            return
        on_cpu = move_to_device(trained, torch.device("cpu"))
        self.collected = pack_by_value(on_cpu, "The state of model and plugins")

    def require_alike_setup(self) -> None:
        """Check that all processes have the same receivers and data."""
        if not self.replicas.has_single_process:
            require_alike(self.replicas, describe_setup(self.hooks, self.sources))
            require_alike(self.replicas, describe_data_sets(self.sources), SAME_DATA)

    def prepare_data(self) -> None:
        """Let one process of each machine prepare the data, while the others wait."""
        own = options_that_must_match(self.options, self.plugins, self.replicas)
        require_alike(self.replicas, own)

        def prepare() -> None:
            if self.info.local_rank == 0:
                self.datamodule.prepare_data()

        if not self.has_prepared:
            on_each(self.team, prepare)

    def restore(self, trained: Trained) -> None:
        """Set everything up, with the results of a call that has ended."""
        is_inference = self.call.phase is not Phase.TRAINING
        self.set_up(is_inference=is_inference, is_resumed=True)
        self.find_owners(self.open_saved_source(trained))
        session = self.make_inference_session()
        self.take_session(session)
        apply_trained(trained, session, is_inference=is_inference)

    @property
    def share(self) -> RowShare | None:
        """What this process reads of sharded tensors in a checkpoint; ``None`` for everything."""
        share = self.replicas.share
        if share is None:
            return None
        plugins = [f"plugins.{name}." for name, part in self.plugins.items() if part.loads_shards]
        return share._replace(prefixes=(*share.prefixes, *plugins))

    def detach(self, record: Record, *, is_shown: bool = False) -> Record:
        """Return a record without references to its file; ``is_shown``: user code sees it whole."""
        keeps_nothing = type(self.model).load_state_dict is Model.load_state_dict and not is_shown
        return detach(record, keeps_model=not keeps_nothing, is_shown=is_shown)

    def take_session(self, session: Session) -> None:
        """Set the session of all objects that may see it."""
        self.session = session
        self.call.show(session)
        for plugin in self.plugins.values():
            plugin.context = session.context
        vars(self.model)["_run_context"] = session.context
        self.loop._attach(session)

    def make_inference_session(self, phase: Phase = Phase.TRAINING) -> Session:
        """Return a session that does not train."""
        return Session(
            model=self.model,
            engine=self.engine,
            hooks=self.hooks,
            display=self.display,
            seed=self.options.seed,
            sources=self.sources,
            plugins=self.plugins,
            phase=phase,
            run_folder=self.folder,
            loop_states=LoopStates(self.call.roots.fit, LOOP_PATH, carries=False),
            owner_states=self.owners,
        )

    def _forget_session(self) -> None:
        vars(self.model)["_run_context"] = None
        for plugin in self.plugins.values():
            vars(plugin).pop("context", None)
        # A user's engine outlives the run; a process group does not.
        self.engine.replicas.close()
        self.team.close()
        self.engine.replicas = self.team = Replicas()

    def _set_places(self) -> None:
        """Set ranks and devices of the user's objects."""
        is_distributed = not self.replicas.has_single_replica
        info = self.info
        owners: list[Plugin | Model] = [*self.plugins.values(), self.model]
        for owner in owners:
            owner.device = self.engine.device
            owner.map_loc = str(self.engine.device)
            owner.global_rank, owner.rank = info.rank, info.local_rank
            owner.is_distributed = is_distributed
        self.model.engine = self.engine
        self.datamodule.global_rank, self.datamodule.local_rank = info.rank, info.local_rank
        self.datamodule.is_distributed = is_distributed
        self.datamodule.num_replicas = self.replicas.num_replicas

    def set_up_others(self) -> None:
        """Set up everything but the model: seed, registries, plugins and data."""
        registry = self.options
        run = self.options
        rng.seed_setup(run.seed)
        if registry.src_root is not None:
            update_all_registries(registry.src_root, import_prefix=registry.import_prefix)
        self._set_places()
        for plugin in self.plugins.values():
            plugin.setup()
        self.datamodule.setup()

    def open_saved_source(self, trained: Trained | None) -> Source | None:
        """Open the training data if a data set or its collate function has a state."""
        names = () if trained is None else trained.owners
        is_saved = any(name.startswith(("data set", "collate function")) for name in names)
        return self.open_source(Phase.TRAINING) if is_saved else None

    def find_owners(self, source: Source | None = None) -> None:
        """Find who holds state, and what a training starts with, right after the set-up."""
        self.owners = find_owners(
            self.plugins,
            self.model,
            self.datamodule,
            engine=self.engine,
            loop=(LOOP_PATH, self.call.roots.fit),
            source=source,
            validation=self.sources.get(Phase.VALIDATION, ()) if source is not None else (),
        )
        if self.call.phase is Phase.TRAINING:
            self.fresh = read_fresh(self.model, self.datamodule, self.owners.parts)

    def set_up(self, *, is_inference: bool, is_resumed: bool = False) -> None:
        """Set up everything."""
        self.set_up_others()
        run = self.options
        take_own_processor(self.model)
        for table in self.model.tables.values():
            table.clear()
        if self.engine.device.type != "cpu":
            # A trainer and its model know each other, so a run that was dropped keeps its memory.
            gc.collect()
        again = build_networks(self.model, self.engine, run, is_inference=is_inference)
        self.settings.enter_context(again)
        if not is_inference:
            set_train_mode(self.model, warns=not is_resumed)
        check_batch_processor(self.model, is_inference=is_inference)
        self.model.discovery.safe_types = tuple(self.model.types_for_safe_load())
        self.model.discovery.take_baseline()
        self.renew_hooks()

    def renew_hooks(self) -> None:
        """Let methods that setup has replaced receive events from here on."""
        self.hooks = self._make_bus()

    def open_source(self, phase: Phase) -> Source | None:
        """Open the data of a phase; returns that of its first loader, ``None`` without data."""
        make = {
            Phase.TRAINING: self.datamodule.train_dataloader,
            Phase.VALIDATION: self.datamodule.valid_dataloader,
            Phase.TESTING: self.datamodule.test_dataloader,
            Phase.PREDICTION: self.datamodule.predict_dataloader,
        }[phase]
        found: Any = make()
        if found is None:
            return None
        if phase is Phase.TRAINING and isinstance(found, list | Mapping):
            raise ArgumentTypeError(
                f"{type(self.datamodule).__name__}.train_dataloader() must return one loader, got "
                f"a {type(found).__name__} of {len(found)}. Join the data sets, or use a "
                "batch_sampler that mixes them."
            )
        replicas, run = self.replicas, self.options
        self.sources[phase] = open_sources(
            found,
            label=phase.value,
            run_seed=run.seed,
            purpose=_PURPOSES[phase],
            limit=self.options.batch_limits.get(phase),
            share=Shard(
                replicas.num_replicas, replicas.local_replicas, pads=phase is Phase.TRAINING
            ),
        )
        return self.sources[phase][0]
