"""What a step changes besides gradients and buffers is found, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helios.state_graph.discovery import Discovery
from tests.support.sums import bits


class Meter:
    """An object with a state."""

    def __init__(self) -> None:
        self.total = 0.0
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
        self.nested = {"deep": [1, {"numbers": torch.zeros(2)}], "other": {1, 2}}
        self.average = torch.zeros(3)
        self.pair = (1, [2])
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


def test_looking_changes_nothing() -> None:
    owner = Owner()
    discovery = discovery_of(owner)
    before = {name: bits(part) for name, part in owner.net.state_dict().items()}
    assert discovery.watch().changed() == []
    owner.learn()
    owner.count = 1
    watch = discovery.watch()
    assert watch.changed() == [], "only what has changed since then"
    assert {n: bits(p) for n, p in owner.net.layer.state_dict(prefix="layer.").items()}.items() <= (
        before.items()
    )


def _count(owner: Owner) -> None:
    owner.count += 1


def _append(owner: Owner) -> None:
    owner.history.append(1.5)


def _dig(owner: Owner) -> None:
    owner.nested["deep"][1]["numbers"][1] = 2.0  # type: ignore[index]


def _average(owner: Owner) -> None:
    owner.average.mul_(0.5).add_(1.0)


def _enter_tuple(owner: Owner) -> None:
    owner.pair[1].append(3)


def _measure(owner: Owner) -> None:
    owner.meter.total += 1.0


def _measure_deep(owner: Owner) -> None:
    owner.meter.parts[0][0] += 1.0


def _cache(owner: Owner) -> None:
    owner.cache = torch.ones(2)


def _create(owner: Owner) -> None:
    owner.fresh = 1  # type: ignore[attr-defined]


def _forget(owner: Owner) -> None:
    del owner.average


def _follow(owner: Owner) -> None:
    with torch.no_grad():
        owner.teacher.layer.weight.lerp_(owner.net.layer.weight, 0.1)


def _follow_by_data(owner: Owner) -> None:
    owner.teacher.layer.weight.data.mul_(0.9).add_(owner.net.layer.weight.data, alpha=0.1)


def _replace_data(owner: Owner) -> None:
    owner.teacher.layer.weight.data = owner.teacher.layer.weight.data * 0.9


def _move_loose(owner: Owner) -> None:
    with torch.no_grad():
        owner.temperature.clamp_(max=0.5)


def _schedule(owner: Owner) -> None:
    owner.scheduler.last_epoch += 1


def _count_calls(owner: Owner) -> None:
    owner.net.num_calls += 1


def _partly_declared(owner: Owner) -> None:
    owner.stuff["kept"] += 1


@pytest.mark.parametrize(
    ("step", "path"),
    [
        (_count, "count"),
        (_append, "history"),
        (_dig, "nested.deep.1"),
        (_average, "average"),
        (_enter_tuple, "pair.1"),
        (_measure, "meter"),
        (_measure_deep, "meter"),
        (_cache, "cache"),
        (_create, "fresh"),
        (_forget, "average"),
        (_follow, "teacher.layer.weight"),
        (_follow_by_data, "teacher.layer.weight"),
        (_replace_data, "teacher.layer.weight"),
        (_move_loose, "temperature"),
        (_schedule, "scheduler.last_epoch"),
        (_count_calls, "net.num_calls"),
        (_partly_declared, "stuff.kept"),
    ],
)
def test_a_change_is_found_by_its_path(step: Callable[[Owner], Any], path: str) -> None:
    assert changes_of(step) == [path]


def test_several_changes_are_found_in_order() -> None:
    def step(owner: Owner) -> None:
        for change in (_follow, _count, _measure, _average):
            change(owner)

    assert changes_of(step) == ["average", "count", "meter", "teacher.layer.weight"]


def test_the_same_value_anew_is_no_change() -> None:
    def step(owner: Owner) -> None:
        owner.average = owner.average.clone()
        owner.history = list(owner.history)
        owner.count = int(str(owner.count))
        owner.nested = copy.deepcopy(owner.nested)

    assert changes_of(step) == []


def test_the_randomness_of_the_run_is_untouched() -> None:
    owner = Owner()
    state = torch.get_rng_state()
    discovery_of(owner).watch().changed()
    assert torch.equal(torch.get_rng_state(), state)
