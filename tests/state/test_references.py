"""One graph: what keeps its name, what is shared between owners, and what is restored in place."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from helios.errors import StateError
from helios.state.owners import Owner as NamedOwner
from helios.state.owners import Owners
from tests.state.owners import Owner, bits, resumed, started, through_a_file
from tests.support.matrix.values import Tally


class Holder:
    def __init__(self, content: Any = None) -> None:
        self.content = content


class Slotted:
    """An object of slots, which takes no weak reference."""

    __slots__ = ("content", "left")

    def __init__(self, content: Any = None) -> None:
        self.content = content


class Hiding(Holder):
    """Tells pickle nothing, and would fail if any of its methods ran."""

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("no method of a class runs")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("no method of a class runs")


@pytest.mark.shows("S57")
@pytest.mark.parametrize("kind", [Holder, Slotted, Hiding, types.SimpleNamespace])
def test_an_object_of_attributes_comes_back_in_place(
    kind: Any, tmp_path: Path, said: list[str]
) -> None:
    def make() -> Any:
        part = kind(content=[1]) if kind is types.SimpleNamespace else kind([1])
        return Owner(part=part, read=lambda: part.content)

    owner = make()
    discovery = started(owner)
    owner.part.content = [2, owner.part]
    again = resumed(make, through_a_file(discovery.capture(), tmp_path / "state"))
    assert again.part.content == [2, again.part]
    assert again.read() is again.part.content, "what setup refers to in a closure stays valid"
    assert not said


@pytest.mark.shows("S57")
@pytest.mark.parametrize("kind", [Holder, Slotted])
def test_an_object_that_training_makes_comes_back_if_its_class_is_known(
    kind: Any, tmp_path: Path
) -> None:
    def make() -> Any:
        return Owner(parts=[kind(0)], best=None)

    owner = make()
    discovery = started(owner)
    owner.best = kind(owner.parts)
    owner.parts.append(kind(1))
    again = resumed(make, through_a_file(discovery.capture(), tmp_path / "state"))
    assert again.best.content is again.parts
    assert [part.content for part in again.parts] == [0, 1]


@pytest.mark.shows("S57")
def test_attributes_of_parameters_and_of_hooks_come_back(said: list[str]) -> None:
    class Hook:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: Any, inputs: Any, output: Any) -> None:
            self.calls += 1

    def make() -> Any:
        net = nn.Linear(1, 1)
        net.weight.scale = 1.0  # type: ignore[attr-defined]
        net.register_forward_hook(Hook())
        return Owner(net=net)

    owner = make()
    discovery = started(owner)
    owner.net(torch.ones(1, 1))
    owner.net.weight.scale = 2.0
    owner.net.bias.steps = [3]
    again = resumed(make, discovery.capture())
    (hook,) = again.net._forward_hooks.values()
    assert (hook.calls, again.net.weight.scale, again.net.bias.steps) == (1, 2.0, [3])
    assert not said


@pytest.mark.shows("S57")
def test_a_submodule_that_is_exchanged_for_a_sibling_is_exchanged_again(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
            self.head = self.heads[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)  # type: ignore[no-any-return]

    def make() -> Any:
        net = Net()
        return Owner(net=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.1))

    def train(owner: Any, steps: int) -> None:
        for _ in range(steps):
            owner.optimizer.zero_grad()
            owner.net(torch.ones(3, 2)).square().sum().backward()
            owner.optimizer.step()

    owner = make()
    discovery = started(owner)
    train(owner, 2)
    owner.net.head = owner.net.heads[1]
    train(owner, 2)
    again = resumed(make, through_a_file(discovery.capture(), tmp_path / "state"))
    assert again.net.head is again.net.heads[1]
    train(owner, 3)
    train(again, 3)
    assert bits(again.net.state_dict()) == bits(owner.net.state_dict())
    assert bits(again.optimizer.state_dict()) == bits(owner.optimizer.state_dict())


def test_what_loading_replaces_is_linked_again() -> None:
    class Assigning(nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(state_dict, *args, assign=True, **kwargs)

    def make() -> Any:
        net = Assigning(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return Owner(net=net, optimizer=optimizer, first=net.weight, rows=[net.weight, 1])

    owner = make()
    discovery = started(owner)
    with torch.no_grad():
        owner.net.weight.add_(1)
    owner.rows[1] = 2
    again = resumed(make, discovery.capture())
    assert bits(again.net.weight) == bits(owner.net.weight)
    assert again.first is again.net.weight
    assert again.rows[0] is again.net.weight
    assert again.optimizer.param_groups[0]["params"][0] is again.net.weight


@pytest.mark.shows("S77")
def test_a_state_is_a_function_of_what_is_there_and_not_of_how_it_came_there() -> None:
    def make() -> Any:
        return Owner(hist=[], prev=None, part=Holder([]), best=None)

    def train(owner: Any, number: int) -> None:
        owner.prev, owner.hist = owner.hist, [number]
        owner.part = Holder([*owner.part.content, number])
        owner.best = owner.part if number % 2 else owner.best

    undisturbed = make()
    discovery = started(undisturbed)
    other = make()
    broken = started(other)
    for number in range(10):
        train(undisturbed, number)
        train(other, number)
        state = broken.capture()
        assert bits(state) == bits(discovery.capture())
        other = make()
        broken = started(other)
        broken.restore(state)


def _two_owners() -> tuple[Any, Any, Owners]:
    indices = [3, 1, 2]
    shared = Holder({"a": np.zeros(2)})
    first = Owner(indices=indices, shared=shared, only=[0])
    second = Owner(subset=None, shared=shared)
    second.subset = Subset([0, 1, 2, 3], indices)  # type: ignore[arg-type]
    second.own = indices
    owners = Owners([NamedOwner("first", first), NamedOwner("second", second)])
    owners.take_baseline()
    return first, second, owners


@pytest.mark.shows("S57")
def test_what_two_owners_share_stays_shared(tmp_path: Path) -> None:
    first, second, owners = _two_owners()
    first.indices.reverse()
    first.shared.content["a"] += 1
    second.late = first.only
    second.view = first.shared.content["a"]
    states, missing = owners.capture({})
    assert not missing
    states = through_a_file(states, tmp_path / "state")
    first, second, owners = _two_owners()
    subset = second.subset
    owners.restore(states)
    assert first.indices == [2, 1, 3]
    assert second.own is first.indices
    assert subset.indices is first.indices
    assert second.shared is first.shared
    assert second.late is first.only
    assert second.view is first.shared.content["a"]
    assert second.view.tolist() == [1, 1]
    first.indices.append(0)
    assert len(subset) == 4


class Refusing:
    """A class whose constructor must not run when a file is loaded."""

    is_open = False

    def __init__(self) -> None:
        assert Refusing.is_open, "building runs no code of a class"
        self.content = 1


def test_building_an_object_runs_no_code_of_its_class(tmp_path: Path) -> None:
    def make() -> Any:
        Refusing.is_open = True
        owner = Owner(known=Refusing(), late=None)
        Refusing.is_open = False
        return owner

    owner = make()
    discovery = started(owner)
    Refusing.is_open = True
    owner.late = Refusing()
    Refusing.is_open = False
    owner.late.content = 5
    again = resumed(make, through_a_file(discovery.capture(), tmp_path / "state"))
    assert again.late.content == 5


@pytest.mark.shows("S68", "S76")
def test_another_structure_is_refused_before_anything_changes() -> None:
    owner = Owner(tally=Tally(), chosen=None, value=[0])
    discovery = started(owner)
    owner.chosen, owner.value[0], owner.tally.count = owner.tally, 1, 4
    state = discovery.capture()
    state["values"][""]["chosen"] = {"~": "ref", "name": "gone"}
    again = Owner(tally=Tally(), chosen=None, value=[0])
    with pytest.raises(StateError, match="chosen refers to gone"):
        started(again).restore(state)
    assert (again.tally.count, again.chosen, again.value) == (0, None, [0])
