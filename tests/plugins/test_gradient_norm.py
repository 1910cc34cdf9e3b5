"""Curves of gradient norms: of the window's average, before clipping, and resumable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm

from helios.plugins.monitors import GradientNormMonitor
from tests.plugins.test_learning_rate import Curves, fit
from tests.support.quiet import Quiet
from tests.support.resume import copy_checkpoint
from tests.support.runs import Setting, SmallModel, train


class Expected(Quiet):
    """Computes the norms from the gradients by name, in its own way."""

    unsaved = ("norms",)

    def __init__(self, norm_type: float = 2.0) -> None:
        super().__init__("expected")
        self.norm_type = norm_type
        self.norms: dict[int, dict[str, float]] = {}

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        net = self.context.model.net
        grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        norms = {f"grad_norm/net.{n}": self._norm([grad]) for n, grad in grads.items()}
        norms["grad_norm/net"] = norms["grad_norm"] = self._norm(list(grads.values()))
        self.norms[self.context.state.global_iteration] = norms

    def _norm(self, grads: list[torch.Tensor]) -> float:
        return get_total_norm(grads, self.norm_type).item()


@pytest.mark.shows("K21")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
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
