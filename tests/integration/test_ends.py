"""How a run ends: totals, early stop, polls, requests, exceptions (H29-H36, H63, C3, C6)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.resume import assert_equal
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel, train


class StopAt(Quiet):
    """Answers the stop poll with yes from an iteration on."""

    def __init__(self, iteration: int) -> None:
        super().__init__("stop-at")
        self.iteration = iteration
        self.now = 0

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.now = state.global_iteration

    def should_training_stop(self) -> bool:
        return self.now >= self.iteration


def _names(outcome: Outcome) -> list[str]:
    return [event[0] for event in outcome.events]


def _last(folder: Path) -> helios.TrainingState:
    path = helios.find_last_checkpoint(folder / "small")
    assert path is not None
    state: helios.TrainingState = helios.load_checkpoint(path)["training_state"]
    return state


@pytest.mark.shows("H38", "R36")
@pytest.mark.parametrize(("accumulation", "batches"), [(1, 4), (5, 20)])
def test_steps_times_accumulation_batches_are_run(
    accumulation: int, batches: int, tmp_path: Path
) -> None:
    """H38: N steps run N times the accumulation of micro-batches."""
    setting = Setting(total_steps=4, accumulation=accumulation, scheduler="none")
    outcome = train(tmp_path, setting)
    assert len(outcome.records) == batches
    assert _last(tmp_path).current_iteration == 4
    assert _last(tmp_path).global_iteration == batches


@pytest.mark.shows("L15")
def test_a_total_of_nothing_is_legal(tmp_path: Path) -> None:
    for unit in ("epoch", "iteration"):
        outcome = train(tmp_path / unit, Setting(unit=unit, total_steps=0))
        assert not outcome.records
        assert _names(outcome)[-3:] == ["on_training_end", "on_fit_end", "teardown"]


@pytest.mark.shows("H32", "H35")
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_stop_poll_ends_the_run_at_the_window(unit: str, tmp_path: Path) -> None:
    setting = Setting(
        unit=unit, total_steps=50, accumulation=2, valid_frequency=1, scheduler="none"
    )
    outcome = train(tmp_path, setting, StopAt(3))
    assert max(outcome.records) == 4
    assert _last(tmp_path).global_iteration == 4
    names = _names(outcome)
    assert names[-4:] == ["on_training_epoch_end", "on_training_end", "on_fit_end", "teardown"]
    # H35: the epoch unit still runs the due validation, the iteration unit skips it.
    last_batch = len(names) - 1 - names[::-1].index("on_training_batch_end")
    assert ("on_validation_start" in names[last_batch:]) is (unit == "epoch")


@pytest.mark.shows("S32")
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_stopped_run_is_finished_until_its_total_is_raised(unit: str, tmp_path: Path) -> None:
    setting = Setting(unit=unit, total_steps=3, valid_frequency=None)
    whole = train(tmp_path / "whole", dataclasses.replace(setting, total_steps=4))
    train(tmp_path / "run", setting, StopAt(2))
    assert not train(tmp_path / "run", setting).records
    resumed = train(tmp_path / "run", dataclasses.replace(setting, total_steps=4))
    assert_equal(resumed, whole, since=2)


@pytest.mark.shows("L15", "C16")
def test_a_request_from_a_hook_ends_the_run(tmp_path: Path) -> None:
    class Asker(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            if state.global_iteration == 3:
                self.trainer.request_stop("enough")

    train(tmp_path, Setting(total_steps=50), Asker("asker"))
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert newest.stem.endswith("iter_3")
    assert '"finished": "enough"' in newest.with_suffix(".json").read_text()


@pytest.mark.shows("H31", "C3")
def test_the_checkpoint_is_there_before_the_early_stop(tmp_path: Path) -> None:
    """H31: with equal frequencies the counter is inside of the checkpoint."""
    setting = Setting(unit="epoch", total_steps=20, early_stop_cycles=1, valid_frequency=1)
    train(tmp_path, setting)
    assert _last(tmp_path).early_stop_count == 1


class OnPurposeError(RuntimeError):
    """An error of the user's."""


class RaiseIn(Quiet):
    """Raises in a named event."""

    def __init__(self, event: str) -> None:
        super().__init__("raise-in")
        setattr(self, event, self._act)

    def _act(self, *args: Any) -> None:
        raise OnPurposeError("on purpose")


@pytest.mark.shows("H63", "K34", "R47", "C6")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "event",
    [
        "on_training_start",
        "on_backward_start",
        "on_validation_batch_start",
        "on_save_checkpoint",
        "on_training_epoch_end",
    ],
)
def test_an_error_is_logged_everything_torn_down_and_raised_again(
    event: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Witness(Plugin):
        def setup(self) -> None:
            seen.append("setup")

        def on_exception(self, exception: BaseException) -> None:
            seen.append(f"exception {exception}")

        def on_training_end(self) -> None:
            seen.append("end")

        def on_fit_end(self) -> None:
            seen.append("fit end")

        def teardown(self) -> None:
            seen.append("teardown")

    setting = Setting(unit="epoch", total_steps=2, valid_frequency=1, num_workers=1)
    with pytest.raises(OnPurposeError, match="on purpose"):
        train(tmp_path, setting, Witness("witness"), RaiseIn(event))
    assert seen == ["setup", "exception on purpose", "teardown"]
    assert "ended with an error (" in capsys.readouterr().err
    # The folder is as good as after a kill: the same command goes on.
    assert train(tmp_path, setting).has_ended


@pytest.mark.shows("L31")
def test_a_second_fit_of_the_same_model_starts_from_nothing() -> None:
    setting = Setting(total_steps=5, validates=False, valid_frequency=None)
    trainer = helios.Trainer("", "iteration", 5, use_cpu=True, print_banner=False, random_seed=5)
    model, data = SmallModel(setting), IndexModule(setting)
    trainer.fit(model, data)
    first, running = dict(model.records), dict(model._running_losses)
    trainer.fit(model, data)
    assert model.records == first
    assert model._running_losses == running


@pytest.mark.shows("L19", "K37")
def test_a_hook_may_end_an_epoch(tmp_path: Path) -> None:
    """L19, K37: StopIteration of on_training_batch_start ends the epoch; its end is told."""

    class Cutting(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_start(self, state: TrainingState) -> None:
            if state.dataset_iter == 2:
                raise StopIteration

    setting = Setting(unit="epoch", total_steps=2, valid_frequency=None)
    outcome = train(tmp_path, setting, Cutting("cutting"))
    assert len(outcome.records) == 4
    assert _names(outcome).count("on_training_epoch_end") == 2


@pytest.mark.shows("K34", "S32")
def test_the_exit_code_tells_an_end_from_an_interruption_and_an_error() -> None:
    setting = Setting(validates=False)
    for error, code in ((KeyboardInterrupt(), 130), (OnPurposeError(), 1)):
        plugin = RaiseIn("on_training_batch_end")
        plugin.on_training_batch_end = _raiser(error)
        trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, plugins=[plugin])
        with pytest.raises(type(error)):
            trainer.fit(SmallModel(setting), IndexModule(setting))
        assert trainer.exit_code == code
    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False)
    trainer.fit(SmallModel(setting), IndexModule(setting))
    assert trainer.exit_code == 0


def _raiser(error: BaseException) -> Any:
    def act(state: TrainingState, should_log: bool) -> None:
        raise error

    return act


def test_a_mistyped_hook_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Mistyped(SmallModel):
        def on_train_epoch_end(self, current_epoch: int) -> None:
            """Never called."""

        def validation_step(self, batch: Any, step: int) -> None:
            """Never called."""

        def _on_my_own(self) -> None:
            """A helper of the user's: none of our business."""

    setting = Setting()
    trainer = helios.Trainer(total_steps=0, use_cpu=True, print_banner=False)
    trainer.fit(Mistyped(setting), IndexModule(setting))
    said = capsys.readouterr().err
    assert "did you mean on_training_epoch_end?" in said
    assert "did you mean valid_step?" in said
    assert "_on_my_own" not in said


def test_validation_without_data_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, Setting(total_steps=1, validates=False, valid_frequency=1))
    assert "no validation data" in capsys.readouterr().err
