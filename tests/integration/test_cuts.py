"""Epochs that a hook ends early, skips at the wrong place, calls inside of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.errors import UsageError
from helios.loops import OptimizerLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.integration.test_statements import Linear, Numbers, Quiet, make_trainer
from tests.support.resume import assert_equal, copy_checkpoint
from tests.support.runs import RETURNS, Setting, train


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


def test_by_epochs_a_window_that_is_cut_off_is_dropped_aloud(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its gradients must not leak into the next epoch's first update."""
    cut = Cut(4)
    trainer = make_trainer(train_unit="epoch", total_steps=2, accumulation_steps=3, plugins=[cut])
    trainer.fit(Linear(), Numbers(6))
    assert cut.updates == 2
    assert cut.open_gradients == [False, False]
    said = capsys.readouterr().err
    assert "Epoch 1 was ended inside an accumulation window: its gradients are dropped" in said
    assert "Epoch 2 was ended" in said


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


class Leaving(Plugin):
    """Asks for the end in each batch from the sixth one on, and refuses them."""

    def __init__(self, ask: str) -> None:
        super().__init__("leaving")
        self.ask = ask

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_start(self, state: TrainingState) -> None:
        if state.global_iteration >= 6:
            getattr(self.context, self.ask)("enough")
            raise StopIteration


@pytest.mark.parametrize("unit", ["epoch", "iteration"])
@pytest.mark.parametrize("ask", ["request_stop", "interrupt"])
def test_a_run_may_be_left_at_a_batch_that_is_refused(unit: str, ask: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        train_unit=unit,
        total_steps=50,
        chkpt_root=tmp_path,
        chkpt_frequency=50,
        plugins=[Leaving(ask)],
        signals=RETURNS,
    )
    assert trainer.fit(Linear(), Numbers(4)) is (ask == "request_stop")
    (path,) = tmp_path.glob("*/*.pth")
    assert path.stem == "linear_epoch_2_iter_5"


def test_a_run_that_can_be_left_nowhere_says_so() -> None:
    """By steps an open window is no place to leave at; without batches it never ends."""
    trainer = make_trainer(total_steps=50, accumulation_steps=3, plugins=[Leaving("request_stop")])
    with pytest.raises(UsageError, match="must end at the end of an accumulation window"):
        trainer.fit(Linear(), Numbers(4))


_LATE = (
    "on_fit_start",
    "on_training_start",
    "on_training_epoch_start",
    "on_optimizer_step_end",
    "on_training_batch_end",
    "on_training_step_end",
    "on_log",
    "should_training_stop",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_training_epoch_end",
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


@pytest.mark.parametrize(
    "event", ["on_training_step_start", "on_training_batch_start", "on_optimizer_step_start"]
)
def test_a_skip_is_taken_where_a_window_is_open(event: str) -> None:
    weights: list[float] = []
    skipping = Calling(event, lambda plugin: plugin.context.skip_step("now"))
    noting = Calling(
        "on_training_step_end", lambda p: weights.append(p.context.model.net.weight.item()), "note"
    )
    model = Linear()
    trainer = make_trainer(train_unit="epoch", total_steps=1, plugins=[skipping, noting])
    trainer.fit(model, Numbers(4))
    assert len(weights) == 4
    assert len(set(weights)) == 1
    del trainer.plugins["calling"]
    trainer.fit(model, Numbers(4))
    assert len(set(weights[4:])) == 4


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_a_call_inside_of_a_call_is_refused(call: str) -> None:
    """It would set up the model anew in mid-training."""

    def act(plugin: Any) -> None:
        getattr(plugin.trainer, call)(plugin.trainer.model, plugin.trainer.datamodule)

    trainer, model = make_trainer(plugins=[Calling("on_training_epoch_end", act)]), Linear()
    with pytest.raises(UsageError, match="must run one call at a time"):
        trainer.fit(model, Numbers(2))
    del trainer.plugins["calling"]
    assert trainer.fit(model, Numbers(2))


def test_plugins_come_and_go_between_runs_only() -> None:
    def add(plugin: Any) -> None:
        plugin.trainer.register_plugin(Quiet("late"))

    def remove(plugin: Any) -> None:
        del plugin.trainer.plugins["calling"]

    for act in (add, remove):
        trainer = make_trainer(plugins=[Calling("on_fit_start", act)])
        with pytest.raises(UsageError, match="must be set or removed between runs"):
            trainer.fit(Linear(), Numbers(2))
        assert list(trainer.plugins) == ["calling"]


class Stateful(OptimizerLoop):
    """An optimizer loop with state of its own, that knows nothing of its base's."""

    count = 0

    def advance(self, batch: Any) -> None:
        super().advance(batch)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("kinds", [(Stateful, OptimizerLoop), (OptimizerLoop, Stateful)])
def test_a_loop_with_state_takes_the_place_of_the_default_one_and_back(
    kinds: tuple[type[OptimizerLoop], type[OptimizerLoop]], is_manual: bool, tmp_path: Path
) -> None:
    """DESIGN section 8: a run goes on with another loop; the mode is the run's, not the loop's."""
    first, second = kinds
    setting = Setting(unit="epoch", total_steps=2, accumulation=3, is_manual=is_manual)
    setting.requests = True
    setting.options = {"store": helios.CheckpointStore(keep_last=99)}
    whole = train(tmp_path / "whole", setting, Connecting(first))
    path = sorted(
        (tmp_path / "whole").glob("*/*_epoch_1_iter_2.pth" if is_manual else "*/*_iter_3.pth")
    )[0]
    resumed = train(copy_checkpoint(path, tmp_path / "resumed"), setting, Connecting(second))
    assert_equal(resumed, whole, since=int(path.stem.split("_iter_")[1]))


class Connecting(Plugin):
    """Connects an optimizer loop before anything runs."""

    def __init__(self, kind: type[OptimizerLoop]) -> None:
        super().__init__("connecting")
        self.kind = kind

    def setup(self) -> None:
        trainer: Any = self.trainer
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=self.kind())


def test_the_mode_is_known_before_the_first_step_of_a_resume(tmp_path: Path) -> None:
    """DESIGN R4: the first batch after a resume must have the window that it would have had."""
    setting = Setting(unit="epoch", total_steps=2, accumulation=3, is_manual=True, requests=True)
    train(tmp_path, setting)
    path = sorted(tmp_path.glob("*/*.pth"))[0]
    assert helios.load_checkpoint(path)["is_manual"] is True
    assert torch.load(path, weights_only=True)["is_manual"] is True


@pytest.mark.parametrize("is_skipping", [True, False])
def test_an_epoch_without_any_update_is_warned_of(
    is_skipping: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By steps such a run has no end."""
    skipping = Calling(
        "on_optimizer_step_start",
        lambda p: is_skipping and p.context.state.global_epoch == 1 and p.context.skip_step("bad"),
    )
    make_trainer(total_steps=4, plugins=[skipping]).fit(Linear(), Numbers(4))
    said = capsys.readouterr().err
    assert ("Epoch 1 has made no optimizer step: all were skipped" in said) is is_skipping
    assert "Epoch 2 has made" not in said


@pytest.mark.parametrize("value", ["text", None, torch.zeros(2)])
def test_what_is_no_number_is_not_logged(value: Any) -> None:
    logging = Calling("on_training_start", lambda p: p.context.log({"mine": value}))
    listening = Calling("on_log", lambda p: None, "listening")
    trainer = make_trainer(plugins=[logging, listening])
    with pytest.raises(UsageError, match=r"must be a single number, but 'mine' is"):
        trainer.fit(Linear(), Numbers(2))


def test_a_log_within_a_log_is_refused() -> None:
    """It would never end."""
    logging = Calling("on_log", lambda p: p.context.log({"mine": 1.0}))
    trainer = make_trainer(plugins=[logging], print_frequency=1)
    with pytest.raises(UsageError, match=r"must not be called in on_log"):
        trainer.fit(Linear(), Numbers(2))
