"""What a run writes beside checkpoints goes on without a hole or a double (H24, H42-H45)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.core.loss_means import LossMeans, Viewer
from helios.listeners import Iteration
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.resume import copy_checkpoint
from tests.support.runs import Setting, train


def _setting(folder: Path, **changed: Any) -> Setting:
    options = {
        "enable_tensorboard": True,
        "run_path": folder / "runs",
        "enable_file_logging": True,
        "log_path": folder / "logs",
    }
    return Setting(total_steps=12, print_frequency=2, options=options, **changed)


def _points(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for path in sorted(run.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "train/loss":
                    found.append((event.step, value.tensor.float_val[0]))
    return sorted(found)


def test_losses_go_to_tensorboard_without_user_code(tmp_path: Path) -> None:
    train(tmp_path / "run", _setting(tmp_path))
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("small_")
    assert [step for step, _ in _points(run)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.shows("H24")
def test_a_resume_loses_and_doubles_no_point_and_appends_to_the_log(tmp_path: Path) -> None:
    train(tmp_path / "run", _setting(tmp_path))
    (run,) = (tmp_path / "runs").iterdir()
    (log,) = (tmp_path / "logs").iterdir()
    whole, before = _points(run), log.read_text()
    (path,) = (tmp_path / "run").glob("*/*_iter_5.pth")
    train(copy_checkpoint(path, tmp_path / "again"), _setting(tmp_path))
    assert _points(run) == whole
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert log.read_text().startswith(before)
    assert len(log.read_text()) > len(before)


@pytest.mark.shows("H58", "R43")
def test_losses_are_read_only_when_they_are_logged(tmp_path: Path) -> None:
    """H58: a loss on an accelerator is not synchronised to the host in each iteration.

    Its sum stays there, too, and is read where the mean is logged.
    """
    read: list[int] = []
    now = [0]

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.tolist):
                read.append(now[0])
            return super().__torch_function__(function, types, args, kwargs or {})

    class Wrap(Plugin):
        monitor = True

        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            now[0] = state.global_iteration
            table = self.trainer.model.loss_items
            table["loss"] = table["loss"].as_subclass(Watched)

    setting = dataclasses.replace(_setting(tmp_path), total_steps=12, print_frequency=6)
    setting.options["ledger"] = "off"
    train(tmp_path / "run", dataclasses.replace(setting, validates=False), Wrap("wrap"))
    assert now == [12]
    assert not read
    means = LossMeans()
    means.serve([Viewer.FILES])
    for iteration in range(1, 4):
        # A tensor without values, which nobody can read.
        state = TrainingState(global_iteration=iteration)
        table = {"loss": torch.empty((), device="meta")}
        means.iteration_ended(Iteration(state, means, table))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        means.pop_means(Viewer.FILES)
