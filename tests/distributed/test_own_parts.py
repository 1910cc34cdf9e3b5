"""What every process changes on its own: a start with as many processes goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import helios
from helios.state import TrainingState
from tests.distributed.test_elastic import Interrupt
from tests.support.elastic import Elastic, ElasticData, ElasticModel, make_trainer
from tests.support.matrix.values import Tally
from tests.support.ranks import run_ranks
from tests.support.warned import collect_warnings


class Counting(ElasticModel):
    """Keeps a running loss of its own in each process, and scales the loss by it.

    Two tensors share memory, so that what happens to one is seen in the other.
    """

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.level = 1.0
        base = torch.zeros(8)
        self.low, self.high = base[:5], base[3:]
        self.meter = Tally()

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        loss = super().train_step(batch, state)
        self.level = 0.5 * self.level + 0.5 * float(loss.detach())
        self.meter.count += int(8 * loss.detach())
        self.low += 0.01 * loss.detach()
        self.high *= 0.9
        return loss * (self.level + 0.01 * self.meter.count + self.low[4] + self.high[0])


def _train(rank: int, folder: Path, num_steps: int | None) -> str:
    folder.mkdir(exist_ok=True)
    setting = Elastic(num_replicas=3, total_steps=9)
    plugins = [] if num_steps is None else [Interrupt(num_steps, 1)]
    model = Counting(setting, folder)
    make_trainer(folder, setting, *plugins).fit(model, ElasticData(setting))
    weights = [p.detach().numpy().tobytes().hex() for p in model.body.parameters()]
    return json.dumps([model.level, weights])


def test_as_many_processes_go_on_each_with_its_own(tmp_path: Path) -> None:
    whole = run_ranks(_train, 3, tmp_path / "whole", None)
    for num_steps in (2, 3):
        run_ranks(_train, 3, tmp_path / "cut", num_steps)
    assert run_ranks(_train, 3, tmp_path / "cut", None) == whole
    assert len(set(whole)) == 3, "each process has something of its own"


def _go_on(rank: int, folder: Path) -> list[str]:
    with collect_warnings() as messages:
        _train(rank, folder, None)
    return messages


def test_another_number_of_processes_goes_on_with_a_warning(tmp_path: Path) -> None:
    run_ranks(_train, 3, tmp_path / "cut", 3)
    texts, *_ = run_ranks(_go_on, 2, tmp_path / "cut")
    assert any("each with its own high, level, meter.count" in text for text in texts)
    newest = helios.find_last_checkpoint(tmp_path / "cut" / "elastic")
    assert newest is not None
    sidecar = json.loads(newest.with_suffix(".json").read_text())
    assert sidecar["level"] == "restart"
