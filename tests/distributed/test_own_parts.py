"""What every process changes on its own: a start with as many processes goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.loops import YieldLoop
from helios.state import TrainingState
from tests.distributed.test_elastic import Interrupt
from tests.support.elastic import Elastic, ElasticData, ElasticModel, make_trainer
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
        self.meter = _Meter()

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        loss = super().train_step(batch, state)
        self.level = 0.5 * self.level + 0.5 * float(loss.detach())
        self.meter.total += float(loss.detach())
        self.low += 0.01 * loss.detach()
        self.high *= 0.9
        return loss * (self.level + 0.01 * self.meter.total + self.low[4] + self.high[0])


class _Meter:
    """A plain object with a state."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class ByYields(ElasticModel):
    """Two optimizers, one loss each; counts its steps."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.first = torch.optim.SGD(self.body.parameters(), lr=0.05)
        self.second = torch.optim.SGD(nn.ModuleList([self.head]).parameters(), lr=0.05)
        del self.optimizer, self.scheduler
        self.num_seen = 0.0

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        ids, images = batch
        self.num_seen += float(images.sum())
        features = self.body(images)
        loss = nn.functional.cross_entropy(self.head(features), ids % 5)
        self._loss_items["loss"] = loss.detach() + self.num_seen
        self._write(state.global_iteration, ids.tolist(), loss, images)
        yield loss
        yield nn.functional.cross_entropy(self.head(features.detach()), ids % 5)


KINDS: dict[str, type[ElasticModel]] = {"counting": Counting, "yields": ByYields}


def _train(rank: int, folder: Path, kind: str, num_steps: int | None) -> str:
    folder.mkdir(exist_ok=True)
    setting = Elastic(num_replicas=3, total_steps=9)
    plugins = [] if num_steps is None else [Interrupt(num_steps, 1)]
    trainer = make_trainer(folder, setting, *plugins)
    if kind == "yields":
        loop = YieldLoop(optimizers=("first", "second"))
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    model = KINDS[kind](setting, folder)
    trainer.fit(model, ElasticData(setting))
    own = [getattr(model, name, None) for name in ("level", "num_seen")]
    weights = [p.detach().numpy().tobytes().hex() for p in model.body.parameters()]
    return json.dumps([own, weights])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_processes_go_on_each_with_its_own(tmp_path: Path, kind: str) -> None:
    whole = run_ranks(_train, 3, tmp_path / "whole", kind, None)
    for num_steps in (2, 3):
        run_ranks(_train, 3, tmp_path / "cut", kind, num_steps)
    assert run_ranks(_train, 3, tmp_path / "cut", kind, None) == whole
    assert len(set(whole)) == 3, "each process has something of its own"


def _go_on(rank: int, folder: Path) -> list[str]:
    with collect_warnings() as messages:
        _train(rank, folder, "counting", None)
    return messages


def test_another_number_of_processes_goes_on_with_a_warning(tmp_path: Path) -> None:
    run_ranks(_train, 3, tmp_path / "cut", "counting", 3)
    texts, *_ = run_ranks(_go_on, 2, tmp_path / "cut")
    assert any("each with its own high, level, meter.total" in text for text in texts)
    newest = helios.find_last_checkpoint(tmp_path / "cut" / "elastic")
    assert newest is not None
    sidecar = json.loads(newest.with_suffix(".json").read_text())
    assert sidecar["level"] == "restart"
