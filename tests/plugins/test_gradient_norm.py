"""Curves of gradient norms: of the window's average, before clipping, and resumable."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm

from helios.plugins.monitors import GradientNormMonitor
from tests.plugins.test_learning_rate import fit
from tests.support.quiet import Quiet
from tests.support.runs import Setting, SmallModel


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


class Manual(SmallModel):
    def train_step(self, batch: Any, state: Any) -> None:
        super().train_step(batch, state)


def test_a_model_that_steps_itself_is_said_to_have_no_norms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting = Setting(total_steps=3, print_frequency=1)
    assert fit(Manual(setting), GradientNormMonitor()).points == {}
    assert caplog.text.count("has nothing to log") == 1
