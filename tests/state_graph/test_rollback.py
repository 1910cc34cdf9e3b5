"""What a trace puts back: attributes, containers, tensors and generators, all in place (C17)."""

from __future__ import annotations

import io
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helios.data import create_dataloader
from helios.data.keyed import data_sets_of
from helios.errors import UsageError
from helios.state_graph.rollback import Rollback
from tests.data.datasets import Indices


class Owner:
    """Any object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        """Do nothing."""


class Row(np.ndarray[Any, Any]):
    """An array with attributes."""


class Slotted:
    """Attributes without a dictionary."""

    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = [1]


class LoudDict(dict[Any, Any]):
    """A dictionary whose methods do more than they should."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, (value, "changed"))

    def clear(self) -> None:
        raise AssertionError("nobody asked for this")


_CONTAINERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1, 2], lambda value: value.append(3)),
    "list, shorter": ([1, 2], lambda value: value.pop()),
    "dict": ({"a": 1}, lambda value: value.update(b=2, a=5)),
    "dict, other order": ({"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "set": ({1, 2}, lambda value: value.add(3)),
    "deque": (deque([1, 2, 3], maxlen=3), lambda value: value.append(4)),
    "counter": (Counter("aab"), lambda value: value.update("abc")),
    "default": (defaultdict(list, a=[1]), lambda value: value["b"].append(2)),
    "ordered": (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "bytes": (bytearray(b"abc"), lambda value: value.extend(b"d")),
    "array": (np.arange(3.0), lambda value: value.__iadd__(1)),
    "array of objects": (np.array([[1], "a"], dtype=object), lambda value: value[0].append(2)),
    "loud": (LoudDict(a=1), lambda value: dict.__setitem__(value, "b", 2)),
    "random": (random.Random(1), lambda value: value.random()),
    "numpy": (np.random.default_rng(1), lambda value: value.random()),
    "legacy": (np.random.RandomState(1), lambda value: value.rand()),
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
    "dict": lambda found: {"loss": {"a": found}},
    "key": lambda found: {found: 1},
    "set": lambda found: {found},
    "frozenset": lambda found: frozenset([found]),
    "deque": lambda found: deque([found]),
    "array": lambda found: np.array([found], dtype=object),
    "object": lambda found: Owner(inner=Owner(found=found)),
    "method": lambda found: found.method,
    "partial": lambda found: partial(print, 1, partial(print, end=found)),
    "module": lambda found: _with(nn.Linear(1, 1), found),
    "tensor": lambda found: _with(torch.zeros(1), found),
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


def test_objects_that_refer_to_each_other_are_visited_once() -> None:
    first, second = Owner(count=0), Owner(count=0)
    first.other, second.other = second, first
    trace = Rollback([first])
    first.count = second.count = 3
    first.other = None
    trace.put_back()
    assert (first.count, second.count) == (0, 0)
    assert first.other is second


def test_slots_come_back() -> None:
    owner = Slotted()
    trace = Rollback([owner])
    owner.count.append(2)
    owner.unset = 1
    trace.put_back()
    assert owner.count == [1]
    assert not [name for name in ("unset",) if getattr(owner, name, None)]


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


def test_swapped_weights_come_back_where_they_were() -> None:
    weight, average = nn.Parameter(torch.ones(2)), torch.zeros(2)
    trace = Rollback([Owner(weight=weight, average=average)])
    weight.data, average.data = average.data, weight.data
    weight.data.add_(4)
    trace.put_back()
    assert weight.equal(torch.ones(2))
    assert average.equal(torch.zeros(2))


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


class Pair(tuple[int, ...]):
    """A tuple with attributes."""


def _function() -> None:
    """Do nothing."""


@pytest.mark.shows("C17")
@pytest.mark.parametrize(
    "value", [Draws(1), Pair((1, 2)), partial(print, 1), _function, np.zeros(2).view(Row)]
)
def test_attributes_of_all_kinds_of_objects_come_back(value: Any) -> None:
    value.count = 1
    trace = Rollback([Owner(value=value)])
    value.count, value.other = 2, 3
    trace.put_back()
    assert value.count == 1
    assert not hasattr(value, "other")


def test_the_factory_of_a_dict_comes_back() -> None:
    owner = Owner(value=defaultdict(list))
    trace = Rollback([owner])
    owner.value.default_factory = int
    trace.put_back()
    assert owner.value["a"] == []


def test_tensors_without_memory_of_their_own_come_back() -> None:
    sparse, empty = torch.eye(2).to_sparse(), torch.zeros(0, 3)
    trace = Rollback([Owner(sparse=sparse, empty=empty)])
    for _ in range(2):
        sparse.mul_(3)
        empty.resize_(2, 3)
        trace.put_back()
        assert sparse.to_dense().equal(torch.eye(2))
        assert empty.shape == (0, 3)


def test_what_is_to_be_left_is_left_however_it_is_reached() -> None:
    left = Owner(count=0)
    owner = Owner(left=left, others=[left])
    trace = Rollback([owner], leaving=[left])
    left.count = owner.left = 1
    trace.put_back()
    assert owner.left is left
    assert left.count == 1


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


def test_what_reaches_outside_is_left_alone() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.count = 0

    class Rows:
        def __init__(self) -> None:
            self.file = io.StringIO()
            self.count = 0

    owner = Owner(locked=Locked(), rows=Rows(), lock=threading.Lock(), count=0)
    trace = Rollback([owner])
    owner.locked.count = owner.rows.count = owner.count = 1
    owner.lock.acquire()
    trace.put_back()
    assert (owner.locked.count, owner.rows.count) == (1, 1)
    assert owner.count == 0
    assert owner.lock.locked()


def test_a_network_with_a_lock_comes_back_all_the_same() -> None:
    net = nn.Linear(1, 1)
    net.lock = threading.Lock()
    before = net.weight.detach().clone()
    trace = Rollback([Owner(net=net)])
    with torch.no_grad():
        net.weight.add_(1)
    trace.put_back()
    assert net.weight.equal(before)


def test_read_only_arrays_are_no_error() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    Rollback([Owner(array=array)]).put_back()


def test_lazy_networks_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy parameter"):
        Rollback([Owner(net=nn.LazyLinear(2))])


def test_erasing_twice_is_erasing_once_more() -> None:
    owner = Owner(items=[1])
    trace = Rollback([owner])
    for _ in range(2):
        owner.items.append(2)
        trace.put_back()
        assert owner.items == [1]


def test_a_storage_is_copied_once_however_many_views_it_has() -> None:
    whole = torch.zeros(1_000)
    trace = Rollback([Owner(views=[whole[i:] for i in range(50)])])
    copies = [
        part
        for restore in trace._restores
        if isinstance(restore, partial)
        for part in restore.args
        if isinstance(part, torch.Tensor) and part.dtype is torch.uint8
    ]
    assert sum(part.numel() for part in copies) == 2 * 4_000
