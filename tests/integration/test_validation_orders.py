"""Generators of validation samplers are state: a validation has the same order after a kill."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

import helios
from helios.data.samplers import ResumableSampler
from helios.plugins import Plugin
from tests.support.kills import KillAt, run_in_child

_SIZE = 24


class Drawn(ResumableSampler):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(batch_size=4)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(_SIZE, generator=self.generator).tolist())

    def __len__(self) -> int:
        return _SIZE


class Inner(Drawn):
    """Has the generator of NumPy in a list of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [{"order": np.random.default_rng(3)}]

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts[0]["order"].permutation(_SIZE).tolist())


def _of_torch() -> BatchSampler:
    sampler = RandomSampler(range(_SIZE), generator=torch.Generator().manual_seed(3))
    return BatchSampler(sampler, 4, drop_last=False)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a generator of torch": lambda: {"batch_size": 4, "sampler": Drawn()},
    "a generator of NumPy in a list": lambda: {"batch_size": 4, "sampler": Inner()},
    "an inner sampler": lambda: {"batch_sampler": _of_torch()},
}


class Data(helios.DataModule):
    def __init__(self, make: Callable[[], dict[str, Any]], loaders: int) -> None:
        super().__init__()
        self.make, self.loaders = make, loaders

    def setup(self) -> None:
        numbers = torch.arange(_SIZE)
        data = TensorDataset(numbers / _SIZE, numbers)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(data, params)
        made = [
            self._create_dataset(data, helios.DataLoaderParams(**self.make()))
            for _ in range(self.loaders)
        ]
        self._valid_dataset = made if self.loaders > 1 else made[0]


class Net(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.orders: list[tuple[int, ...]] = []

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, _ = batch
        return self.net(x[:, None]).square().mean()

    def valid_step(self, batch: Any, step: int, dataloader_idx: int = 0) -> dict[str, Any]:
        self.orders.append((dataloader_idx, *batch[1].tolist()))
        return {"sum": (batch[0].sum(), len(batch[0]))}


def _train(make: Callable[[], Any], loaders: int, root: Path, *plugins: Plugin) -> Any:
    trainer = helios.Trainer(
        total_steps=20,
        train_unit="iteration",
        valid_frequency=2,
        chkpt_frequency=4,
        chkpt_root=root,
        store=helios.CheckpointStore(is_async=False),  # written before the kill
        plugins=plugins,
        random_seed=5,
        use_cpu=True,
        print_banner=False,
    )
    model = Net("net")
    assert trainer.fit(model, Data(make, loaders))
    return model.orders


@pytest.mark.shows("S66")
@pytest.mark.parametrize(("sampler", "loaders"), [*zip(SAMPLERS, (2, 1, 1), strict=True)])
def test_a_validation_has_the_order_that_it_would_have_had(
    sampler: str, loaders: int, tmp_path: Path
) -> None:
    work = functools.partial(_train, SAMPLERS[sampler], loaders)
    whole = work(tmp_path / "whole")
    for iteration in (6, 11):  # after a validation, and between two
        kill = KillAt("on_training_batch_end", iteration)
        killed = run_in_child(functools.partial(work, tmp_path / "run", kill), tmp_path / "killed")
        assert killed == -signal.SIGKILL
    assert work(tmp_path / "run") == whole
    passes = [
        tuple(whole[start : start + 6 * loaders]) for start in range(0, len(whole), 6 * loaders)
    ]
    assert len(whole) == 10 * 6 * loaders
    assert len(passes) == len(set(passes)), "a pass has another order than the one before"
