"""Which tensors are one: what training ties or unties is restored, or fits no resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.state.owners import Owner, bits, started, through_a_file


def _net(*, is_tied: bool) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    if is_tied:
        net[1].weight = net[0].weight
    return net


def _untie(owner: Any) -> None:
    owner.net[1].weight = nn.Parameter(owner.net[1].weight.detach().clone())


def _tie(owner: Any) -> None:
    owner.net[1].weight = owner.net[0].weight


def test_parameters_that_training_unties_fit_no_resume(said: list[str]) -> None:
    owner = Owner(net=_net(is_tied=True))
    discovery = started(owner)
    assert discovery.capture()["misfits"] == {}
    _untie(owner)
    state = discovery.capture()
    assert list(state["misfits"]) == ["net.1.weight"]
    assert "net.1.weight" in said[0]


def _exchange_parameters(owner: Any) -> None:
    net = owner.net
    net[0].weight, net[1].weight = net[1].weight, net[0].weight


def _exchange_buffers(owner: Any) -> None:
    net = owner.net
    net[2].running_mean, net[3].running_mean = net[3].running_mean, net[2].running_mean


@pytest.mark.shows("S56")
@pytest.mark.parametrize("change", [_tie, _exchange_parameters, _exchange_buffers])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_tensors_that_training_puts_elsewhere_are_the_same_objects_there(
    change: Callable[[Any], None], has_optimizer: bool, tmp_path: Path, said: list[str]
) -> None:
    def make() -> Any:
        owner = Owner(net=_net(is_tied=False))
        owner.held = [owner.net[0].weight, owner.net[2].running_mean]
        if has_optimizer:
            owner.optimizer = torch.optim.Adam(owner.net.parameters(), lr=0.1)
        return owner

    def train(owner: Any) -> None:
        for number, (_, part) in enumerate(sorted(owner.net.named_parameters())):
            part.grad = torch.sin(part.detach() + number)
            if not has_optimizer:
                part.data.sub_(part.grad)
        if has_optimizer:
            owner.optimizer.step()
        owner.held[1] += 0.5

    owner = make()
    discovery = started(owner)
    train(owner)
    change(owner)
    train(owner)
    state = discovery.capture()
    if has_optimizer and change is _tie:
        # The optimizer updates what no network holds any longer.
        assert "optimizer" in state["misfits"]
        return
    again = make()
    other = started(again)
    other.restore(through_a_file(state, tmp_path / "state"))
    third = make()
    started(third).restore(through_a_file(other.capture(), tmp_path / "second"))
    for each in (owner, again, third):
        train(each)
    for each in (again, third):
        assert bits(each.net.state_dict()) == bits(owner.net.state_dict())
        assert bits(each.held) == bits(owner.held)
    assert not said


def _share_memory(net: Any) -> None:
    net[1].weight.data = net[0].weight.data
    net[3].running_mean = net[2].running_mean


def _part_memory(net: Any) -> None:
    net[1].weight.data = net[1].weight.data.clone()
    net[3].running_mean = net[3].running_mean.clone()


def test_tied_weights_have_their_moments_whichever_network_comes_first() -> None:
    def make(order: str) -> Any:
        torch.manual_seed(1)
        nets = {name: nn.Linear(2, 2) for name in order}
        nets[order[1]].weight = nets[order[0]].weight
        return Owner(nets=nets, optimizer=torch.optim.Adam(nets["a"].parameters(), lr=0.1))

    owner, again = make("ab"), make("ba")
    discovery, other = started(owner), started(again)
    owner.nets["a"](torch.ones(1, 2)).sum().backward()
    owner.optimizer.step()
    other.restore(copy.deepcopy(discovery.capture()))
    moments = [bits(each.optimizer.state[each.nets["b"].weight]) for each in (owner, again)]
    assert moments[0] == moments[1]


@pytest.mark.shows("S56")
@pytest.mark.parametrize("begins_tied", [True, False])
def test_memory_that_training_shares_or_parts_is_named(begins_tied: bool, said: list[str]) -> None:
    owner = Owner(net=_net(is_tied=False))
    if begins_tied:
        _share_memory(owner.net)
    discovery = started(owner)
    assert not discovery.capture()["missing"]
    (_part_memory if begins_tied else _share_memory)(owner.net)
    assert "net.1.weight" in discovery.capture()["missing"]
    assert len(said) == 1
