"""How often one look at the state goes through a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from helios.state_graph.discovery import Discovery
from helios.state_graph.network_parts import Network


class Counting(nn.Sequential):
    """Counts the walks through it."""

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        walks.append(1)
        return super().named_modules(*args, **options)


class Owner:
    """Holds a network and an optimizer."""

    def __init__(self) -> None:
        self.net = Counting(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


walks: list[int] = []


def test_a_capture_walks_a_network_once_for_each_thing_that_torch_lists() -> None:
    found = Discovery(Owner())
    found.take_baseline()
    walks.clear()
    found.capture()
    # Its submodules, wrappers among them (also for its state_dict), and its parameters.
    assert len(walks) <= 4


def test_parts_of_a_network_have_names_without_wrappers() -> None:
    inner = nn.Linear(2, 2)
    network = Network(nn.Sequential(DataParallel(inner), nn.ReLU()))
    assert [name for name, _ in network.modules] == ["", "0", "0", "1"]
    assert dict(network.modules)["0"] is inner
    assert [name for name, _ in network.parameters] == ["0.weight", "0.bias"]
