"""Two names of one buffer that training splits: the run goes on, exactly or with a warning."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.plugins import Plugin
from tests.support.kills import KillAt, run_in_child


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, x.sin()), params)


class Net(helios.Model):
    def __init__(self, split: Callable[[nn.Module], torch.Tensor]) -> None:
        super().__init__("net")
        self.split = split

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.net.register_buffer("scale", torch.ones(2))
        self.net.register_buffer("same", self.net.scale)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        if state.global_iteration == 2:
            self.net.scale = self.split(self.net)
        self.net.scale += 0.1
        self.net.same += 0.2
        factor = self.net.scale.sum() * self.net.same.sum()
        return (self.net(x) * factor - y).square().mean()


def _train(split: Callable[[nn.Module], torch.Tensor], root: Path, *plugins: Plugin) -> Any:
    trainer = helios.Trainer(
        total_steps=8,
        train_unit="iteration",
        chkpt_frequency=4,
        chkpt_root=root,
        store=helios.CheckpointStore(is_async=False),  # written before the kill
        plugins=plugins,
        random_seed=5,
        use_cpu=True,
        print_banner=False,
    )
    model = Net(split)
    assert trainer.fit(model, Data())
    return {name: value.numpy().tobytes() for name, value in model.net.state_dict().items()}


@pytest.mark.xfail(strict=True, reason="no start can load the checkpoint")
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(lambda net: net.scale.clone(), id="a copy"),
        pytest.param(lambda net: torch.cat([net.scale, torch.ones(1)]), id="grown"),
    ],
)
def test_buffers_that_training_splits_are_two_or_named_after_a_kill(
    split: Callable[[nn.Module], torch.Tensor], tmp_path: Path
) -> None:
    whole = _train(split, tmp_path / "whole")
    work = functools.partial(_train, split, tmp_path / "run")
    kill = functools.partial(work, KillAt("on_training_batch_end", 5))
    assert run_in_child(kill, tmp_path / "killed") == -signal.SIGKILL
    sidecars = [json.loads(path.read_text()) for path in (tmp_path / "run" / "net").glob("*.json")]
    assert work() == whole or any(sidecar.get("missing") for sidecar in sidecars)
