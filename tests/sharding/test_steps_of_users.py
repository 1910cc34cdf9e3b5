"""What a step of a sharded model may do with networks and their values: equal bits, or an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import helios
from helios.plugins import Plugin
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import WIDTH, WORDS, Words, train_here


class Net(nn.Module):
    """Its inputs are words, which have no gradient; those of its units have one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        first, second = self.layers
        x: Tensor = second(torch.tanh(first(self.embedding(words))))
        return x


class Cancelling(nn.Module):
    """A layer, one of whose gradients is -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = nn.Parameter(torch.randn(5, WIDTH))
        self.kept = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.lost * -0.0).sum(0) + self.kept.sum(0)


class Writing(nn.Linear):
    """A layer that clips its weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1.0, 1.0)
        return super().forward(x)


class Noisy(torch.optim.SGD):
    """An optimizer of one's own, whose hook draws numbers."""

    is_elementwise = True


class Steps(helios.Model):
    def __init__(self, kind: str) -> None:
        super().__init__("steps")
        self._kind = kind

    def setup(self, fast_init: bool = False) -> None:
        self.net = Net()
        if self._kind in LAYERS:
            self.net.layers[1] = LAYERS[self._kind]()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if self._kind in DRAWS:
            self.optimizer = Noisy(self.net.parameters(), lr=0.1)
            self.optimizer.register_step_pre_hook(lambda *_: DRAWS[self._kind]())

    def on_training_start(self) -> None:
        if self._kind == "hook":
            self.net.embedding.weight.register_hook(torch.neg)

    def shard(self) -> list[nn.Module | helios.Unit]:
        layers = [*self.net.layers]
        if self._kind == "recompute":
            return [helios.Unit(layer, checkpoint=True) for layer in layers]
        return layers

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        if self._kind == "penalty":
            return self.net(batch[1]).mean() + self.net.embedding.weight.square().sum()
        if self._kind == "backward":
            self.net(batch[1]).mean().backward()
        if self._kind == "loss":
            self._loss_items["norm"] = self.net.embedding.weight.norm()
        return STEPS.get(self._kind, call_twice)(self.net, *batch[1:])


def call_twice(net: Net, words: Tensor, following: Tensor) -> Tensor:
    return net(words).square().mean() + net(following).abs().mean()


def detach(net: Net, words: Tensor, following: Tensor) -> Tensor:
    target = net(following).detach()
    return mse_loss(net(words), target)


def detach_later(net: Net, words: Tensor, following: Tensor) -> Tensor:
    found = net(words)
    return mse_loss(found, net(following).detach())


def call_layers(net: Net, words: Tensor, following: Tensor) -> Tensor:
    loss = net(following).mean()
    layer = net.layers[0]
    x = torch.arange(WIDTH) + words[:, None].float()
    # The inputs of the last call have no gradient, and its backward is the first one.
    return (layer(layer(x / WORDS)) + layer(x)).square().mean() + loss


def change_in_place(net: Net, words: Tensor, following: Tensor) -> Tensor:
    x = net(torch.stack([words, following], 1))
    x += 0.5
    x[..., 0] = 0.0
    x.view(-1, WIDTH).mul_(1.5)
    return x.square().mean()


STEPS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    step.__name__: step for step in (call_twice, detach, detach_later, call_layers, change_in_place)
} | {"recompute": change_in_place}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "minus_zero": Cancelling,
    "write": partial(Writing, WIDTH, WIDTH),
}


DRAWS: dict[str, Callable[[], Any]] = {
    "drawn": lambda: torch.rand(1),
    "drawn by numpy": lambda: np.random.shuffle([1, 2]),
}


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Words(64), params)


def fit(
    rank: int,
    folder: Path,
    model: helios.Model,
    sharding: str,
    *plugins: Plugin,
    num_replicas: int = 3,
) -> None:
    options = {"total_steps": 3, "num_replicas": num_replicas, "sharding": sharding}
    train_here(folder, model, Data(), *plugins, **options)


def read_ledger(folder: Path) -> bytes:
    return (folder / "steps" / "ledger.jsonl").read_bytes()


@pytest.mark.shows("P86")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["minus_zero", *STEPS])
def test_calls_of_networks_have_equal_bits(tmp_path: Path, kind: str) -> None:
    run_ranks(fit, 1, tmp_path / "whole", Steps(kind), "none")
    run_ranks(fit, 2, tmp_path / "sharded", Steps(kind), "full")
    assert read_ledger(tmp_path / "sharded") == read_ledger(tmp_path / "whole")


@pytest.mark.shows("P88")
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("write", r"write to parameters, but net\.layers\.1\.weight was changed"),
        ("hook", r"without hooks, but net\.embedding\.weight has one"),
        ("penalty", "penalty in the forward of the module"),
        ("backward", "must have one backward, .* gradients of a unit came twice"),
        ("loss", r"\['norm'\] must be .* computed of shards"),
        ("drawn", r"Noisy\.step\(\) must not draw random numbers"),
        ("drawn by numpy", r"Noisy\.step\(\) must not draw random numbers"),
    ],
)
def test_what_shards_would_lose_is_refused(tmp_path: Path, kind: str, match: str) -> None:
    with pytest.raises(RankError, match=match):
        run_ranks(fit, 2, tmp_path, Steps(kind), "full")
    if kind.startswith("drawn"):
        assert not list(tmp_path.glob("steps/*.ckpt"))
