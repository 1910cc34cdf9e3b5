"""State beside what a value is: attributes of tensors, hooks and classes, slots, methods."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.state.owners import Owner, resumed, started, through_a_file


class LoudRandom(random.Random):
    draws = 0

    def random(self) -> float:
        self.draws += 1
        return super().random()


def _of_a_loose_tensor() -> Any:
    return Owner(value=torch.zeros(2))


def _of_a_buffer() -> Any:
    net = nn.BatchNorm1d(2)
    return Owner(net=net, value=net.running_mean)


def _of_a_generator() -> Any:
    return Owner(value=LoudRandom(1))


def _of_a_parameter_outside_networks() -> Any:
    value = nn.Parameter(torch.zeros(2))
    return Owner(value=value, optimizer=torch.optim.SGD([value], lr=0.1))


@pytest.mark.shows("S57")
@pytest.mark.parametrize(
    "make",
    [_of_a_loose_tensor, _of_a_buffer, _of_a_generator, _of_a_parameter_outside_networks],
)
def test_an_attribute_beside_a_content_comes_back(
    make: Callable[[], Any], tmp_path: Path, said: list[str]
) -> None:
    def prepared() -> Any:
        owner = make()
        owner.value.gone, owner.value.kept = 1, [1]
        owner.read = lambda: owner.value.kept
        return owner

    owner = prepared()
    discovery = started(owner)
    owner.value.kept.append(2)
    owner.value.late = torch.ones(1)
    del owner.value.gone
    again = resumed(prepared, through_a_file(discovery.capture(), tmp_path / "state"))
    assert (again.value.kept, again.value.late.tolist()) == ([1, 2], [1])
    assert not hasattr(again.value, "gone")
    assert again.read() is again.value.kept
    assert not said


@pytest.mark.shows("S56")
@pytest.mark.parametrize(
    "change",
    [
        lambda value: setattr(value, "data", torch.ones(3, dtype=torch.float64)),
        lambda value: value.resize_(5).fill_(2),
        lambda value: value.requires_grad_(),
    ],
)
def test_a_tensor_of_another_form_is_the_one_that_closures_refer_to(
    change: Callable[[Any], Any],
) -> None:
    def make() -> Any:
        own = torch.zeros(2)
        return Owner(value=own, read=lambda: own)

    owner = make()
    discovery = started(owner)
    change(owner.value)
    again = resumed(make, discovery.capture())
    assert again.read() is again.value
    assert again.value.dtype is owner.value.dtype
    assert again.value.requires_grad is owner.value.requires_grad
    assert again.value.tolist() == owner.value.tolist()


class OwnSGD(torch.optim.SGD):
    """Has an attribute that is not in its dict."""

    __slots__ = ("count",)


class Gain:
    """A hook that counts, and remembers."""

    def __init__(self) -> None:
        self.calls = [0]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls[0] += 1


def _hooked() -> Any:
    net = nn.Linear(2, 1)
    optimizer = OwnSGD(net.parameters(), lr=0.1)
    owner = Owner(net=net, optimizer=optimizer, loose=nn.Parameter(torch.zeros(1)), gains=None)
    gains = [Gain() for _ in range(4)]
    net.weight.register_hook(gains[0])
    net.bias.register_post_accumulate_grad_hook(gains[1])
    optimizer.register_step_post_hook(gains[2])
    owner.loose.register_hook(gains[3])
    owner.read = lambda: [gain.calls[0] for gain in gains]
    return owner


@pytest.mark.shows("S57")
def test_objects_that_are_hooks_on_parameters_and_optimizers_come_back(said: list[str]) -> None:
    owner = _hooked()
    discovery = started(owner)
    for _ in range(2):
        (owner.net(torch.ones(1, 2)).sum() + owner.loose.sum()).backward()
        owner.optimizer.step()
    owner.optimizer.count = owner.optimizer.defaults["lr"] = 3
    again = resumed(_hooked, discovery.capture())
    assert again.read() == owner.read() == [2, 2, 2, 2]
    assert (again.optimizer.count, again.optimizer.defaults["lr"]) == (3, 3)
    assert not said


class Helper:
    made = 0

    def __init__(self) -> None:
        self.own = 0


def _counted(owner: Any) -> None:
    Helper.made += 1


def _poked(owner: Any) -> None:
    owner.view[0] += 1


def _stepped_by_another(owner: Any) -> None:
    owner.optimizer.step = lambda: None


def _moved(owner: Any) -> None:
    owner.net._forward_hooks.move_to_end(next(iter(owner.net._forward_hooks)))


@pytest.mark.shows("S51")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_counted, "class Helper.made"),
        (_poked, "view"),
        (_stepped_by_another, "optimizer.step"),
        (_moved, "net (forward hook)"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(
    change: Callable[[Any], None], name: str, said: list[str]
) -> None:
    net = nn.Linear(1, 1)
    owner = Owner(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    owner.helper, owner.view = Helper(), memoryview(bytearray(3))
    owner.net.register_forward_hook(lambda *args: None)
    owner.net.register_forward_hook(lambda *args: None)
    discovery = started(owner)
    owner.helper.own += 1
    assert discovery.capture()["missing"] == {}
    change(owner)
    assert list(discovery.capture()["missing"]) == [name]
    assert len(said) == 1


def _closed() -> Any:
    """Return an owner with a function and a hook that keep what they count around them."""
    count, rows, side = 0, list[int](), nn.Linear(1, 1)
    nn.init.ones_(side.weight)
    nn.init.ones_(side.bias)
    hidden = torch.optim.SGD(side.parameters(), lr=0.1, momentum=0.9)

    def bump(kept: dict[str, int] = {"n": 0}, *, more: Any = (0, [0])) -> Any:  # noqa: B006
        nonlocal count
        count += 1
        rows.append(count)
        kept["n"] += 1
        more[1][0] -= 1
        hidden.zero_grad()
        side(torch.ones(1, 1)).sum().backward()
        hidden.step()
        return count, [*rows], kept["n"], more[1][0], side.weight.item()

    net = nn.Linear(1, 1)
    net.register_forward_hook(lambda *args: bump() and None)
    return Owner(net=net, bump=bump)


@pytest.mark.shows("S57")
def test_what_closures_and_default_arguments_hold_comes_back(
    tmp_path: Path, said: list[str]
) -> None:
    owner = _closed()
    discovery = started(owner)
    owner.net(torch.ones(1, 1))
    owner.bump()
    again = resumed(_closed, through_a_file(discovery.capture(), tmp_path / "state"))
    assert again.bump() == owner.bump()
    assert not said
