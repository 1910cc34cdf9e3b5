"""All epochs of a run, from its start or from a checkpoint to its end."""

from __future__ import annotations

from helios import schedule as due
from helios.loops.epoch import EpochLoop
from helios.loops.loop import Loop, make_stray_stop, require
from helios.state import Phase


class FitLoop(Loop):
    """The default fit loop; its result is the reason for which the run has ended."""

    roles = ("epoch_loop",)

    def __init__(self, epoch_loop: EpochLoop | None = None) -> None:
        super().__init__()
        self.epoch_loop = epoch_loop

    @property
    def done(self) -> bool:
        """Whether the run is to end."""
        return self.session.is_stopping and not self.session.is_in_epoch

    def on_run_start(self) -> None:
        """Tell that the training starts or goes on (C13), and enter where it stands."""
        session, cursor = self.session, self.session.cursor
        session.hooks.emit("on_training_start")
        session.model.train()
        session.display.start_training(
            unit=session.schedule.unit,
            total_steps=session.schedule.total_steps,
            epoch=cursor.epoch,
            done_in_epoch=cursor.batch,
            num_batches=session.sources[Phase.TRAINING].num_batches(
                batch=cursor.batch, sample=cursor.sample
            ),
            steps_done=session.state.current_iteration,
        )
        if session.is_resumed:
            session.hooks.emit("on_training_resume", session.state)
            session.restore_randomness()
        if not session.is_in_epoch:
            session.check_limits()
        if session.is_resumed and not session.is_in_epoch:
            self._leave_epoch_boundary()

    def _leave_epoch_boundary(self) -> None:
        session = self.session
        has_validated = Phase.VALIDATION in session.sources and due.is_validation_due(
            session.schedule, session.state
        )
        require(self.epoch_loop).leave_safe_point(
            has_validated=has_validated, polls_always=session.schedule.is_by_epoch
        )

    def advance(self) -> None:
        """Run one epoch."""
        try:
            require(self.epoch_loop).run()
        except StopIteration as error:
            raise make_stray_stop(error) from error
        self.session.is_resumed = False

    def on_run_end(self) -> str:
        """Tell that the run is finished; returns the reason."""
        self.session.hooks.emit("on_training_end")
        return self.session.requests.stop_reason
