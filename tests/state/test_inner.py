"""What an object holds and its ``state_dict`` leaves out is saved, or named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.state.owners import Owner, bits, resumed, started, through_a_file


class Sam(Optimizer):
    """A sharpness-aware optimizer as people write it: the inner one's state is nobody's."""

    def __init__(self, params: Any, rho: float = 0.5) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.5, "momentum": 0.5})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.5, momentum=0.5)
        self.param_groups = self.base_optimizer.param_groups
        self.num_ascents = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_ascents += 1
        self.base_optimizer.step()


class Lookahead:
    """Slow weights beside fast ones, with a ``state_dict`` that leaves the slow ones out."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]
        self.count = 0

    def step(self) -> None:
        self.inner.step()
        self.count += 1
        fast = [p for g in self.inner.param_groups for p in g["params"]]
        for slow, part in zip(self.slow, fast, strict=True):
            slow.add_(part.detach() - slow, alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def _net() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(2, 2)


def _with_sam() -> Any:
    net = _net()
    sam = Sam(net.parameters())
    return Owner(net=net, optimizer=sam, schedule=StepLR(sam, 1, gamma=0.5))


def _with_lookahead() -> Any:
    net = _net()
    return Owner(net=net, optimizer=Lookahead(torch.optim.Adam(net.parameters(), lr=0.5)))


def _train(owner: Any, number: int) -> None:
    owner.net(torch.full((1, 2), float(number))).sum().backward()
    owner.optimizer.step()
    owner.net.zero_grad()
    if "schedule" in vars(owner):
        owner.schedule.step()


@pytest.mark.shows("S54")
@pytest.mark.parametrize("make", [_with_sam, _with_lookahead])
def test_wrappers_around_optimizers_resume_to_the_same_bits(
    make: Callable[[], Any], tmp_path: Path, said: list[str]
) -> None:
    owner = make()
    discovery = started(owner)
    for number in range(3):
        _train(owner, number)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = make()
    other = started(again)
    other.restore(state)
    for number in range(3, 6):
        _train(owner, number)
        _train(again, number)
    assert bits(other.capture()) == bits(discovery.capture())
    assert bits(again.net.state_dict()) == bits(owner.net.state_dict())
    assert not said


@pytest.mark.shows("S54")
def test_optimizers_that_share_their_groups_share_them_after_a_resume() -> None:
    owner = _with_sam()
    discovery = started(owner)
    _train(owner, 1)
    again = resumed(_with_sam, discovery.capture())
    assert again.optimizer.param_groups is again.optimizer.base_optimizer.param_groups
    assert again.optimizer.num_ascents == 1


@pytest.mark.shows("S54")
def test_values_that_a_state_dict_holds_are_not_saved_twice() -> None:
    class Whole(Lookahead):
        def state_dict(self) -> dict[str, Any]:
            slow = [part.clone() for part in self.slow]
            inner = copy.deepcopy(self.inner.state_dict())
            return {"inner": inner, "slow": slow, "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict["inner"])
            self.slow, self.count = state_dict["slow"], state_dict["count"]

    net = _net()
    owner = Owner(net=net, optimizer=Whole(torch.optim.Adam(net.parameters())))
    discovery = started(owner)
    _train(owner, 1)
    state = discovery.capture()
    assert state["values"] == {}


class Keeper:
    """An object with a state that keeps a group of somebody's optimizer."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_a_group_of_an_inner_optimizer_is_held_by_what_is_found_before_it() -> None:
    def make() -> Any:
        net = _net()
        outer = Lookahead(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5))
        return Owner(net=net, keeper=Keeper(outer.inner.param_groups[0]), optimizer=outer)

    owner = make()
    discovery = started(owner)
    _train(owner, 1)
    owner.keeper.group["lr"] = 0.25
    again = resumed(make, copy.deepcopy(discovery.capture()))
    assert again.keeper.group is again.optimizer.inner.param_groups[0]
    assert again.keeper.group["lr"] == 0.25


@pytest.mark.shows("S54")
def test_plain_attributes_of_optimizers_and_schedulers_come_back() -> None:
    def make() -> Any:
        net = _net()
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.count = 0  # type: ignore[attr-defined]
        return Owner(net=net, optimizer=optimizer, schedule=StepLR(optimizer, 2))

    owner = make()
    discovery = started(owner)
    owner.optimizer.count = 5
    owner.optimizer.late = [1, 2]
    owner.schedule.note = "warm"
    again = resumed(make, discovery.capture())
    assert (again.optimizer.count, again.optimizer.late) == (5, [1, 2])
    assert again.schedule.note == "warm"


class Silent:
    """Says nothing of the object that it holds."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_what_an_inner_object_changes_in_place_is_saved(tmp_path: Path) -> None:
    def make() -> Any:
        net = _net()
        return Owner(net=net, optimizer=Silent(torch.optim.Adagrad(net.parameters(), lr=0.5)))

    def train(owner: Any) -> None:
        owner.net(torch.ones(1, 2)).sum().backward()
        owner.optimizer.inner.step()

    owner, again = make(), make()
    discovery = started(owner)
    train(owner)
    started(again).restore(through_a_file(discovery.capture(), tmp_path / "state"))
    for each in (owner, again):
        train(each)
    assert bits(again.net.state_dict()) == bits(owner.net.state_dict())


class Window:
    """An object whose state has a part of its tensor, and one of two equal numbers."""

    def __init__(self) -> None:
        self.losses = torch.zeros(4)
        self.count = self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.losses[-1], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses[-1] = state_dict["last"]
        self.count = state_dict["count"]


def test_a_part_of_a_tensor_or_an_equal_number_is_not_the_whole_state(tmp_path: Path) -> None:
    owner = Owner(window=Window())
    discovery = started(owner)
    owner.window.losses += 1
    owner.window.count = owner.window._count = 3
    again = resumed(
        lambda: Owner(window=Window()), through_a_file(discovery.capture(), tmp_path / "state")
    )
    assert bits(again.window.losses) == bits(owner.window.losses)
    assert vars(again.window)["_count"] == 3
