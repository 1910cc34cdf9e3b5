"""How a run ends: totals, polls, exceptions; ``test_decisions`` has all that may be asked for."""

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
from tests.support.runs import IndexModule, Setting, SmallModel, train


def _last(folder: Path) -> helios.TrainingState:
    path = helios.find_last_checkpoint(folder / "small")
    assert path is not None
    state: helios.TrainingState = helios.load_checkpoint(path)["training_state"]
    return state


@pytest.mark.shows("H37", "H38", "R36")
@pytest.mark.parametrize(("unit", "total", "batches"), [("iteration", 4, 20), ("epoch", 2, 12)])
def test_accumulation_makes_steps_longer_and_leaves_epochs(
    unit: str, total: int, batches: int, tmp_path: Path
) -> None:
    setting = Setting(unit=unit, total_steps=total, accumulation=5, scheduler="none")
    assert len(train(tmp_path, setting).records) == batches
    assert _last(tmp_path).current_iteration == (4 if unit == "iteration" else batches)
    assert _last(tmp_path).global_iteration == batches


@pytest.mark.shows("S32")
@pytest.mark.parametrize("unit", ["epoch", "iteration"])
def test_a_stopped_run_is_finished_until_its_total_is_raised(unit: str, tmp_path: Path) -> None:
    setting = Setting(unit=unit, total_steps=3, valid_frequency=None)
    whole = train(tmp_path / "whole", dataclasses.replace(setting, total_steps=4))
    train(tmp_path / "run", setting, StopAt(2))
    assert not train(tmp_path / "run", setting).records
    resumed = train(tmp_path / "run", dataclasses.replace(setting, total_steps=4))
    assert_equal(resumed, whole, since=2)


@pytest.mark.shows("H30", "H31", "C3")
def test_the_checkpoint_is_there_before_the_early_stop(tmp_path: Path) -> None:
    """With equal frequencies the counter is inside of the checkpoint."""
    setting = Setting(unit="epoch", total_steps=20, early_stop_cycles=1, valid_frequency=1)
    train(tmp_path, setting)
    assert _last(tmp_path).early_stop_count == 1


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


class OnPurposeError(RuntimeError):
    """An error of the user's."""


class RaiseIn(Quiet):
    def __init__(self, event: str, error: type[BaseException] = OnPurposeError) -> None:
        super().__init__("raise-in")
        self.error = error
        setattr(self, event, self._act)

    def _act(self, *args: Any) -> None:
        raise self.error("on purpose")


@pytest.mark.shows("H63", "K34", "R47", "C6")
@pytest.mark.parametrize("event", ["on_backward_start", "on_save_checkpoint"])
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
def test_a_second_fit_starts_from_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    setting = Setting(total_steps=5, validates=False, valid_frequency=None)
    trainer = helios.Trainer("", "iteration", 5, use_cpu=True, print_banner=False, random_seed=5)
    model, data = SmallModel(setting), IndexModule(setting)
    trainer.fit(model, data)
    first, running = dict(model.records), dict(model._running_losses)
    trainer.fit(model, data)
    assert model.records == first
    assert model._running_losses == running
    assert capfd.readouterr().err.count("This run begins with new weights") == 1
