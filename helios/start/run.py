"""One call of fit, validate, test or predict: what was asked for, and how a process carries it out.

What was asked for is sent to every process that runs the call. Whatever happens, everything that a
process has set up is torn down, and changed settings are restored.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import torch

from helios.checkpoint import file_names
from helios.checkpoint.capture import apply_trained, capture_trained, detach
from helios.checkpoint.frozen import references_of
from helios.checkpoint.record import Record
from helios.core import rng
from helios.core.registry import update_all_registries
from helios.core.sharded_tensors import RowShare
from helios.core.signal_watch import TRY_AGAIN
from helios.counters import Phase
from helios.data.datamodule import DataModule
from helios.data.phase_sources import open_sources
from helios.data.source import Shard, Source
from helios.distributed.pickling import pack_by_value
from helios.distributed.process_groups import DistributedInfo, is_lost_peer
from helios.engines.device import move_to_device
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentTypeError, Interrupted, UsageError
from helios.hooks.bus import Bus, check_state_methods
from helios.launch.launcher import Launch
from helios.listeners import RunListener
from helios.loops.loop import Loop, find_loops_with_state
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.run_state import Place, RunState
from helios.start import model_setup, processes
from helios.start.changes import read_fresh
from helios.start.hangs import HangWatch, Whereabouts
from helios.start.objects import (
    PluginTable,
    Roots,
    check_batch_processor,
    note_own_log,
    warn_of_unknown_hooks,
    warn_of_unread_datasets,
)
from helios.start.options import Options
from helios.start.origin import CheckpointChoice, Choice, choose_checkpoint
from helios.start.signals import Listener, find_signal_code
from helios.start.stateful import find_owners
from helios.start.trained_model import TrainedModel
from helios.state.owners import Owners
from helios.terminal import root_logger as log
from helios.terminal.progress import Display, ProgressDisplay

if TYPE_CHECKING:
    from helios.start.replay import ReplayRange

_LOGGER = logging.getLogger(__name__)
Result = TypeVar("Result")

_OF_MODEL = "Without them all networks, optimizers and schedulers among its attributes are saved."


class _Process:
    """The call that this process runs, of which a forked child has none, and what it trained."""

    calls: ClassVar[dict[int, object]] = {}
    finished: ClassVar[set[Path]] = set()


@contextmanager
def only_call() -> Iterator[None]:
    """Run a call in the block; enter it before any part of the call is done.

    A process has one set of loggers, generators and signals.

    Raises:
        UsageError: if this process runs a call already, of any trainer and in any thread; that one
            is not affected.
    """
    own, pid = object(), os.getpid()
    # One step, so that of two threads that start at once one is refused.
    if _Process.calls.setdefault(pid, own) is not own:
        raise UsageError(
            "A process must run one call at a time, but fit, validate, test or predict was called "
            "while another one is running: inside a hook, or in another thread. Set "
            "valid_frequency to validate inside fit, wait until the first call has ended, or "
            "start a process for the second one."
        )
    try:
        yield
    finally:
        del _Process.calls[pid]


@final
class Run:
    """One call of fit, validate, test or predict.

    Args:
        phase: what to do; ``Phase.TRAINING`` for fit.
        options: options of the trainer.
        plugins: by id.
        loops: the loops.
        model: the user's model.
        datamodule: the user's data.
        passed_through: types of exceptions that are not logged.
        checkpoint: the checkpoint that an evaluation was asked to load.
        last: how the trainer's last ``fit`` has left its model; ``None`` before, and after an
            error.
        before: the trainer's call before this one.

    Attributes:
        choice: what ``checkpoint`` means.
        trained: how ``fit`` has left the model that is evaluated, or, at the end of a run,
            how that leaves it; ``None`` for any other model.
        is_as_it_is: whether the model is evaluated as it is in this process, after ``fit``.
        reason_to_load: why it is not, if no checkpoint was asked for; empty for other models.
        replay: the part of a run that is only repeated, once it is found; ``None`` to train.
        is_again: whether this process has finished the run before.
        queue: receives what spawned ranks send; ``None`` before there were any.
        assigned: the attributes of objects before and after a set-up in the launcher, by id.
        info: the rank of this process.
        signals: the signals received during the call.
        team: the processes, for what they do together.
        settings: closed at the end of the call, whatever happens.
        sources: the data of each phase that was opened.
        parts: what its loop gets; ``None`` before it is there.
        is_live: whether the loop has it still.
        has_begun: whether ``on_fit_start`` was reached, which ``on_fit_end`` follows.
        is_reported: whether another process has logged the error of this one.
        listeners: listen to a run.
        describe_rescue: returns what an error leaves to the user, as sentences.
        fresh: what a run starts with, before anything is loaded.
        horizon: the length of the run, as ``setup`` has asked for it.
        base: the digests of frozen weights that a trial of ``setup`` has made; ``None`` without.
        is_rank: whether this process was started for the call by one that has prepared the data,
            and that needs the state at the end.
        collected: that state, packed; ``None`` before the regular end.
    """

    def __init__(
        self,
        phase: Phase,
        options: Options,
        plugins: PluginTable,
        loops: Roots,
        model: Model,
        datamodule: DataModule,
        *,
        passed_through: tuple[type[BaseException], ...] = (),
        checkpoint: Choice = "auto",
        last: TrainedModel | None = None,
        before: Run | None = None,
    ) -> None:
        self.phase = phase
        self.options = options
        self.plugins: Mapping[str, Plugin] = plugins
        self.table = plugins
        self.loops = loops
        self.model = model
        self.datamodule = datamodule
        self.passed_through = passed_through
        self.replay: ReplayRange | None = None
        self.trained: TrainedModel | None = None
        self.reason_to_load, self.is_as_it_is = "", False
        self.choice = CheckpointChoice()
        if phase is not Phase.TRAINING:
            if last is not None and last.model is model:
                self.trained = last
                if checkpoint in ("auto", None):
                    self.reason_to_load = last.reason_to_load
                    self.is_as_it_is = not self.reason_to_load
            self.choice = choose_checkpoint(self, checkpoint, has_fitted=last is not None)
        self.queue: Any = None if before is None else before.queue
        self.assigned: dict[int, tuple[dict[str, Any], dict[str, Any]]] = (
            {} if before is None else before.assigned
        )
        self.is_again = options.has_new_length and self.folder in _Process.finished
        self._be_idle()

    def note_finished(self) -> None:
        """Note that a run has ended: the same one again is a mistake of the script."""
        if self.folder is not None:
            _Process.finished.add(self.folder)

    def _be_idle(self) -> None:
        """Have nothing that belongs to this process."""
        self.info = DistributedInfo()
        self.signals = Listener()
        self.parts: RunParts | None = None
        self.is_live = False
        self.is_rank = False
        self.collected: bytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a rank needs to run the same call."""
        return {name: vars(self)[name] for name in _SENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what the launcher has sent."""
        vars(self).update(state)
        self.trained, self.assigned, self.queue = None, {}, None
        self._be_idle()

    def enter(self, launch: Launch, num_replicas: int, *, is_shown: bool = True) -> None:
        """Prepare to run the call in this process; nothing is set up yet.

        Args:
            launch: how this process was started, and its rank.
            num_replicas: V; 0 if every process works on its own.
            is_shown: whether this process does the work itself, so that its progress is shown.
        """
        self.info = launch.info
        self.has_begun = False
        self.is_reported = False
        self.listeners: Sequence[RunListener] = ()
        self.describe_rescue: Callable[[], str] = str
        check_state_methods(self.model, Model, remedy=_OF_MODEL)
        self.team = Replicas(self.info.world_size, self.info)
        if self.phase is Phase.TRAINING:
            store = self.options.store_for(self.plugins.values())
            self.options = dataclasses.replace(self.options, store=store)
        options = self.options
        engine = options.engine
        if engine is None:
            engine = Engine(
                processes.device_for(options, launch),
                clip_norm=options.clip_norm,
                clip_value=options.clip_value,
                precision=options.precision or Precision.FP32,
            )
        self.engine = engine
        self.engine.replicas = Replicas()
        if num_replicas:
            self.engine.replicas = Replicas(
                num_replicas,
                self.info,
                device=self.engine.device,
                is_sharded=options.sharding == "full",
            )
        self.renew_hooks()
        self.display = Display()
        self._is_shown = is_shown
        if is_shown and self.info.rank == 0:
            self.display = ProgressDisplay(options.enable_progress_bar)
        self.sources: dict[Phase, list[Source]] = {}
        self.settings = ExitStack()
        self.fresh: dict[str, Any] = {}
        self.leaves_weights = False
        self.horizon: dict[str, int | None] = {}
        self.base: dict[str, str] | None = None
        self.owners = Owners()

    def renew_hooks(self) -> None:
        """Find what receives events from here on: ``setup`` may replace methods."""
        self.hooks = Bus(
            plugins=list(self.plugins.values()),
            monitors=[plugin for plugin in self.plugins.values() if plugin.monitor],
            data=self.datamodule,
            model=self.model,
            engine=self.engine,
        )

    @property
    def verb(self) -> str:
        """The name of the call, for messages."""
        if self.phase is Phase.TRAINING:
            return "Training" if self.replay is None else "Replay"
        return str(self.phase.value).capitalize()

    @property
    def loop(self) -> Loop:
        """The loop to run."""
        is_fit = self.phase is Phase.TRAINING
        return self.loops.fit if is_fit else self.loops.evaluations[self.phase]

    @property
    def name(self) -> str:
        """The name of the run, which its files have."""
        return self.options.run_name or self.model.save_name

    @property
    def objects(self) -> list[Any]:
        """The user's objects that are set up."""
        return [*self.plugins.values(), self.model, self.datamodule]

    def find_code(self, number: int | None) -> int:
        """Return the exit code after an interruption, by a signal if it was one.

        It asks for another start only if the same call would resume from a checkpoint.
        """
        options, folder = self.options, self.folder
        can_resume = options.resume_path is not None or (
            folder is not None
            and options.resume != "never"
            and bool(file_names.find_checkpoints(folder))
        )
        if can_resume:
            return TRY_AGAIN
        return 1 if number is None else find_signal_code(number)

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
                for owner in self.objects:
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
        writes = self.options.can_save and self.replay is None
        watch = HangWatch(
            self.info,
            self._find_place,
            timeout=self.options.hang_timeout,
            folder=self.folder if writes else None,
        )
        with watch.watching():
            yield

    @property
    def folder(self) -> Path | None:
        """The folder of the run's checkpoints; ``None`` without ``chkpt_root``."""
        root = self.options.chkpt_root
        return None if root is None else root / self.model.save_name

    def _find_place(self) -> Whereabouts:
        if self.parts is None:
            return Whereabouts(self.verb, Place.STARTING.value, order=[-1])
        run, is_training = self.parts.run, self.phase is Phase.TRAINING
        place = list(Place).index(run.place)
        return Whereabouts(
            f"step {run.state.global_step + 1}" if is_training else self.verb,
            run.place.value,
            order=[run.state.global_iteration, place, run.num_other_batches],
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
        elif isinstance(error, self.passed_through):
            return
        elif not self.team.has_single_process and is_lost_peer(error):
            # The cause is in the log of another process.
            _LOGGER.error("%s ends because another process has ended.", self.verb)
            _LOGGER.debug("This process noticed it as follows.", exc_info=error)
        else:
            text = f"{self.verb} ended with an error ({type(error).__name__}). "
            text = f"{text}{self.describe_rescue()}".rstrip()
            _LOGGER.error("%s", text, exc_info=error, extra=log.RAISED)

    def interrupt(self, reason: str) -> Interrupted:
        """Return what has interrupted the call, the same in all processes.

        Args:
            reason: what it was.
        """
        numbers = self.team.gather_objects(self.signals.number)
        number = next((number for number in numbers if number is not None), None)
        return Interrupted(self.team.on_first(lambda: self.find_code(number)), reason)

    def _tear_down(self, *, is_regular: bool) -> None:
        self.is_live = False
        left = self.trained if self.phase is Phase.TRAINING else None
        # A stack runs all of these, last first, even if one of them raises.
        with ExitStack() as stack:
            stack.callback(log.close_default_loggers)
            stack.callback(self._forget_run)
            stack.callback(self.loop._attach, None)
            for sources in self.sources.values():
                for source in sources:
                    stack.callback(source.close)
            stack.callback(self.hooks.emit_to_all, "teardown")
            if is_regular and left is not None:
                stack.callback(left.record_attributes)
            if is_regular and self.is_rank:
                stack.callback(self.collect)
            if is_regular and self.has_begun:
                stack.callback(self._emit_fit_end)
            stack.callback(self.engine.teardown)
            stack.callback(self.display.close)
            # After the loops: an interrupted evaluation restores the settings of the training.
            stack.callback(self.settings.close)
            stack.callback(self.loop.teardown)
        if is_regular and left is not None:
            left.record_contents()

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
        assert self.parts is not None
        trained = capture_trained(self.parts)
        if self.info.rank != 0:
            return
        on_cpu = move_to_device(trained, torch.device("cpu"))
        packed = on_cpu, self.horizon, None if self.trained is None else self.trained.end
        self.collected = pack_by_value(packed, "The state of model and plugins")

    def leave(self, obstacle: str, end: Record) -> None:
        """Describe how a run leaves its model, for evaluations in this process.

        Args:
            obstacle: why a checkpoint is loaded all the same; empty if the model counts.
            end: the counters and logs of the end of training.
        """
        self.trained = TrainedModel(self.model, obstacle, end, self.owners, dict(self.plugins))

    def require_alike_setup(self) -> None:
        """Check that all processes have the same receivers and data."""
        processes.require_alike(
            self.replicas, partial(processes.describe_setup, self.hooks, self.sources)
        )
        processes.require_alike(
            self.replicas, partial(processes.describe_data_sets, self.sources), processes.SAME_DATA
        )

    def prepare_data(self) -> None:
        """Let one process of each machine prepare the data, while the others wait."""
        matching = processes.options_that_must_match
        describe = partial(matching, self.options, self.plugins, self.replicas)
        processes.require_alike(self.replicas, describe)

        def prepare() -> None:
            if self.info.local_rank == 0:
                self.datamodule.prepare_data()

        if not self.is_rank:
            self.team.on_each(prepare)

    def restore(self, trained: Record) -> None:
        """Set everything up, with the results of a call that has ended."""
        is_inference = self.phase is not Phase.TRAINING
        makes_base = references_of(trained.model) is not None
        self.set_up(is_inference=is_inference, is_resumed=True, makes_base=makes_base)
        self.find_owners(self.open_saved_source(trained))
        parts = self.make_inference_parts()
        self.begin(parts)
        apply_trained(trained, parts, is_inference=is_inference)

    @property
    def share(self) -> RowShare | None:
        """The part of sharded tensors that this process reads; ``None`` for everything."""
        share = self.replicas.share
        if share is None:
            return None
        plugins = [f"plugins.{name}." for name, part in self.plugins.items() if part.loads_shards]
        return share._replace(prefixes=(*share.prefixes, *plugins))

    def detach(self, record: Record, *, is_shown: bool = False) -> Record:
        """Return a record without references to its file; ``is_shown``: user code sees it whole."""
        has_own = type(self.model).load_state_dict is not Model.load_state_dict
        return detach(record, keeps_model=has_own or is_shown, is_shown=is_shown)

    def begin(self, parts: RunParts) -> None:
        """Give the objects of the run to all that need them while it goes on."""
        self.parts, self.is_live = parts, True
        for plugin in self.plugins.values():
            plugin.context = parts.context
        vars(self.model)["_run_context"] = parts.context
        self.loop._attach(parts)

    def make_inference_parts(
        self, phase: Phase = Phase.TRAINING, outside: Callable[[], str] = str
    ) -> RunParts:
        """Return the objects of a run that does not train.

        Args:
            phase: what it does.
            outside: returns why it is to be interrupted, if the reason came from outside.
        """
        return self.make_parts(run=RunState(phase=phase), outside=outside)

    def make_parts(self, **others: Any) -> RunParts:
        """Return the objects of the run: those of every call, and others."""
        return RunParts(
            model=self.model,
            engine=self.engine,
            hooks=self.hooks,
            display=self.display,
            seed=self.options.seed,
            sources=self.sources,
            plugins=self.plugins,
            find_loops=partial(find_loops_with_state, self.loops.fit),
            run_listeners=self.listeners,
            run_folder=None if self.replay is not None else self.folder,
            owner_states=self.owners,
            **others,
        )

    def _forget_run(self) -> None:
        vars(self.model)["_run_context"] = vars(self.model)["_step_log"] = None
        for plugin in self.plugins.values():
            vars(plugin).pop("context", None)
        # A user's engine outlives the run; a process group does not.
        self.parts = None
        self.engine.replicas.close()
        self.team.close()
        self.engine.replicas = self.team = Replicas()

    def set_up_others(self) -> None:
        """Set up everything but the model: seed, registries, places, plugins and data."""
        options = self.options
        rng.seed_setup(options.seed)
        if options.src_root is not None:
            update_all_registries(options.src_root, import_prefix=options.import_prefix)
        info, is_distributed = self.info, not self.replicas.has_single_replica
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
        for plugin in self.plugins.values():
            plugin.setup()
        self.datamodule.setup()
        warn_of_unread_datasets(self.datamodule)

    def open_saved_source(self, trained: Record | None) -> Source | None:
        """Open the training data if a data set or its collate function has a state."""
        names = () if trained is None else trained.owners
        is_saved = any(name.startswith(("data set", "collate function")) for name in names)
        return self.open_source(Phase.TRAINING) if is_saved else None

    def find_owners(self, source: Source | None = None) -> None:
        """Find who holds state, and what a run starts with, right after the set-up."""
        self.owners = find_owners(self, source)
        if self.phase is Phase.TRAINING:
            self.fresh = read_fresh(self)

    def set_up(
        self, *, is_inference: bool, is_resumed: bool = False, makes_base: bool = False
    ) -> None:
        """Set up everything.

        Args:
            is_inference: whether the run does not train.
            is_resumed: whether the state of a checkpoint replaces what is set up.
            makes_base: whether that refers to weights that each start makes.
        """
        self.set_up_others()
        run = self.options
        model_setup.take_own_processor(self.model)
        for table in self.model.tables.values():
            table.clear()
        if self.engine.device.type != "cpu":
            # A trainer and its model know each other, so a run that was dropped keeps its memory.
            gc.collect()
        make_context = partial(
            model_setup.SetupContext,
            self.model,
            run.limits,
            self._open_trained_source,
            horizon=self.horizon,
            is_loaded_next=is_resumed and not makes_base,
        )
        build = partial(
            model_setup.build_networks, self.model, self.engine, run, is_inference=is_inference
        )
        if makes_base and not is_resumed:
            with make_context().given():
                self.base = model_setup.try_base(self.model, build)
        context = make_context()
        with context.given():
            again = build()
        self.settings.enter_context(again)
        self.leaves_weights, self.horizon = context.leaves_weights, context.horizon
        if not is_inference:
            model_setup.set_train_mode(self.model, warns=not is_resumed)
        check_batch_processor(self.model, is_inference=is_inference)
        self.model.discovery.safe_types = tuple(self.model.types_for_safe_load())
        self.model.discovery.take_baseline()
        note_own_log(self.model)
        if not makes_base and (is_resumed or run.can_save):
            context.check_loads()
        self.renew_hooks()

    def _open_trained_source(self) -> Source | None:
        """Open the training data while the model is set up; ``None`` if nothing is trained."""
        source = self.open_source(Phase.TRAINING) if self.phase is Phase.TRAINING else None
        if source is not None:
            source.skip_numbers(self.options.skip_batches)
        return source

    def open_source(self, phase: Phase) -> Source | None:
        """Open the data of a phase, once; returns its first loader's, ``None`` without data."""
        if phase in self.sources:
            return self.sources[phase][0]
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
            purpose="fetch" if phase is Phase.TRAINING else f"fetch-{phase.value}",
            limit=self.options.batch_limits.get(phase),
            share=Shard(
                replicas.num_replicas, replicas.local_replicas, pads=phase is Phase.TRAINING
            ),
        )
        return self.sources[phase][0]


_SENT = (
    *("phase", "options", "plugins", "table", "loops", "model", "datamodule", "passed_through"),
    *("choice", "is_as_it_is", "reason_to_load", "replay"),
    "is_again",
)
