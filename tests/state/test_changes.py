"""What training changed is state, what setup made is configuration."""

from __future__ import annotations

import copy
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import helios
from tests.state.owners import (
    Owner,
    bits,
    changed,
    network,
    resumed,
    saved_attributes,
    started,
    through_a_file,
)


class Opaque(bytearray):
    """An object without a state of its own, which is more than its attributes."""

    def __init__(self, content: Any = None) -> None:
        self.content = content


def test_configuration_may_be_edited_before_a_resume_and_state_wins_over_it() -> None:
    owner = Owner(rate=0.1, best=0.0)
    discovery = started(owner)
    owner.best = 0.7
    again = resumed(lambda: Owner(rate=0.2, best=0.3), discovery.capture())
    assert vars(again) == {"rate": 0.2, "best": 0.7}


def test_an_equal_value_built_again_is_no_change() -> None:
    def make() -> dict[str, Any]:
        tensor = torch.tensor([float("nan"), 0.0], dtype=torch.bfloat16)
        table = {"".join("x"): float("nan"), "names": ["".join("ab"), "".join("ab")]}
        return {"table": table, "tensor": tensor, "array": np.arange(6).reshape(2, 3).T}

    owner = Owner(**make())
    discovery = started(owner)
    vars(owner).update(make())
    assert changed(discovery) == {}


def test_every_plain_kind_comes_back_through_a_file(tmp_path: Path) -> None:
    values = {
        "number": 3,
        "text": "x",
        "array": np.arange(3.0),
        "scalar": np.float32(2),
        "queue": deque([1, 2], maxlen=4),
        "missing": defaultdict(list, a=[1]),
        "counter": Counter("ab"),
        "path": Path("a"),
        "members": {1, 2},
        "nested": [1, (2, {"a": [3]})],
    }
    owner = Owner(**dict.fromkeys(values))
    discovery = started(owner)
    vars(owner).update(values)
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    again = vars(resumed(lambda: Owner(**dict.fromkeys(values)), state))
    assert again.pop("array").tolist() == values.pop("array").tolist()
    assert again == values
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in values.items()
    }


def test_attributes_that_training_made_or_deleted_are_state() -> None:
    owner = Owner(warmup=3, table={"a": 1})
    discovery = started(owner)
    del owner.warmup
    owner.late = [1]
    again = resumed(lambda: Owner(warmup=3, table={"a": 1}), discovery.capture())
    assert vars(again) == {"table": {"a": 1}, "late": [1]}


def test_two_names_of_one_list_are_two_names_of_one_list_after_a_resume(tmp_path: Path) -> None:
    def make() -> Any:
        history: list[int] = []
        return Owner(history=history, alias=history, log={"h": history}, other=[])

    owner = make()
    discovery = started(owner)
    owner.history.append(1)
    again = resumed(make, through_a_file(discovery.capture(), tmp_path / "state.pth"))
    assert again.history == [1]
    assert again.alias is again.history
    assert again.log["h"] is again.history
    assert again.other == []


def test_views_of_parameters_and_buffers_are_neither_saved_nor_named(said: list[str]) -> None:
    net = network()
    owner = Owner(net=net, first=net[0].weight, rows=[net[0].weight.detach()[1:]])
    owner.mean, owner.all = net[1].running_mean, list(net.parameters())
    discovery = started(owner)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(1)
    net.requires_grad_(False)
    assert changed(discovery) == {}
    net.double().float()  # moves the bytes of parameters and buffers elsewhere
    owner.all, owner.first = list(net.parameters()), net[0].weight
    owner.mean, owner.rows = net[1].running_mean, [net[0].weight.detach()[1:]]
    assert changed(discovery) == {}
    assert not said


def _mixed() -> Any:
    net, other = network(), network()
    stuff = {"net": net, "count": 0, 5: "five", "deep": {"net": net, "rate": 1.0}}
    nets = [other, 0, [1]]
    return Owner(stuff=stuff, nets=nets, pair=(other, 0, {"net": net, "inner": 0}))


def test_plain_members_beside_networks_come_back_in_place(tmp_path: Path) -> None:
    owner = _mixed()
    discovery = started(owner)
    owner.stuff["count"] = 7
    owner.stuff[6] = "six"
    owner.stuff["deep"]["rate"] = 2.0
    owner.nets[1] = 3
    owner.nets[2].append(2)
    owner.nets.append("new")
    owner.pair[2]["inner"] = 4
    del owner.stuff[5]
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    assert sorted(state["values"][""]) == ["nets", "pair", "stuff"]
    again = _mixed()
    containers = again.stuff, again.nets, again.stuff["net"]
    started(again).restore(state)
    assert (again.stuff, again.nets, again.stuff["net"]) == containers
    assert again.stuff is containers[0]
    assert again.stuff["count"] == 7
    assert 5 not in again.stuff
    assert again.stuff[6] == "six"
    assert again.stuff["deep"]["rate"] == 2.0
    assert again.nets[1:] == [3, [1, 2], "new"]
    assert again.pair[1:] == (0, {"net": again.stuff["net"], "inner": 4})


def test_what_cannot_be_saved_is_named_once_in_one_warning_with_the_remedy(
    said: list[str],
) -> None:
    owner = Owner(helper=Opaque(1), lock=threading.Lock(), call=len, quiet=Opaque(2))
    discovery = started(owner, name="critic")
    discovery.capture()
    assert not said
    owner.helper.content = 2
    owner.lock = threading.Lock()
    owner.loss = (torch.zeros(1, requires_grad=True) * 2).sum()
    assert changed(discovery) == {}
    assert len(said) == 1
    assert said[0].startswith("WARNING: The state of the critic")
    assert "loss (it holds a tensor with a computation graph: detach() it)" in said[0]
    assert 'unsaved = ("helper", "lock", "loss",)' in said[0]
    assert "state_dict()" in said[0]
    owner.helper.content = 3
    discovery.capture()
    assert len(said) == 1
    owner.call = max
    discovery.capture()
    assert len(said) == 2
    assert "call (" in said[1]
    assert "helper" not in said[1]


class Holder:
    def __init__(self, content: Any = None) -> None:
        self.content = content


@pytest.mark.parametrize(
    "hide", [Holder, lambda net: {"in": {"a": Holder((net,))}}, lambda net: deque([net])]
)
def test_a_network_inside_of_an_object_comes_back(hide: Any, said: list[str]) -> None:
    def make() -> Any:
        content = nn.Linear(2, 2)
        return Owner(hidden=hide(content), idle=hide(nn.Linear(2, 2))), content

    owner, content = make()
    discovery = started(owner)
    discovery.capture()
    with torch.no_grad():
        content.weight.add_(1)
    other, again = make()
    started(other).restore(discovery.capture())
    assert bits(again.state_dict()) == bits(content.state_dict())
    assert not said


def test_unsaved_attributes_and_paths_are_neither_saved_nor_named(said: list[str]) -> None:
    def make(**options: Any) -> Any:
        owner = Owner(cache=Opaque(), stuff={"count": 0, "cache": Opaque(), "best": 0})
        owner.teacher, owner.part = network(), Holder(0)
        owner.part.best = 0
        unsaved = ("cache", "stuff.cache", "stuff.count", "teacher", "late", "part.content")
        return owner, started(owner, unsaved=unsaved, **options)

    owner, discovery = make()
    owner.cache.content = owner.stuff["cache"].content = 1
    owner.stuff["count"], owner.stuff["best"], owner.late = 5, 6, 7
    owner.part.content, owner.part.best = 5, 6
    state = discovery.capture()
    assert saved_attributes(state)["stuff"]["best"] == 6
    assert (not state["objects"], said) == (True, [])
    again, other = make()
    state["values"][""]["late"] = 1
    other.restore(state)
    assert again.stuff["count"] == 0
    assert again.stuff["best"] == 6
    assert (again.part.content, again.part.best) == (0, 6)
    assert "late" not in vars(again)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_values_return_to_the_device_that_they_were_on(tmp_path: Path) -> None:
    def make() -> Any:
        net = nn.Linear(2, 2).cuda()
        return Owner(net=net, optimizer=torch.optim.Adam(net.parameters()), late=None)

    owner = make()
    discovery = started(owner)
    owner.net(torch.ones(1, 2, device="cuda")).sum().backward()
    owner.optimizer.step()
    owner.late = {"a": [torch.ones(2, device="cuda")], "b": torch.zeros(1)}
    owner.same = owner.late["a"][0]
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    again = resumed(make, state)
    assert again.same is again.late["a"][0]
    assert (again.same.device.type, again.late["b"].device.type) == ("cuda", "cpu")
    assert again.net.weight.grad.device.type == "cuda"
    assert bits(again.net.weight.cpu()) == bits(owner.net.weight.cpu())


def _train_first(owner: Any) -> None:
    owner.best = 1.5
    owner.net[0].is_open = True
    del owner.warm
    del owner.table["left"]


def _make_untrained() -> Owner:
    net = network()
    net[0].is_open = False
    return Owner(best=None, warm=True, table={"left": 1, "kept": 2}, net=net)


def test_what_a_checkpoint_held_as_changed_is_in_the_next_one_too() -> None:
    """A second fit of the same object finds it changed since before its setup."""
    owner = _make_untrained()
    discovery = started(owner)
    discovery.begin_training()
    _train_first(owner)
    first = copy.deepcopy(discovery.capture())
    discovery.take_baseline()
    discovery.restore(first)
    second = copy.deepcopy(discovery.capture())
    assert second["values"] == first["values"]
    assert saved_attributes(first) == {
        "best": 1.5,
        "table": {"kept": 2},
        "net.0.is_open": True,
    }
    fresh = resumed(_make_untrained, second)
    assert (fresh.best, fresh.table, fresh.net[0].is_open) == (1.5, {"kept": 2}, True)
    assert "warm" not in vars(fresh)


@pytest.mark.shows("S61")
def test_a_write_through_data_is_seen_whatever_the_size() -> None:
    """A version counter does not see it, as of queues of keys and hand-written averages."""
    plain, kept, hidden = torch.zeros(2**20), torch.zeros(2**20), nn.Linear(1024, 1024)
    owner = Owner(queue=plain, queues=[kept], average=Opaque(hidden), idle=torch.zeros(2**20))
    discovery = started(owner)
    plain.data[7] = 1.0
    kept.data[8] = 1.0
    hidden.weight.data[9] = 1.0
    state = discovery.capture()
    assert sorted(saved_attributes(state)) == ["queue", "queues"]
    assert list(state["missing"]) == ["average"]


def _nested(innermost: list[Any]) -> list[Any]:
    for _ in range(3000):
        innermost = [innermost]
    return innermost


def _innermost(nested: list[Any]) -> list[Any]:
    while isinstance(nested[0], list):
        nested = nested[0]
    return nested


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (defaultdict(lambda: [0, 0], {"cat": [0, 0]}), lambda table: table["cat"].append(1)),
        ([defaultdict(lambda: 0, {"cat": 0}), threading.Lock()], lambda pair: pair[0].clear()),
        ({torch.zeros(3)}, lambda bag: next(iter(bag)).add_(1)),
        (np.ma.array([1, 2], mask=[0, 0]), lambda array: array.__setitem__(0, np.ma.masked)),
        (_nested([0]), lambda nested: _innermost(nested).append(1)),
        (_nested([torch.zeros(2)]), lambda nested: _innermost(nested)[0].add_(1)),
    ],
)
def test_a_change_within_what_no_checkpoint_can_hold_is_named(
    made: Any, change: Callable[[Any], Any]
) -> None:
    owner = Owner(stats=made)
    discovery = started(owner)
    assert not discovery.capture()["missing"]
    change(owner.stats)
    assert any(path.startswith("stats") for path in discovery.capture()["missing"])


class Helper:
    """An object that counts, and refers to a part of Helios."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.count = trainer, 0


def test_an_object_keeps_the_part_of_helios_to_which_it_refers(tmp_path: Path) -> None:
    trainer = helios.Trainer(use_cpu=True)
    owner = Owner(helper=Helper(trainer))
    discovery = started(owner)
    owner.helper.count = 3
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = resumed(lambda: Owner(helper=Helper(trainer)), state)
    assert (again.helper.trainer, again.helper.count) == (trainer, 3)
