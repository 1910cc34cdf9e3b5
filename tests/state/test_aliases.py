"""Which object a place names, and the order of keys, are state; an alias stays one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.state.owners import Owner, bits, resumed, started, through_a_file


def _filled(value: float) -> nn.Linear:
    net = nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(value)
    return net


def _population() -> Any:
    nets = [_filled(0), _filled(1), _filled(2)]
    return Owner(nets=nets, best=nets[0], zbest=nets[0], table={"now": nets[0]})


def _move(owner: Any) -> None:
    for number, net in enumerate(owner.nets):
        with torch.no_grad():
            net.weight.fill_(10 + number)


@pytest.mark.shows("S57")
@pytest.mark.parametrize("name", ["best", "zbest"])
def test_an_attribute_names_the_network_that_it_named(
    name: str, tmp_path: Path, said: list[str]
) -> None:
    owner = _population()
    discovery = started(owner)
    _move(owner)
    setattr(owner, name, owner.nets[2])
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = resumed(_population, state)
    assert getattr(again, name) is again.nets[2]
    assert [net.weight.item() for net in again.nets] == [10, 11, 12]
    other = "zbest" if name == "best" else "best"
    assert getattr(again, other) is again.nets[0]
    assert not said


@pytest.mark.shows("S57")
def test_members_of_dicts_and_lists_name_what_they_named(said: list[str]) -> None:
    owner = _population()
    discovery = started(owner)
    _move(owner)
    owner.table["now"] = owner.nets[1]
    owner.table["late"] = owner.nets[2]
    owner.nets.reverse()
    owner.best = None
    del owner.zbest
    state = discovery.capture()
    again = resumed(_population, state)
    assert [net.weight.item() for net in again.nets] == [12, 11, 10]
    assert again.table["now"] is again.nets[1]
    assert again.table["late"] is again.nets[0]
    assert again.best is None
    assert "zbest" not in vars(again)
    assert not said


class _PerParameter:
    """What some trainings keep for each parameter: an optimizer, and a tensor."""

    def __init__(self) -> None:
        self.net = nn.Sequential(_filled(1), _filled(2))
        self.optimizers = {
            part: torch.optim.SGD([part], lr=0.5, momentum=0.5) for part in self.net.parameters()
        }
        self.sums: dict[nn.Parameter, torch.Tensor] = {}

    def step(self) -> None:
        self.net(torch.ones(1, 1)).sum().backward()
        for part, optimizer in self.optimizers.items():
            assert part.grad is not None
            self.sums[part] = self.sums.get(part, torch.zeros_like(part)) + part.grad
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.shows("S69")
def test_dicts_keyed_by_parameters_resume(tmp_path: Path, said: list[str]) -> None:
    owner = _PerParameter()
    discovery = started(owner)
    for _ in range(2):
        owner.step()
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = _PerParameter()
    other = started(again)
    other.restore(state)
    owner.step()
    again.step()
    assert bits(list(again.net.parameters())) == bits(list(owner.net.parameters()))
    assert bits(list(again.sums.values())) == bits(list(owner.sums.values()))
    assert list(map(id, again.sums)) == list(map(id, again.net.parameters()))
    assert not said
