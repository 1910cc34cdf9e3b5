"""Activations that are computed again in backward: equal bits, no trace, less memory."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from helios.core import rng
from helios.errors import UsageError
from helios.sharding.recomputation import recomputed
from tests.support.live_bytes import LiveBytes

WIDTH = 6


class Changing(nn.Module):
    """A forward that draws from every kind of generator, and changes every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("same", self.mean)
        self.register_buffer("expanded", torch.ones(1).expand(WIDTH))
        self.table = torch.arange(2.0 * WIDTH).view(2, WIDTH)
        self.row, self.bits = self.table[1], self.table.view(torch.int32)[1]
        self.rare = torch.zeros(WIDTH).to_sparse()
        self.one = torch.zeros(()).expand(1)
        self.last = deque(range(3), maxlen=3)
        self.array = np.zeros(1)
        self.counts = Counter(calls=0)
        self.lists: dict[str, list[int]] = defaultdict(list)
        self.frozen = nn.RNN(WIDTH, WIDTH).requires_grad_(False)
        self.one_of, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0
        self.seen: dict[str, list[int]] = {"calls": []}
        self.own = torch.Generator().manual_seed(3)
        self.numpy = rng.DefaultNumpyRNG(4)

    def forward(
        self,
        x: Tensor,
        penalties: list[Tensor],
        *,
        debug: float | Tensor = 1.0,
        preserve_rng_state: bool = False,
    ) -> dict[str, Tensor]:
        self.num_calls += 1
        self.seen["calls"].append(self.num_calls)
        self.last.append(self.num_calls)
        self.one += 1.0
        self.row += 1.0
        x = x + self.table[1].clone() * (self.bits.float() - 1e9).tanh()
        self.array += 1.0
        self.counts["calls"] += 1
        self.lists["calls"].append(self.num_calls)
        penalties.append(x.square().mean())
        numbers = (self.array[0], self.counts["calls"], len(self.lists["calls"]), len(penalties))
        x = x * torch.tensor(numbers, dtype=torch.float32).prod().sqrt()
        # cuDNN needs the weights in one piece of memory.
        assert self.frozen._flat_weights[0] is self.frozen.weight_ih_l0
        x = self.dropout(self.norm(self.frozen(self.first(x))[0])) * self.one.clone()
        x = x + float(self.last[0])
        self.one_of, self.other = self.other, self.one_of
        x = x + self.one_of(x).tanh()
        # Invisible to autograd's count of changes.
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        if self.num_calls == 2:
            self.late = x.detach()
        x = x * self.expanded + self.mean.clone()
        for draw in (random.random, np.random.rand, rng.get_default_numpy_rng().generator.random):
            x = x * (2.0 if draw() < 0.5 else 0.5)
        x = x * (1.0 + self.numpy.generator.random())
        x = x + torch.rand(WIDTH, generator=self.own) * len(self.seen["calls"])
        return {"out": self.spectral(torch.sigmoid(x)) * debug}


def state_of(network: nn.Module) -> list[Any]:
    """Return everything that a training has made of a network and of the generators."""
    tensors = [
        *network.state_dict().values(),
        *(torch.zeros(0) if part.grad is None else part.grad for part in network.parameters()),
    ]
    parts = [
        (each.num_calls, each.seen, each.late.tolist(), each.same is each.mean, *each.last)
        for each in network
    ]
    others = [
        (each.array.tolist(), each.counts, each.lists, each.table.tolist()) for each in network
    ]
    drawn = [(each.own.get_state().tolist(), each.numpy.state_dict()) for each in network]
    globals_ = rng.get_rng_state_dict()
    return [
        [tensor.clone().reshape(-1).contiguous().view(torch.uint8).tolist() for tensor in tensors],
        *(parts, others, drawn, globals_["torch"].tolist(), globals_["rand"], globals_["numpy"]),
        np.random.get_state()[1].tolist(),
    ]


def train(*, again: bool, autocast: bool) -> list[Any]:
    rng.seed_rngs(1)
    np.random.seed(2)
    network = nn.ModuleList([Changing(), Changing()])
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with recomputed({"0": network[0], "1": network[1]} if again else {}):
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                penalties: list[Tensor] = []
                x = network[0](torch.randn(5, WIDTH), penalties, debug=torch.ones(WIDTH))["out"]
                x = network[1](x, penalties, preserve_rng_state=True)["out"]
                x = network[0](x, penalties, debug=2.0)["out"]
            loss = x.float().square().mean() + sum(penalties)
            loss.backward(retain_graph=True)
            loss.backward()
            assert len(penalties) == 3
            optimizer.step()
    return state_of(network)


@pytest.fixture
def _legacy_generator() -> Any:
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.shows("P102")
@pytest.mark.usefixtures("_legacy_generator")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_forward_starts_as_the_first_and_leaves_no_trace(*, autocast: bool) -> None:
    assert train(again=True, autocast=autocast) == train(again=False, autocast=autocast)


def measure(*, again: bool, is_nested: bool = False) -> int:
    blocks = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4))
    network = nn.Sequential(*blocks)
    inputs = torch.ones(1000, 8)
    modules = {str(number): block for number, block in enumerate(network)}
    if is_nested:
        modules[""] = network
    live = LiveBytes()
    with recomputed(modules if again else {}), live:
        loss = network(inputs).sum()
        count = live.count()
        loss.backward()
    return count


@pytest.mark.shows("P102")
def test_a_unit_keeps_its_inputs_and_no_activations() -> None:
    size = torch.float32.itemsize * 1000
    # Each block keeps two hidden layers, and its output for the next.
    assert measure(again=False) >= 4 * (64 + 64) * size
    assert measure(again=True) <= 5 * 8 * size + 10_000
    # Units inside of another one keep nothing.
    assert measure(again=True, is_nested=True) <= 2 * 8 * size + 10_000


@pytest.mark.shows("P103")
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_input_that_is_changed_before_backward_is_an_error(*, is_nested: bool) -> None:
    network = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    modules: dict[str, nn.Module] = {"net": network, "inner": network[0]}
    words = torch.tensor([0, 1])
    with recomputed(modules if is_nested else {"net": network}):
        loss = network(words).sum()
        words.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.shows("P103")
def test_parameters_that_are_changed_before_backward_are_an_error() -> None:
    network = nn.Linear(2, 2)
    with recomputed({"net": network}):
        loss = network(torch.ones(3, 2)).square().sum()
        with torch.no_grad():
            network.weight.add_(1.0)
        with pytest.raises(UsageError, match="some of net were changed or replaced"):
            loss.backward()
        others = {name: part.detach().clone() for name, part in network.named_parameters()}
        others["weight"].requires_grad_(True)
        outputs = torch.func.functional_call(network, others, (torch.ones(3, 2),))
        with pytest.raises(UsageError, match="some of net were changed or replaced"):
            outputs.square().sum().backward()
