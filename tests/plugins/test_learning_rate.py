"""Curves of learning rates: what each step has used, under the right names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.plugins import Plugin
from helios.plugins.monitors import LearningRateMonitor
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.runs import IndexModule, Setting, SmallModel


class Curves(Quiet):
    """Keeps what is logged, by iteration; losses and scores are left out."""

    unsaved = ("points",)

    def __init__(self) -> None:
        super().__init__("curves")
        self.points: dict[int, dict[str, float]] = {}

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        for name, value in scalars.items():
            if not name.startswith(("train/", "valid/")):
                self.points.setdefault(state.global_iteration, {})[name] = value


def fit(model: SmallModel, *plugins: Plugin, **options: Any) -> Curves:
    setting, curves = model.setting, Curves()
    trainer = helios.Trainer(
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        valid_frequency=setting.valid_frequency,
        print_frequency=setting.print_frequency,
        accumulation_steps=setting.accumulation,
        random_seed=setting.seed,
        print_banner=False,
        use_cpu=True,
        plugins=[*plugins, curves],
        **options,
    )
    trainer.fit(model, IndexModule(setting))
    return curves


def cosine(count: int) -> list[float]:
    """Return the rates of the first steps of ``SmallModel``, whose scheduler moves per step."""
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.shows("R42")
def test_the_rate_that_a_step_has_used_is_logged() -> None:
    setting = Setting(total_steps=8, print_frequency=2)
    curves = fit(SmallModel(setting), LearningRateMonitor())
    rates = cosine(8)
    assert curves.points == {number: {"lr": rates[number - 1]} for number in (2, 4, 6, 8)}


class Grouped(SmallModel):
    """A model with two optimizers, of which one has two groups and a rate in a tensor."""

    names: tuple[str, ...] = ()

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        del self.optimizer, self.scheduler
        parts = [self.net[1], self.net[4]]
        groups: list[dict[str, Any]] = [{"params": part.parameters()} for part in parts]
        for group, name in zip(groups, self.names, strict=False):
            group["name"] = name
        groups[1] |= {"lr": torch.tensor(0.25), "momentum": 0.5}
        self.heads = [torch.optim.SGD(groups, lr=0.125)]
        self.body = torch.optim.Adam(self.net[0].parameters(), lr=0.5, betas=(0.75, 0.9))

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.ids = []
        self._loss_items["loss"] = torch.zeros(())


_TWO = {"lr/body": 0.5, "lr/heads.0/0": 0.125, "lr/heads.0/1": 0.25}


@pytest.mark.shows("R42")
@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ((), {}, _TWO),
        (
            ("first", "last"),
            {"momentum": True},
            {
                "lr/body": 0.5,
                "momentum/body": 0.75,
                "lr/heads.0/first": 0.125,
                "momentum/heads.0/first": 0.0,
                "lr/heads.0/last": 0.25,
                "momentum/heads.0/last": 0.5,
            },
        ),
    ],
)
def test_curves_are_called_by_optimizer_and_group(
    names: tuple[str, ...], options: dict[str, Any], expected: dict[str, float]
) -> None:
    model = Grouped(Setting(total_steps=1, print_frequency=1))
    model.names = names
    assert fit(model, LearningRateMonitor(**options)).points == {1: expected}
