"""Which object a place names, and the order of keys, are state; an alias stays one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.state_graph.owners import Owner, bits, resumed, started, through_a_file


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


def test_an_attribute_names_the_part_of_a_network_that_it_named(said: list[str]) -> None:
    def make() -> Any:
        parts = nn.ModuleList([_filled(0), _filled(1)])
        optimizer = torch.optim.Adam(parts.parameters(), lr=0.5)
        return Owner(parts=parts, active=parts[0], optimizer=optimizer)

    def train(owner: Any, number: int) -> None:
        owner.active = owner.parts[number % 2]
        owner.active(torch.ones(1, 1)).sum().backward()
        owner.optimizer.step()
        owner.optimizer.zero_grad()

    owner = make()
    discovery = started(owner)
    for number in range(4):
        train(owner, number)
    again = resumed(make, discovery.capture())
    assert again.active is again.parts[1]
    assert bits(again.parts.state_dict()) == bits(owner.parts.state_dict())
    for number in range(4, 7):
        train(owner, number)
        train(again, number)
    assert bits(again.parts.state_dict()) == bits(owner.parts.state_dict())
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


@pytest.mark.shows("S57")
def test_a_list_of_networks_has_the_length_that_it_had(said: list[str]) -> None:
    def make() -> Any:
        nets = [_filled(0), _filled(1)]
        return Owner(all=nets, some=[nets[0], nets[1]], none=[])

    owner = make()
    discovery = started(owner)
    owner.some.pop(0)
    owner.none += [owner.all[1], owner.all[0]]
    again = resumed(make, discovery.capture())
    assert len(again.some) == 1
    assert again.some[0] is again.all[1]
    assert again.none[0] is again.all[1]
    assert again.none[1] is again.all[0]
    assert not said


@pytest.mark.shows("S57")
def test_another_object_in_a_tuple_comes_back(said: list[str]) -> None:
    def make() -> Any:
        owner = _population()
        owner.pair = (owner.nets[0], owner.nets[1])
        return owner

    owner = make()
    discovery = started(owner)
    owner.pair = (owner.nets[1], owner.nets[0])
    again = resumed(make, discovery.capture())
    assert again.pair[0] is again.nets[1]
    assert again.pair[1] is again.nets[0]
    assert not said


@pytest.mark.shows("S57")
def test_the_order_of_dicts_with_objects_comes_back() -> None:
    def make() -> Any:
        net = nn.ModuleDict({"a": _filled(1), "b": _filled(2)})
        return Owner(net=net, table={"x": net["a"], "y": net["b"], "z": 1})

    owner = make()
    discovery = started(owner)
    assert not any(discovery.capture()["values"].values())
    owner.table["x"] = owner.table.pop("x")
    owner.net["a"] = owner.net.pop("a")
    again = resumed(make, discovery.capture())
    assert list(again.table) == ["y", "z", "x"]
    assert list(again.net) == ["b", "a"]


def test_an_attribute_that_names_a_parameter_names_it_again() -> None:
    def make() -> Any:
        net = nn.Sequential(_filled(1), _filled(2))
        return Owner(net=net, head=net[0].weight)

    owner = make()
    discovery = started(owner)
    owner.head = owner.net[1].weight
    again = resumed(make, discovery.capture())
    assert again.head is again.net[1].weight


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


def test_a_value_behind_an_object_in_a_list_comes_back_in_its_place() -> None:
    def make() -> Any:
        return Owner(net=_filled(1), parts=[])

    owner = make()
    discovery = started(owner)
    owner.parts += [owner.net, 3]
    again = resumed(make, discovery.capture())
    assert again.parts[0] is again.net
    assert again.parts[1:] == [3]


@pytest.mark.parametrize("content", [{"net": 0, "n": 1}, [0, 3]], ids=["dict", "list"])
def test_a_container_around_an_object_that_setup_does_not_make_comes_back(
    content: Any, said: list[str]
) -> None:
    def make() -> Any:
        return Owner(net=_filled(1), current=None)

    owner = make()
    discovery = started(owner)
    place = 0 if isinstance(content, list) else "net"
    content[place] = owner.net
    owner.current = content
    again = resumed(make, discovery.capture())
    assert again.current[place] is again.net
    assert (again.current[1] if isinstance(content, list) else again.current["n"]) in (1, 3)
    assert not said


def _sequences() -> Any:
    nets = [nn.Sequential(_filled(number), _filled(number + 10)) for number in range(3)]
    return Owner(nets=nets, best=nets[0])


def _reversed_and_part(owner: Any) -> None:
    owner.nets.reverse()
    owner.best = owner.nets[0][1]


def _turned(owner: Any) -> None:
    owner.nets = owner.nets[::-1]
    owner.best = owner.nets[2][0]


def _sorted(owner: Any) -> None:
    owner.nets.sort(key=lambda net: -net[0].weight.item())
    owner.best = owner.nets[1]


def _inserted(owner: Any) -> None:
    owner.nets.insert(0, owner.nets.pop())
    owner.best = owner.nets[0][0]


@pytest.mark.parametrize("change", [_reversed_and_part, _turned, _sorted, _inserted])
@pytest.mark.parametrize("since", ["a network", "a part", "nothing"])
def test_members_of_a_list_change_places_and_an_attribute_names_one_or_a_part_of_it(
    change: Callable[[Any], None], since: str, said: list[str]
) -> None:
    def make() -> Any:
        owner = _sequences()
        owner.best = {"a network": owner.best, "a part": owner.best[1], "nothing": None}[since]
        return owner

    owner = make()
    discovery = started(owner)
    for _ in range(2):
        change(owner)
        for number, net in enumerate(owner.nets):
            with torch.no_grad():
                net[0].weight.add_(100 + number)
        state = discovery.capture()
        assert state["misfits"] == {}
        again = make()
        discovery = started(again)
        discovery.restore(state)
        assert [bits(net.state_dict()) for net in again.nets] == [
            bits(net.state_dict()) for net in owner.nets
        ]
        assert _where(again) == _where(owner)
        owner = again
    assert not said


def _where(owner: Any) -> list[tuple[int, str]]:
    named = [(number, *item) for number, net in enumerate(owner.nets) for item in _parts(net)]
    return [(number, name) for number, name, part in named if part is owner.best]


def _parts(net: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(net.named_modules())


@pytest.mark.parametrize("is_part", [True, False])
def test_a_new_network_in_the_place_of_one_that_is_still_there_fits_no_resume(
    is_part: bool, said: list[str]
) -> None:
    owner = _sequences()
    if is_part:
        owner.best = owner.best[1]
    discovery = started(owner)
    owner.best = copy.deepcopy(owner.best)
    assert list(discovery.capture()["misfits"]) == ["best (new)"]
    assert len(said) == 1


def test_a_part_that_members_of_a_list_share_is_looked_at_where_it_was(said: list[str]) -> None:
    def make() -> Any:
        shared = _filled(5)
        return Owner(nets=[nn.Sequential(_filled(number), shared) for number in range(2)])

    owner = make()
    discovery = started(owner)
    owner.nets.reverse()
    owner.nets[0][1].count = 3
    again = resumed(make, discovery.capture())
    assert [net[0].weight.item() for net in again.nets] == [1, 0]
    assert again.nets[0][1] is again.nets[1][1]
    assert again.nets[0][1].count == 3
    assert not said
