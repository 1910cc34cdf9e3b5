"""``FitLoop``: all epochs of a run, from its start or from a checkpoint to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from helios.backup import Backup
from helios.core import rng
from helios.core.loss_means import Viewer
from helios.counters import Phase
from helios.data.loader import data_sets_of
from helios.engines.engine import Engine, redefines
from helios.errors import UsageError
from helios.loops.boundary import EPOCH, STEP, Boundary, check_weights
from helios.loops.epoch import EpochLoop
from helios.loops.loop import Loop, make_stray_stop
from helios.run_parts import RunParts
from helios.state.steps import find_lazy
from helios.terminal import root_logger as log

# Engine methods that run after the gradients are computed.
_UPDATE = (
    *("average_gradients", "unscale_gradients", "clip_gradients", "optimizer_step"),
    *("zero_grad", "close_window"),
)


class FitLoop(Loop):
    """The default fit loop; its result is the reason why the run has ended."""

    _internals: ClassVar[str] = "_has_run epoch_loop"

    roles = ("epoch_loop",)

    def __init__(self, epoch_loop: EpochLoop | None = None) -> None:
        super().__init__()
        self.epoch_loop: EpochLoop = epoch_loop  # type: ignore[assignment] # until attached
        self._has_run = False

    @property
    def done(self) -> bool:
        """Whether the run should end; requests between epochs wait for a safe point."""
        if self._has_run:
            has_left = self.epoch_loop.has_left
            return self._run.is_leaving if has_left is None else has_left
        return self._run.is_leaving and not self._run.is_in_epoch

    def reset(self) -> None:
        """Prepare a run."""
        self._has_run = False

    def on_run_start(self) -> None:
        """Emit the start events of training, and continue at the cursor."""
        parts, run = self._parts, self._run
        schedule, cursor = parts.schedule, run.cursor
        run.start = (cursor.epoch, run.state.global_step)
        if not run.is_resumed:
            parts.idle_watch.begin()
        self._check_sanity()
        parts.hooks.emit("on_training_start")
        parts.model.train()
        total, done = parts.training_source.measure(
            cursor.epoch, batch=cursor.batch, sample=cursor.sample
        )
        for notify in parts.listeners.training_started:
            notify(
                schedule,
                epoch=cursor.epoch,
                steps_done=run.state.global_step,
                find_optimizers=parts.model.discovery.optimizers,
            )
        files = (Viewer.FILES,) if schedule.logs else ()
        scores = (Viewer.VALIDATION,) if schedule.valid_frequency is not None else ()
        parts.loss_means.serve((*files, *scores, *parts.display.viewers))
        if run.is_resumed:
            parts.hooks.emit("on_training_resume", run.state)
            parts.finish_load(done == total)
        self._end_start()
        parts.agreement.settle()
        check_weights(parts)
        for pause in parts.listeners.paused:
            pause()
        boundary = Boundary(parts)
        if run.is_resumed and not run.is_in_epoch:
            boundary.resume(EPOCH if schedule.is_by_epoch else STEP)
        elif not run.is_resumed:
            boundary.check_limits()

    def _end_start(self) -> None:
        """Mark the end of the start events: each start sets up again what they set up."""
        parts = self._parts
        if any(redefines(parts.engine, Engine, name) for name in _UPDATE):
            parts.agreement.expect_late_requests()
        parts.agreement.begin(parts.hooks.asking)
        if parts.can_save:
            parts.model.discovery.begin_training()
            parts.owner_states.begin_training()

    def _check_sanity(self) -> None:
        """Validate a few batches before the first step of a new run, if requested."""
        parts, is_resumed = self._parts, self._run.is_resumed
        if parts.sanity_steps and not is_resumed and Phase.VALIDATION in parts.sources:
            val_loop = self.epoch_loop._children()["val_loop"]
            with trying(parts, val_loop):
                try:
                    val_loop.run()
                except StopIteration as error:
                    raise make_stray_stop(error) from error

    def advance(self) -> None:
        """Run one epoch."""
        child = self.epoch_loop
        try:
            child.run()
        except StopIteration as error:
            raise make_stray_stop(error) from error
        if not isinstance(child, EpochLoop):
            # Requests made in it: only Helios' own exchanges them at its boundaries.
            self._parts.agreement.settle()
        self._run.is_resumed = False
        self._has_run = True

    def on_run_end(self) -> str:
        """Emit the end of training; returns the reason, empty after an interruption."""
        parts, run = self._parts, self._run
        parts.loss_means.report_nonfinite()
        check_weights(parts)
        if not run.is_interrupted:
            for notify in parts.listeners.training_ended:
                notify(run.state)
            parts.hooks.emit("on_training_end")
        return run.agreed.stop_reason


@contextmanager
def trying(parts: RunParts, *others: object) -> Iterator[None]:
    """Run a sanity check, and restore everything that it has changed.

    After an error nothing is restored: the run ends before training begins.

    Args:
        parts: the objects of the run.
        others: objects that it may change besides the model, plugins, engine and loaders.

    Raises:
        UsageError: for networks with lazy layers, whose first batch cannot be undone.
    """
    for path in find_lazy(parts.model.discovery):
        raise UsageError(
            f"A sanity check needs complete networks, but {path!r} has lazy layers. Run one batch "
            "through it in setup(), or train without sanity_steps."
        )
    sources = parts.sources[Phase.VALIDATION]
    with rng.stream(rng.key(parts.seed, "sanity")):
        parts.hooks.emit("on_sanity_check_start")
        requests = parts.agreement.remember()
        loaders = [source.loader for source in sources]
        plugins = parts.plugins.values()
        owners = [parts.model, parts.engine, *plugins, *loaders, *others]
        left = {id(data) for each in loaders for data in data_sets_of(each)}
        backup = Backup(owners, leave=lambda value: id(value) in left, on_host=True)
        parts.run.is_sanity_check = True
        try:
            with log.muted_tensorboard():
                yield
        finally:
            parts.run.is_sanity_check = False
        # Persistent workers end here, not when they are garbage collected.
        for source in sources:
            source.close()
        backup.restore()
        parts.agreement.take_back(requests)
        parts.agreement.settle()
        parts.hooks.emit("on_sanity_check_end")
