"""Epochs that a hook ends early, skips at the wrong place, calls inside of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios.errors import UsageError
from helios.state import TrainingState
from tests.integration.test_statements import Linear, Numbers, Quiet, make_trainer


class Cut(Quiet):
    """Ends each epoch at one of its batches."""

    def __init__(self, batch: int) -> None:
        super().__init__("cut")
        self.batch = batch
        self.updates = 0
        self.open_gradients: list[bool] = []

    unsaved = ("updates", "open_gradients")

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.open_gradients.append(self.context.model.net.weight.grad is not None)

    def on_training_batch_start(self, state: TrainingState) -> None:
        if state.dataset_iter == self.batch:
            raise StopIteration

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        self.updates += committed


@pytest.mark.shows("L19")
@pytest.mark.parametrize(("accumulation", "batches"), [(1, 6), (3, 18)])
def test_a_refused_batch_is_not_counted(accumulation: int, batches: int) -> None:
    """L19: by steps the windows run on over the epochs' ends, and none is lost."""
    cut, model = Cut(2), Linear()
    trainer = make_trainer(total_steps=6, accumulation_steps=accumulation, plugins=[cut])
    ends: list[TrainingState] = []
    trainer.register_plugin(Calling("on_training_end", lambda p: ends.append(p.context.state)))
    trainer.fit(model, Numbers(4))
    assert cut.updates == 6
    (state,) = ends
    assert (state.current_iteration, state.global_step, state.global_iteration) == (6, 6, batches)


class Calling(Quiet):
    """Calls a function with itself, each time that it hears an event."""

    def __init__(
        self, event: str, function: Callable[[Any], Any], plug_id: str = "calling"
    ) -> None:
        super().__init__(plug_id)
        self.function = function
        setattr(self, event, self._call)

    def _call(self, *args: Any) -> None:
        self.function(self)


_LATE = (
    "on_fit_start",
    "on_optimizer_step_end",
    "on_training_batch_end",
    "on_validation_end",
    "on_save_checkpoint",
)


@pytest.mark.parametrize("event", _LATE)
def test_a_skip_is_refused_where_no_window_is_open(event: str, tmp_path: Path) -> None:
    """It would hit the next window, and a resume in between would not know of it."""
    late = Calling(event, lambda plugin: plugin.context.skip_step("late"))
    trainer = make_trainer(
        plugins=[late],
        valid_frequency=1,
        print_frequency=1,
        chkpt_root=tmp_path,
        chkpt_frequency=1,
    )
    with pytest.raises(UsageError, match=r"skip_step\(\) must be called (between|before)"):
        trainer.fit(Linear(), Numbers(4, 1))
