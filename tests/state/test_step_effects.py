"""What a step changes besides gradients and buffers is found, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helios.state.discovery import Discovery


class Meter:
    """An object with a state."""

    def __init__(self) -> None:
        self.total = 0.0
        self.scale = nn.Linear(1, 1)
        self.parts = [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "parts": self.parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total, self.parts = state_dict["total"], state_dict["parts"]


class Network(nn.Module):
    """A network with buffers of all kinds, and attributes that no state dictionary holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.register_buffer("kept", None)
        self.num_calls = 0


class Owner:
    """Holds what a model may hold."""

    def __init__(self) -> None:
        self.net = Network()
        self.teacher = copy.deepcopy(self.net)
        self.temperature = nn.Parameter(torch.ones(()))
        self.meter = Meter()
        self.optimizer = torch.optim.Adam([*self.net.parameters(), self.temperature])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.count = 0
        self.history: list[Any] = []
        self.average = torch.zeros(3)
        self.cache: Any = None
        self._loss_items: dict[str, Any] = {}
        self.records: list[Any] = []
        self.stuff = {"seen": 0, "kept": 0}

    def learn(self) -> None:
        """Do what a step should do: gradients, buffers, tables, and what is declared."""
        loss = self.net.norm(self.net.layer(torch.randn(4, 3))).square().mean()
        (loss * self.temperature).backward()
        with torch.no_grad():
            self.teacher.norm(torch.randn(4, 3))
            self.net.hidden += 1
            self.net.last = torch.ones(1)
            self.teacher.kept = torch.ones(1)
        self._loss_items["loss"] = loss.detach()
        self.records.append(loss)
        self.stuff["seen"] += 1


def discovery_of(owner: Owner) -> Discovery:
    return Discovery(owner, exclude=frozenset({"_loss_items"}), unsaved=("records", "stuff.seen"))


def changes_of(step: Callable[[Owner], Any]) -> list[str]:
    owner = Owner()
    watch = discovery_of(owner).watch()
    owner.learn()
    step(owner)
    return watch.changed()


def test_gradients_buffers_tables_and_declared_names_are_no_changes() -> None:
    assert changes_of(lambda owner: None) == []


def _follow(owner: Owner) -> None:
    with torch.no_grad():
        owner.teacher.layer.weight.lerp_(owner.net.layer.weight, 0.1)


_CHANGES: dict[str, list[Callable[[Owner], Any]]] = {
    "count": [lambda owner: setattr(owner, "count", 1)],
    "history": [lambda owner: owner.history.append(1.5)],
    "average": [lambda owner: owner.average.mul_(0.5).add_(1.0)],
    "cache": [lambda owner: setattr(owner, "cache", torch.ones(2))],
    "teacher.layer.weight": [_follow, lambda owner: owner.teacher.layer.weight.data.mul_(0.9)],
    "meter.total": [lambda owner: setattr(owner.meter, "total", 1.0)],
    "meter.scale.weight": [lambda owner: owner.meter.scale.weight.data.add_(1.0)],
    "net.num_calls": [lambda owner: setattr(owner.net, "num_calls", 1)],
}


@pytest.mark.parametrize("path", _CHANGES)
def test_a_change_is_found_by_its_path(path: str) -> None:
    for change in _CHANGES[path]:
        assert changes_of(change) == [path]
