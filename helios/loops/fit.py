"""``FitLoop``: all epochs of a run, from its start or from a checkpoint to its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from helios.backup import Backup
from helios.core import rng
from helios.counters import Phase
from helios.data.keyed import data_sets_of
from helios.errors import RunMismatchError, UsageError
from helios.loops.boundary import EPOCH, STEP, Boundary
from helios.loops.epoch import EpochLoop
from helios.loops.idle_watch import watch_idle_steps
from helios.loops.loop import Loop, make_stray_stop, require
from helios.session import Session
from helios.state.steps import find_lazy
from helios.terminal import root_logger as log

_LOGGER = logging.getLogger(__name__)


class FitLoop(Loop):
    """The default fit loop; its result is the reason why the run has ended."""

    _internals: ClassVar[str] = "_has_run epoch_loop"

    roles = ("epoch_loop",)
    _role_types: ClassVar = {"epoch_loop": EpochLoop}

    if TYPE_CHECKING:

        def connect(self, *, epoch_loop: EpochLoop = ...) -> None: ...  # type: ignore[override]

    def __init__(self, epoch_loop: EpochLoop | None = None) -> None:
        super().__init__()
        self.epoch_loop: EpochLoop = epoch_loop  # type: ignore[assignment] # until attached
        self._has_run = False

    @property
    def done(self) -> bool:
        """Whether the run should end; requests between epochs wait for a safe point."""
        if self._has_run:
            return require(self.epoch_loop).has_left
        return self._session.is_leaving and not self._session.is_in_epoch

    def reset(self) -> None:
        """Prepare a run."""
        self._has_run = False

    def on_run_start(self) -> None:
        """Emit the start events of training, and continue at the cursor."""
        session, cursor = self._session, self._session.cursor
        session.start_epoch = cursor.epoch
        session.start_step = session.state.global_step
        if not session.is_resumed:
            session.idle_watch = watch_idle_steps(session)
        self._check_sanity()
        session.hooks.emit("on_training_start")
        session.model.train()
        total, done = session.training_source.measure(
            cursor.epoch, batch=cursor.batch, sample=cursor.sample
        )
        for notify in session.listeners.training_started:
            notify(
                session.schedule,
                epoch=cursor.epoch,
                steps_done=session.state.global_step,
                find_optimizers=session.model.discovery.optimizers,
            )
        session.serve_losses()
        if session.is_resumed:
            session.hooks.emit("on_training_resume", session.state)
            self._check_length()
            session.check_data(not session.is_in_epoch or done == total)
            session.restore_randomness()
        session.begin_training()
        session.agree()
        session.check_alike()
        session.notify_paused()
        boundary = Boundary(session)
        if session.is_resumed and not session.is_in_epoch:
            boundary.resume(EPOCH if session.schedule.is_by_epoch else STEP)
        elif not session.is_resumed:
            boundary.check_limits()

    def _check_length(self) -> None:
        """Compare the data with that of the epoch in which the checkpoint was taken.

        A data set that grows during training must have been restored by now, because the order of
        its samples depends on its length.

        Raises:
            RunMismatchError: for another length that was not allowed.
        """
        session = self._session
        saved, present = session.saved_length, session.training_source.length
        if saved is None or present is None or saved == present:
            return
        if not session.allows_other_length:
            raise RunMismatchError(
                f"The training data must have {saved} samples when the run resumes, as in the "
                f"checkpoint's epoch, got {present} after on_training_resume. If the data set "
                "changes during training, restore it in on_training_resume(state), or allow the "
                'change with Trainer(allow_changes=("length",)).'
            )
        _LOGGER.warning(
            "The training data has %d samples, and had %d in the checkpoint's epoch, which starts "
            "anew, as allowed.",
            present,
            saved,
        )
        session.cursor.restart_epoch()
        session.state.end_epoch()

    def _check_sanity(self) -> None:
        """Validate a few batches before the first step of a new run, if requested."""
        session = self._session
        steps = session.sanity_steps
        if steps and not session.is_resumed and Phase.VALIDATION in session.sources:
            val_loop = require(require(self.epoch_loop)._children().get("val_loop"))
            with trying(session, val_loop):
                try:
                    val_loop.run()
                except StopIteration as error:
                    raise make_stray_stop(error) from error

    def advance(self) -> None:
        """Run one epoch."""
        child = require(self.epoch_loop)
        try:
            child.run()
        except StopIteration as error:
            raise make_stray_stop(error) from error
        if not isinstance(child, EpochLoop):
            # Requests made in it: only Helios' own exchanges them at its boundaries.
            self._session.agree()
        self._session.is_resumed = False
        self._has_run = True

    def on_run_end(self) -> str:
        """Emit the end of training; returns the reason, empty after an interruption."""
        session = self._session
        session.loss_means.report_nonfinite()
        session.check_alike()
        if not session.is_interrupted:
            for notify in session.listeners.training_ended:
                notify(session.state)
            session.hooks.emit("on_training_end")
        return session.agreement.agreed.stop_reason


@contextmanager
def trying(session: Session, *others: object) -> Iterator[None]:
    """Run a sanity check; everything that it has changed is restored.

    After an error nothing is restored: the run ends before training begins.

    Args:
        session: the run.
        others: what it may change besides the model, plugins, engine and loaders.

    Raises:
        UsageError: for networks with lazy layers, whose first batch cannot be undone.
    """
    for path in find_lazy(session.model.discovery):
        raise UsageError(
            f"A sanity check needs complete networks, but {path!r} has lazy layers. Run one batch "
            "through it in setup(), or train without sanity_steps."
        )
    sources = session.sources[Phase.VALIDATION]
    with rng.stream(rng.key(session.seed, "sanity")):
        session.hooks.emit("on_sanity_check_start")
        requests = session.agreement.remember()
        loaders = [source.loader for source in sources]
        plugins = session.plugins.values()
        owners = [session.model, session.engine, *plugins, *loaders, *others]
        left = {id(data) for each in loaders for data in data_sets_of(each)}
        backup = Backup(owners, leave=lambda value: id(value) in left, on_host=True)
        session.is_sanity_check = True
        try:
            with log.muted_tensorboard():
                yield
        finally:
            session.is_sanity_check = False
        # Persistent workers end here, not when they are garbage collected.
        for source in sources:
            source.close()
        backup.restore()
        session.agreement.take_back(requests)
        session.agree()
        session.hooks.emit("on_sanity_check_end")
