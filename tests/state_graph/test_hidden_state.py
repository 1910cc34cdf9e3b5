"""State beside what a value is: attributes of tensors, hooks and classes, slots, methods."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from helios.storage.checksums import tensor_sum
from tests.state_graph.owners import Owner, resumed, started, through_a_file


class LoudRandom(random.Random):
    """Counts its draws."""

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


def test_the_last_attribute_of_a_tensor_may_go() -> None:
    def make() -> Any:
        owner = Owner(value=torch.zeros(2))
        owner.value.note = 1
        return owner

    owner = make()
    discovery = started(owner)
    del owner.value.note
    assert vars(resumed(make, discovery.capture()).value) == {}


def test_a_generator_counts_on() -> None:
    owner = _of_a_generator()
    discovery = started(owner)
    owner.value.random()
    again = resumed(_of_a_generator, discovery.capture())
    assert (again.value.draws, again.value.random()) == (1, owner.value.random())


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


def test_reading_a_tensor_lends_its_memory_to_nobody() -> None:
    for tensor in (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0)):
        tensor_sum(tensor)
        tensor.resize_(10)


class Shy:
    """Answers no question about itself."""

    def __init__(self) -> None:
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name != "__class__":
            raise RuntimeError(name)
        return object.__getattribute__(self, name)


class Proxy:
    """Says that it is a dict."""

    def __init__(self) -> None:
        self.count = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dict


@pytest.mark.parametrize("kind", [Shy, Proxy])
def test_an_object_that_hides_what_it_is_comes_back(kind: Any, said: list[str]) -> None:
    owner = Owner(part=kind(), parts=[kind()])
    discovery = started(owner)
    owner.part.count, owner.parts[0].count = 1, 2
    again = resumed(lambda: Owner(part=kind(), parts=[kind()]), discovery.capture())
    assert (again.part.count, again.parts[0].count) == (1, 2)
    assert not said


class WithSlots(Owner):
    """An owner with an attribute that is not in its dict."""

    __slots__ = ("level",)


def test_an_owner_may_have_slots() -> None:
    owner = WithSlots(level=1)
    discovery = started(owner)
    owner.level = 2
    assert resumed(lambda: WithSlots(level=1), discovery.capture()).level == 2


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


class Warm:
    """Has a method that is the function of a scheduler."""

    def __init__(self) -> None:
        self.calls = 0

    def rate(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


def _scheduled() -> Any:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Owner(net=net, optimizer=optimizer, scheduler=LambdaLR(optimizer, Warm().rate))


def test_what_the_method_of_a_scheduler_counts_comes_back(said: list[str]) -> None:
    owner = _scheduled()
    discovery = started(owner)
    for _ in range(3):
        owner.optimizer.step()
        owner.scheduler.step()
    again = resumed(_scheduled, discovery.capture())
    assert again.scheduler.lr_lambdas[0].__self__.calls == 4
    assert not said


class Colour(Enum):
    """Members with an attribute."""

    RED = "red"
    BLUE = "blue"

    def __init__(self, name: str) -> None:
        self.weight = 1


class Rate:
    """A descriptor that keeps the values of all instances."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}


class Helper:
    """Counts in its class."""

    made = 0
    rate = Rate()

    def __init__(self) -> None:
        self.own = 0


class Celsius(np.ndarray[Any, Any]):
    """An array with an attribute."""


def _counted(owner: Any) -> None:
    Helper.made += 1


def _through_a_descriptor(owner: Any) -> None:
    Helper.rate.values[len(Helper.rate.values)] = 1


def _weighed(owner: Any) -> None:
    owner.colour.weight += 1


def _poked(owner: Any) -> None:
    owner.view[0] += 1


def _heated(owner: Any) -> None:
    owner.array.offset = 2


def _stepped_by_another(owner: Any) -> None:
    owner.optimizer.step = lambda: None


def _scheduled_by_another(owner: Any) -> None:
    owner.scheduler.lr_lambdas[0] = lambda step: 0.5


def _moved(owner: Any) -> None:
    owner.net._forward_hooks.move_to_end(next(iter(owner.net._forward_hooks)))


class Later(Owner):
    """What an owner becomes."""


def _changed(owner: Any) -> None:
    owner.__class__ = Later


@pytest.mark.shows("S51")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_counted, "class Helper.made"),
        (_through_a_descriptor, "class Helper.rate"),
        (_weighed, "class Colour.RED.weight"),
        (_poked, "view"),
        (_heated, "array"),
        (_stepped_by_another, "optimizer.step"),
        (_scheduled_by_another, "scheduler.lr_lambdas"),
        (_moved, "net (forward hook)"),
        (_changed, "__class__"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(
    change: Callable[[Any], None], name: str, said: list[str]
) -> None:
    owner = _scheduled()
    owner.helper, owner.colour = Helper(), Colour.RED
    owner.view, owner.array = memoryview(bytearray(3)), np.zeros(2).view(Celsius)
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


def test_another_function_leaves_that_of_setup_alone(said: list[str]) -> None:
    def make() -> Any:
        one = [1]
        return Owner(read=lambda: one)

    owner = make()
    discovery = started(owner)
    other = [2]
    owner.read = lambda: other
    state = discovery.capture()
    assert list(state["missing"]) == ["read"]
    assert resumed(make, state).read() == [1]
    assert len(said) == 1


def test_a_variable_of_a_closure_may_have_no_value() -> None:
    def make() -> Any:
        def read() -> int:
            return late

        def write(value: int) -> None:
            nonlocal late
            late = value

        def forget() -> None:
            nonlocal late
            del late

        late = 1
        return Owner(read=read, write=write, forget=forget)

    owner = make()
    discovery = started(owner)
    owner.forget()
    with pytest.raises(NameError):
        resumed(make, discovery.capture()).read()
    owner.write(3)
    assert resumed(make, discovery.capture()).read() == 3


def test_a_logger_is_told_by_its_name(said: list[str]) -> None:
    owner = Owner(log=logging.getLogger("told"))
    discovery = started(owner)
    owner.log.isEnabledFor(logging.INFO)  # the logger remembers the answer
    owner.log.addHandler(logging.NullHandler())
    assert discovery.capture()["missing"] == {}
    assert not said


def test_a_hook_that_takes_the_memory_of_another_one_is_named() -> None:
    owner = _scheduled()
    handle = owner.net.register_forward_hook(lambda *args: None)
    discovery = started(owner)
    for _ in range(20):
        handle.remove()
        handle = owner.net.register_forward_hook(lambda *args: None)
        assert list(discovery.capture()["missing"]) == ["net (forward hook)"]


def test_a_progress_bar_whose_closure_holds_a_proxy_of_it_is_no_iterator(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its thread would outlive the test.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    owner = Owner(bar=tqdm(total=5, file=io.StringIO()))
    discovery = started(owner)
    owner.bar.update()
    assert discovery.capture()["missing"] == {}
    assert not said


class Hooked:
    """Counts the calls of its network by a hook, which a validation takes away for a while."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 1)
        self.calls = 0
        self.handle = self.net.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def validate(self) -> None:
        self.handle.remove()
        self.net(torch.ones(2))
        self.handle = self.net.register_forward_hook(self.count)


def test_a_handle_removes_the_hook_that_it_removed(said: list[str]) -> None:
    owner = Hooked()
    discovery = started(owner)
    owner.validate()
    owner.net(torch.ones(2))
    again = resumed(Hooked, discovery.capture())
    for each in (owner, again):
        each.validate()
        each.net(torch.ones(2))
    assert (again.calls, len(again.net._forward_hooks)) == (owner.calls, 1) == (2, 1)
    assert not said


def test_a_handle_whose_hook_is_gone_is_named() -> None:
    owner = Hooked()
    discovery = started(owner)
    owner.handle.remove()
    assert {"handle", "net (forward hook)"} <= discovery.capture()["missing"].keys()


def test_what_hooks_of_a_module_hold_is_declared_with_the_module(said: list[str]) -> None:
    def make() -> Any:
        outputs: list[Any] = []
        net = nn.Sequential(nn.Linear(1, 1))
        net[0].register_forward_hook(lambda module, inputs, output: outputs.append(output))
        return Owner(net=net)

    for unsaved, lacking in (((), 1), (("net.0._forward_hooks",), 0)):
        owner = make()
        discovery = started(owner, unsaved=unsaved)
        owner.net(torch.ones(1))
        assert len(discovery.capture()["missing"]) == lacking
    assert len(said) == 1
