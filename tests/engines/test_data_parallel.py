"""A wrapped module's gradients have the bits of the default path, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helios.core.wrappers import unwrap
from helios.engines.engine import Engine
from helios.replicas.reduction_tree import tree_sum
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """Two layers, one that is not used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(67, 67)
        self.second = nn.Linear(67, 1)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(67, 67).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.frozen(self.first(x))))


def loss_of(network: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 67, generator=generator) * 10.0 ** (3 * rank)
    return network(x).square().mean()


def gradients_of(network: nn.Module) -> dict[str, Tensor | None]:
    return {name: part.grad for name, part in unwrap(network).named_parameters()}


def by_definition(num_ranks: int) -> dict[str, Tensor | None]:
    """Return the mean along the tree of the gradients that each rank has by itself."""
    leaves = []
    for rank in range(num_ranks):
        network = Net()
        loss_of(network, rank).backward()
        leaves.append(gradients_of(network))
    return {
        name: None if first is None else tree_sum([leaf[name] for leaf in leaves]) / num_ranks
        for name, first in leaves[0].items()
    }


def _wrap(rank: int, megabytes: float) -> dict[str, Tensor | None]:
    engine = Engine("cpu")
    network = engine.wrap(Net(), bucket_cap_mb=megabytes, find_unused_parameters=True)
    assert isinstance(network, DistributedDataParallel)
    assert engine.wrap(network) is network
    engine.backward_loss(loss_of(network, rank))
    return gradients_of(network)


@pytest.mark.shows("K18", "E18", "E29")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("megabytes", [0.01, 25])
def test_buckets_are_added_along_the_tree(num_ranks: int, megabytes: float) -> None:
    """Neither their size nor the backend's own order counts."""
    expected = by_definition(num_ranks)
    assert expected["unused.weight"] is None
    for found in run_ranks(_wrap, num_ranks, megabytes):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                assert torch.equal(found[name], gradient), name
