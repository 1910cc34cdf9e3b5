"""What a trace puts back: attributes, containers, tensors and generators, all in place (C17)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helios.data import create_dataloader
from helios.data.keyed import data_sets_of
from helios.state_graph.rollback import Rollback
from tests.data.datasets import Indices


class Owner:
    """Any object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        """Do nothing."""


_CONTAINERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1, 2], lambda value: value.append(3)),
    "dict, other order": ({"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "set": ({1, 2}, lambda value: value.add(3)),
    "default": (defaultdict(list, a=[1]), lambda value: value["b"].append(2)),
    "array": (np.arange(3.0), lambda value: value.__iadd__(1)),
    "random": (random.Random(1), lambda value: value.random()),
    "torch": (torch.Generator().manual_seed(1), lambda value: torch.rand(1, generator=value)),
}


def show(value: Any) -> Any:
    """Return a text by which two states of a value can be told apart."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    return repr(value)


@pytest.mark.parametrize("case", _CONTAINERS)
def test_the_content_of_what_was_changed_in_place_comes_back(case: str) -> None:
    value, change = _CONTAINERS[case]
    owner = Owner(value=value, nested=[{"deep": (value,)}])
    before = show(value)
    trace = Rollback([owner])
    change(value)
    assert show(value) != before
    trace.put_back()
    assert show(value) == before
    assert owner.value is value
    assert owner.nested[0]["deep"][0] is value


@pytest.mark.shows("C17")
def test_attributes_come_back_go_away_and_keep_their_order() -> None:
    kept = [1]
    owner = Owner(count=1, name="a", items=kept)
    trace = Rollback([owner])
    owner.count += 1
    owner.items = [2]
    owner.added = "new"
    del owner.name
    trace.put_back()
    assert list(vars(owner).items()) == [("count", 1), ("name", "a"), ("items", [1])]
    assert owner.items is kept


_WAYS: dict[str, Callable[[Owner], Any]] = {
    "tuple": lambda found: (0, (found,)),
    "object": lambda found: Owner(inner=Owner(found=found)),
    "method": lambda found: found.method,
    "module": lambda found: _with(nn.Linear(1, 1), found),
}


def _with(holder: Any, found: Owner) -> Any:
    holder.found = found
    return holder


@pytest.mark.parametrize("way", _WAYS)
def test_objects_are_followed_wherever_they_lie(way: str) -> None:
    found = Owner(total=0.0, history=[])
    trace = Rollback([Owner(value=_WAYS[way](found))])
    found.total, found.other = 5.0, 1
    found.history.append(5.0)
    trace.put_back()
    assert vars(found) == {"total": 0.0, "history": []}


def test_parameters_and_buffers_of_all_kinds_come_back_in_place() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net.register_buffer("seen", torch.zeros(2), persistent=False)
    weights = {name: part.clone() for name, part in net.state_dict(keep_vars=True).items()}
    objects = dict(net.named_parameters())
    trace = Rollback([Owner(net=net)])
    with torch.no_grad():
        for part in (*net.parameters(), *net.buffers()):
            part.add_(1)
        net[0].weight.data = torch.zeros(7)
        net[0].bias.requires_grad_(False)
        net[0].bias.grad = torch.ones(3)
    net[1].running_mean = torch.ones(3)
    net[1].momentum = 0.9
    net.register_buffer("late", torch.ones(1))
    net.add_module("extra", nn.Linear(1, 1))
    net.register_forward_hook(lambda *args: None)
    net.eval()
    trace.put_back()
    assert dict(net.named_parameters()) == objects
    assert all(part.equal(weights[name]) for name, part in net.state_dict().items())
    assert net.seen.equal(torch.zeros(2))
    assert [name for name, _ in net.named_buffers()] == [
        *("seen", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
    ]
    assert net[1].momentum == 0.1
    assert net[0].bias.requires_grad
    assert net[0].bias.grad is None
    assert all(part.training for part in net.modules())
    assert not net._forward_hooks


def test_a_gradient_comes_back() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = grad = torch.ones(2)
    trace = Rollback([Owner(weight=weight)])
    weight.grad.zero_()
    weight.grad = None
    trace.put_back()
    assert weight.grad is grad
    assert grad.equal(torch.ones(2))


def test_views_and_overlaps_share_their_memory_afterwards() -> None:
    whole = torch.arange(6.0)
    owner = Owner(whole=whole, part=whole[2:4], wide=torch.ones(1).expand(4), bits=whole.int())
    trace = Rollback([owner])
    owner.part.zero_()
    owner.wide.untyped_storage().fill_(0)
    owner.bits += 1
    trace.put_back()
    assert whole.equal(torch.arange(6.0))
    assert owner.wide.equal(torch.ones(4))
    assert owner.bits.equal(torch.arange(6, dtype=torch.int32))
    owner.part[0] = 9
    assert whole[2] == 9


def test_optimizers_and_schedulers_come_back() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trace = Rollback([Owner(optimizer=optimizer, scheduler=scheduler)])
    weight.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    trace.put_back()
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0
    assert weight.equal(torch.ones(2))


class Draws(random.Random):
    """A generator that counts."""

    count = 0


def _function() -> None:
    """Do nothing."""


@pytest.mark.shows("C17")
@pytest.mark.parametrize("value", [Draws(1), _function])
def test_attributes_of_all_kinds_of_objects_come_back(value: Any) -> None:
    value.count = 1
    trace = Rollback([Owner(value=value)])
    value.count, value.other = 2, 3
    trace.put_back()
    assert value.count == 1
    assert not hasattr(value, "other")


def test_a_loader_comes_back_and_its_data_is_passed_over() -> None:
    data = [torch.zeros(1), torch.zeros(1)]
    generator = torch.Generator().manual_seed(3)
    foreign = DataLoader(data, shuffle=True, generator=generator)
    before = generator.get_state()
    ours, sampler = create_dataloader(Indices(4), shuffle=True)
    assert sampler is not None
    owners = [foreign, ours]
    trace = Rollback(owners, leaving=[data for each in owners for data in data_sets_of(each)])
    list(foreign)
    list(ours)
    sampler.set_epoch(3)
    data[0].add_(1)
    trace.put_back()
    assert generator.get_state().equal(before)
    assert sampler.epoch == 0
    assert data[0] == 1
