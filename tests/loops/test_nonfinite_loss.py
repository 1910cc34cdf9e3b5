"""The first loss that is not finite: one warning, and a line in the summary."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import helios
from tests.typed.user_script import Line, Numbers


class Diverging(Line):
    """A model whose loss is not finite from a step on."""

    def __init__(self, first: int, value: float, *, is_manual: bool = False) -> None:
        super().__init__("diverging")
        self.first, self.value, self.is_manual = first, value, is_manual

    def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
        loss = super().train_step(batch, state)
        loss = loss * self.value if state.global_iteration >= self.first else loss
        if self.is_manual:
            self._loss_items["mean"] = loss.item()
            loss.backward()
            return None
        return loss


def fit(model: helios.Model, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    options = {"train_unit": "iteration", "total_steps": 9, **options}
    helios.Trainer(use_cpu=True, print_banner=False, **options).fit(model, Numbers())
    return capsys.readouterr().err


@pytest.mark.shows("U36")
@pytest.mark.parametrize(
    ("value", "options"), [(math.nan, {"num_replicas": 2}), (math.inf, {}), (-math.inf, {})]
)
def test_the_first_one_is_said_once_and_in_the_summary(
    value: float, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = fit(Diverging(3, value), capsys, **options)
    (shown,) = re.findall(r"WARNING - loss is (\S+) in epoch \d, iteration 3, and no", said)
    assert shown in ("nan", "inf", "-inf")
    (line,) = re.findall(r"not finite +the first loss: loss was (.*)", said)
    assert re.fullmatch(rf"{shown} \(epoch \d, iteration 3\)", line)


@pytest.mark.shows("U36")
def test_losses_of_a_manual_step_and_of_a_run_with_checkpoints_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fit(Diverging(2, math.nan, is_manual=True), capsys)
    assert said.count("mean is nan in epoch 1, iteration 2") == 1
    said = fit(Diverging(4, math.nan), capsys, chkpt_root=tmp_path, chkpt_frequency=2)
    assert said.count("loss is nan in epoch") == 1
