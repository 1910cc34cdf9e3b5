"""The learning rates of a report are those that the updates have used, as in a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers

import helios
from helios.ledger.run_facts import read_curves, read_run
from helios.ledger.timing import FILE_NAME
from helios.plugins import Plugin
from helios.state import TrainingState

_LENGTH, _EPOCH = 24, 6
Make = Callable[[Optimizer], Any]

_SCHEDULERS: dict[str, tuple[Make, str]] = {
    "constant": (partial(schedulers.ConstantLR, factor=1.0), "step"),
    "cosine": (partial(schedulers.CosineAnnealingLR, T_max=9), "step"),
    "one cycle": (partial(schedulers.OneCycleLR, max_lr=[0.5, 0.25], total_steps=30), "step"),
    "every fourth step": (partial(schedulers.StepLR, step_size=4), "step"),
    "epochs": (partial(schedulers.ExponentialLR, gamma=0.5), "epoch"),
    "both": (partial(schedulers.CosineAnnealingLR, T_max=9), "both"),
}


def _make_optimizer() -> tuple[Any, Optimizer]:
    net = torch.nn.Linear(1, 1)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.125}]
    return net, SGD(groups, lr=0.5, momentum=0.9)


def _by_hand(name: str, count: int, *, accumulation: int = 1) -> list[list[float]]:
    """Return the rates of each iteration, by group."""
    make, interval = _SCHEDULERS[name]
    _, optimizer = _make_optimizer()
    scheduler = make(optimizer)
    slow = schedulers.ExponentialLR(optimizer, gamma=0.75) if interval == "both" else scheduler
    used = []
    for iteration in range(1, count + 1):
        used.append([group["lr"] for group in optimizer.param_groups])
        if iteration % accumulation == 0:
            optimizer.step()
            if interval != "epoch":
                scheduler.step()
        if iteration % _EPOCH == 0 and interval != "step":
            slow.step()
    return used


class _Scheduled(helios.Model):
    def __init__(self, name: str, *, is_manual: bool = False) -> None:
        super().__init__("scheduled")
        self.make, self.interval = _SCHEDULERS[name]
        self.is_manual = is_manual

    unsaved = ("make", "interval", "is_manual")

    def setup(self, fast_init: bool = False) -> None:
        self.net, self.optimizer = _make_optimizer()
        self.scheduler = self.make(self.optimizer)
        self.scheduler_interval = {"scheduler": "epoch" if self.interval == "epoch" else "step"}
        if self.interval == "both":
            self.slow = schedulers.ExponentialLR(self.optimizer, gamma=0.75)
            self.scheduler_interval["slow"] = "epoch"

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        loss = self.net(batch).square().mean() * 0.01
        if not self.is_manual:
            return loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return None


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=_LENGTH // _EPOCH)
        self._train_dataset = self._create_dataset(torch.ones(_LENGTH, 1), params)


class _Stop(Plugin):
    """An error after an iteration."""

    def __init__(self, iteration: int) -> None:
        super().__init__("stop")
        self.iteration = iteration

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        if state.global_iteration == self.iteration:
            raise ValueError("on purpose")


def _train(root: Path, model: _Scheduled, count: int, *plugins: Plugin, **options: Any) -> Path:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=count,
        chkpt_frequency=4,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        plugins=list(plugins),
        **options,
    )
    trainer.fit(model, _Data())
    return root / "scheduled"


def _read(folder: Path) -> list[list[float]]:
    groups = [numbers for _, numbers in read_curves(read_run(folder)).rates.values()]
    return [list(rates) for rates in zip(*groups, strict=True)]


@pytest.mark.shows("P127")
@pytest.mark.parametrize("name", _SCHEDULERS)
def test_the_rates_are_those_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    expected = _by_hand(name, 20)
    folder = _train(tmp_path, _Scheduled(name), 20)
    assert _read(folder) == expected
    # Only changes of the source are written: few with any usual scheduler.
    assert len((folder / FILE_NAME).read_text().splitlines()) < 20


@pytest.mark.shows("P127")
@pytest.mark.parametrize("name", ["cosine", "epochs", "both"])
def test_a_killed_run_has_the_same_rates(name: str, tmp_path: Path) -> None:
    for iteration in (3, 9, 14):
        with pytest.raises(ValueError, match="on purpose"):
            _train(tmp_path, _Scheduled(name), 20, _Stop(iteration))
    assert _read(_train(tmp_path, _Scheduled(name), 20)) == _by_hand(name, 20)


@pytest.mark.shows("P127")
def test_iterations_without_an_update_have_the_rates_of_theirs(tmp_path: Path) -> None:
    folder = _train(tmp_path, _Scheduled("cosine"), 10, accumulation_steps=2)
    assert _read(folder) == _by_hand("cosine", 20, accumulation=2)


@pytest.mark.shows("P127")
def test_steps_of_the_model_itself_have_their_rates(tmp_path: Path) -> None:
    folder = _train(tmp_path, _Scheduled("one cycle", is_manual=True), 20)
    assert _read(folder) == _by_hand("one cycle", 20)


@pytest.mark.shows("P127")
def test_rates_that_a_hook_sets_are_those_that_were_used(tmp_path: Path) -> None:
    """Before the step, beside a scheduler that sets others after it."""

    class Warm(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_start(self, state: TrainingState) -> None:
            for group in self.context.model.optimizer.param_groups:
                group["lr"] = state.global_iteration / 1024

    folder = _train(tmp_path, _Scheduled("cosine"), 20, Warm("warm"))
    assert _read(folder) == [[number / 1024] * 2 for number in range(1, 21)]
