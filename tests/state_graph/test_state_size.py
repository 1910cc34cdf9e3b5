"""The size of a state before the first step: exact for optimizers of PyTorch that can be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from helios.state_graph.state_size import shard_sizes, storage_sizes

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def sizes_in(optimizer: Optimizer) -> list[int]:
    tensors = [t for part in optimizer.state_dict()["state"].values() for t in part.values()]
    return sorted(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.shows("S3")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adagrad(p),
    ],
)
def test_the_state_that_a_first_step_makes_is_known_before_it(make: Make) -> None:
    network = make_network()
    optimizer = make(network.parameters())
    before = [p.detach().clone() for p in network.parameters()]
    predicted = sorted(storage_sizes([], [optimizer]))
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert optimizer.state_dict()["state"].keys() <= set(range(6))
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert predicted == sizes_in(optimizer) == sorted(storage_sizes([], [optimizer]))


def test_what_is_not_sharded_has_no_sizes_of_shards() -> None:
    """Else memory for the first save was kept for what the optimizer makes only."""
    network = make_network()
    assert shard_sizes([network], [torch.optim.Adam(network.parameters())]) == []
    assert shard_sizes([network], [Own(network.parameters())]) == []


class Own(Optimizer):
    """An optimizer of the user's, whose step is nobody else's to call."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("called")


def test_an_optimizer_of_the_users_is_taken_for_one_like_adam() -> None:
    parameter = nn.Parameter(torch.ones(10))
    assert storage_sizes([], [Own([parameter])]) == [40, 40]


@pytest.mark.shows("S8")
def test_networks_count_with_buffers_and_each_storage_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    assert storage_sizes([first, second], []) == [36]
    assert sum(storage_sizes([nn.BatchNorm1d(4)], [])) == 4 * 16 + 8


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_what_has_no_storage_is_counted_by_what_it_holds() -> None:
    """Lazy parameters have no shape before the first step; sparse tensors are made of others."""
    lazy = nn.LazyLinear(3)
    optimizers = [torch.optim.Adam(lazy.parameters()), Own(lazy.parameters())]
    assert storage_sizes([lazy], optimizers) == []
    sparse = nn.Module()
    graph = torch.eye(3).to_sparse()
    sparse.register_buffer("graph", graph)
    assert storage_sizes([sparse], []) == [2 * 3 * 8, 3 * 4]
    sparse.register_buffer("graph", graph.to_sparse_csr())
    columns = sparse.graph.col_indices().untyped_storage().nbytes()
    assert storage_sizes([sparse], []) == [4 * 8, columns, 3 * 4]
