"""Curves of gradient norms: of the window's average, before clipping, and resumable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from helios.errors import ArgumentError
from helios.loops.yielding import YieldLoop
from helios.plugins import Plugin
from helios.plugins.gradient_norm import GradientNormMonitor
from helios.state import TrainingState
from tests.plugins.test_learning_rate import Curves, Yielding, fit
from tests.support.resume import copy_checkpoint
from tests.support.runs import Setting, SmallModel, train


class Expected(Plugin):
    """Computes the norms from the gradients by name, in its own way."""

    unsaved = ("norms",)

    def __init__(self, norm_type: float = 2.0) -> None:
        super().__init__("expected")
        self.norm_type = norm_type
        self.norms: dict[int, dict[str, float]] = {}

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        net = self.context.model.net
        grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        norms = {f"grad_norm/net.{n}": self._norm([grad]) for n, grad in grads.items()}
        norms["grad_norm/net"] = norms["grad_norm"] = self._norm(list(grads.values()))
        self.norms[self.context.state.global_iteration] = norms

    def _norm(self, grads: list[torch.Tensor]) -> float:
        return get_total_norm(grads, self.norm_type).item()


@pytest.mark.shows("K21")
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf])
def test_the_norms_are_those_before_clipping(norm_type: float) -> None:
    """R39."""
    setting = Setting(total_steps=6, accumulation=2, print_frequency=1)
    monitor = GradientNormMonitor(norm_type, per_network=True, per_parameter=True)
    expected = Expected(norm_type)
    curves = fit(SmallModel(setting), monitor, expected, clip_norm=1e-3)
    assert curves.points == expected.norms
    assert list(curves.points) == [2, 4, 6, 8, 10, 12]
    # The first layer is frozen in the first epoch, and has no gradients there.
    assert ["grad_norm/net.0.weight" in point for point in curves.points.values()][::5] == [
        False,
        True,
    ]


def test_only_the_norm_of_all_is_logged_unless_asked() -> None:
    setting = Setting(total_steps=2, print_frequency=1)
    expected = Expected()
    curves = fit(SmallModel(setting), GradientNormMonitor(), expected)
    assert curves.points == {
        number: {"grad_norm": norms["grad_norm"]} for number, norms in expected.norms.items()
    }


def test_inside_of_a_window_the_norm_of_the_newest_update_is_logged() -> None:
    setting = Setting(unit="epoch", total_steps=1, accumulation=2, print_frequency=1)
    expected = Expected()
    curves = fit(SmallModel(setting), GradientNormMonitor(), expected)
    norms = [expected.norms[number]["grad_norm"] for number in (2, 2, 4, 4, 6)]
    assert list(curves.of("grad_norm").items()) == list(zip(range(2, 7), norms, strict=True))


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_resume_logs_what_an_undisturbed_run_has(unit: str, tmp_path: Path) -> None:
    total = 6 if unit == "iteration" else 2
    setting = Setting(unit=unit, total_steps=total, accumulation=2, print_frequency=1)
    setting.requests = unit == "epoch"

    def run(folder: Path) -> Curves:
        curves = Curves()
        monitor = GradientNormMonitor(per_network=True, per_parameter=True)
        train(folder, setting, monitor, curves)
        return curves

    whole = run(tmp_path / "whole")
    for path in sorted((tmp_path / "whole").glob("*/*.pth"))[:-1]:
        since = int(path.stem.split("_iter_")[1])
        resumed = run(copy_checkpoint(path, tmp_path / f"from-{since}"))
        assert resumed.points == {n: p for n, p in whole.points.items() if n > since}


class Odd(SmallModel):
    """A sparse gradient, a parameter of no network, one in float64, and none for another."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        del self.scheduler
        self.table = nn.Embedding(4, 1, sparse=True)
        self.loose = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
        self.unused = torch.ones(1, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.0)
        self.optimizer.add_param_group({"params": [self.unused, self.loose]})

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.ids = []
        rows = self.table(torch.tensor([0, 2, 2]))
        loss = 3 * rows.sum() + 2 * self.loose.sum()
        self._loss_items["loss"] = loss.detach()
        return loss


def test_all_that_has_a_gradient_counts() -> None:
    setting = Setting(total_steps=1, valid_frequency=None, print_frequency=1)
    monitor = GradientNormMonitor(per_network=True, per_parameter=True)
    (point,) = fit(Odd(setting), monitor).points.values()
    rows, loose = torch.tensor([3.0, 6.0]), torch.tensor([2.0], dtype=torch.float64)
    assert point == {
        "grad_norm": get_total_norm([rows, loose]).item(),
        "grad_norm/table": rows.norm().item(),
        "grad_norm/table.weight": rows.norm().item(),
        "grad_norm/optimizer": 2.0,
        "grad_norm/optimizer.1.1": 2.0,
    }


def test_optimizers_that_take_turns_have_curves_of_their_own() -> None:
    """L27."""
    setting = Setting(total_steps=2, print_frequency=1, validates=False, valid_frequency=None)
    seen: list[dict[str, float]] = []

    class Noting(Yielding):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            norms = [2 * self.net[place].weight.detach().norm().item() for place in (4, 0)]
            names = ["grad_norm/optimizer", "grad_norm/other"]
            seen.append(dict(zip(names, norms, strict=True)))
            yield from super().train_step(batch, state)

    monitor = GradientNormMonitor(per_network=True)
    curves = fit(Noting(setting), monitor, loop=YieldLoop())
    for number, norms in enumerate(seen, 1):
        assert curves.points[number] == pytest.approx(
            norms | {f"{name}/net": norm for name, norm in norms.items()}
        )


def test_manual_steps_are_said_not_to_be_heard(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(total_steps=4, print_frequency=1, is_manual=True)
    curves = fit(SmallModel(setting), GradientNormMonitor())
    assert curves.points == {}
    said = capsys.readouterr().err
    assert said.count("Plugin 'gradient-norm' has nothing to log: train_step returns None") == 1
    assert "logged nothing" not in said


def test_a_monitor_that_logs_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fit(SmallModel(Setting(total_steps=3)), GradientNormMonitor())
    said = capsys.readouterr().err
    assert "Plugin 'gradient-norm' has logged nothing" in said
    assert "has nothing to log" not in said


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan, "2", True])
def test_the_norm_must_be_one(norm_type: Any) -> None:
    with pytest.raises(ArgumentError, match=r"GradientNormMonitor\(norm_type=...\) must be a num"):
        GradientNormMonitor(norm_type)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_the_names_are_those_without_wrappers(wrap: Any) -> None:
    class Wrapped(SmallModel):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.net[0].requires_grad_(True)
            self.net = wrap(self.net)

    monitor = GradientNormMonitor(per_parameter=True)
    setting = Setting(total_steps=1, print_frequency=1, unfreezes=False, valid_frequency=None)
    (norms,) = fit(Wrapped(setting), monitor).points.values()
    assert set(norms) == {"grad_norm"} | {
        f"grad_norm/net.{n}.{kind}" for n in (0, 1, 4) for kind in ("weight", "bias")
    }
