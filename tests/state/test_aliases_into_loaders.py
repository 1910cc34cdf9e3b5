"""What attributes, closures and wrappers hold of an object stays theirs when that object loads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tests.state.owners import Owner, bits, started, through_a_file


def _nets() -> nn.ModuleDict:
    torch.manual_seed(4)
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})


def _with(optimizer: Any, nets: nn.ModuleDict, **attributes: Any) -> Any:
    return Owner(nets=nets, optimizer=optimizer, **attributes)


def _two_groups(nets: nn.ModuleDict, kind: Callable[..., Any] = SGD) -> Any:
    return kind([{"params": nets[name].parameters(), "tag": name} for name in "ab"], lr=0.1)


# ---- of an optimizer


class KeepsGroups(LRScheduler):
    """Sets rates by the groups that it has kept."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.last = optimizer.param_groups[-1]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.groups]


def _groups() -> Any:
    nets = _nets()
    optimizer = _two_groups(nets)
    first, second = optimizer.param_groups
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    return _with(
        optimizer,
        nets,
        group=second,
        groups=optimizer.param_groups,
        copied=[*optimizer.param_groups],
        by_tag={"a": first, "b": second},
        scale=functools.partial(_scale, second),
        closure=lambda: _scale(second),
        keeper=KeepsGroups(optimizer),
        schedule=schedule,
        rates=schedule.base_lrs,
    )


def _scale(group: dict[str, Any]) -> None:
    group["lr"] *= 0.5


def _scale_all(owner: Any) -> None:
    """Scale by each that is held; the factors of two and three tell which one was another dict."""
    owner.rates[0] *= 0.5
    owner.schedule.step()
    owner.scale()
    owner.closure()
    for factor, group in enumerate(
        (
            *(owner.group, owner.groups[1], owner.copied[0], owner.copied[1]),
            *(owner.by_tag["a"], owner.by_tag["b"], owner.keeper.groups[0], owner.keeper.last),
        ),
        2,
    ):
        group["lr"] *= 1 + 1 / factor


def _no_group() -> Any:
    nets = _nets()
    return _with(_two_groups(nets), nets, spare=nn.Linear(2, 2), group=None)


def _add_group(owner: Any) -> None:
    if owner.group is None:
        owner.optimizer.add_param_group({"params": owner.spare.parameters(), "tag": "c"})
        owner.group = owner.optimizer.param_groups[2]
    _scale(owner.group)


def _moments_of_setup() -> Any:
    nets = _nets()
    optimizer = _two_groups(nets, Adagrad)
    sums = [state["sum"] for state in optimizer.state.values()]
    return _with(optimizer, nets, sums=sums, view=sums[0][0])


def _shrink_sums(owner: Any) -> None:
    for each in owner.sums:
        each.mul_(0.5)
    owner.view.add_(1)


def _moments_of_training() -> Any:
    nets = _nets()
    return _with(_two_groups(nets, Adam), nets, moments=None)


def _take_moments(owner: Any) -> None:
    if owner.moments is None:
        owner.moments = [state["exp_avg"] for state in owner.optimizer.state.values()]
    for each in owner.moments:
        each.mul_(0.5)


# ---- of wrappers


class Both(Optimizer):
    """Steps two optimizers, with torch's own ``state_dict``."""

    def __init__(self, one: Optimizer, other: Optimizer) -> None:
        super().__init__([p for o in (one, other) for p in o.param_groups[0]["params"]], {"lr": 1})
        self.one, self.other = one, other
        self.param_groups = [*one.param_groups, *other.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.one.step()
        self.other.step()


def _wrapper() -> Any:
    nets = _nets()
    inner = SGD(nets["a"].parameters(), lr=0.1, momentum=0.9), Adam(nets["b"].parameters())
    return _with(Both(*inner), nets)


def _halve_wrapped(owner: Any) -> None:
    for group in owner.optimizer.param_groups:
        group["lr"] *= 0.5


# ---- of what loads by itself


class Average:
    """Replaces its tensors, its list and its dict when it loads."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: part.detach().clone() for name, part in net.named_parameters()}
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        shadow = {name: part.clone() for name, part in self.shadow.items()}
        return {"shadow": shadow, "seen": [*self.seen]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow, self.seen = state_dict["shadow"], state_dict["seen"]


class Filled(Average):
    """Gets its tensors in training."""

    def __init__(self) -> None:
        super().__init__(nn.Module())

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "seen": self.seen}


def _filled() -> Any:
    nets = _nets()
    return _with(_two_groups(nets), nets, average=Filled(), weight=None, row=None)


def _fill(owner: Any) -> None:
    shadow = owner.average.shadow
    if not shadow:
        shadow["weight"] = owner.nets["a"].weight.detach().clone()
        owner.weight, owner.row = shadow["weight"], shadow["weight"][1]
    owner.weight.mul_(0.5)
    owner.row.add_(1)
    with torch.no_grad():
        owner.nets["a"].weight.add_(shadow["weight"])


def _average(*, is_first: bool) -> Callable[[], Any]:
    def make() -> Any:
        nets = _nets()
        average = Average(nets)
        weight = average.shadow["a.weight"]
        held = {"seen": average.seen, "weight": weight, "row": weight[1], "call": lambda: weight}
        name = "aaa" if is_first else "zzz"
        return _with(_two_groups(nets), nets, average=average, **{name: held})

    return make


def _use_average(owner: Any) -> None:
    held = vars(owner).get("aaa") or vars(owner)["zzz"]
    held["seen"].append(len(held["seen"]))
    held["weight"].mul_(0.5)
    held["row"].add_(1)
    held["call"]().add_(len(owner.average.seen))
    with torch.no_grad():
        owner.nets["a"].weight.add_(owner.average.shadow["a.weight"])


class Tells(nn.Module):
    """Has a list in its extra state, which loading replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[int] = []

    def get_extra_state(self) -> Any:
        return {"items": self.items}

    def set_extra_state(self, state: Any) -> None:
        self.items = state["items"]


def _extra() -> Any:
    nets = _nets()
    nets["tells"] = Tells()
    return _with(_two_groups(nets), nets, items=nets["tells"].items)


def _use_items(owner: Any) -> None:
    owner.items.append(len(owner.nets["tells"].items))
    with torch.no_grad():
        owner.nets["a"].weight.add_(sum(owner.nets["tells"].items))


_CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "groups": (_groups, _scale_all),
    "a group that training adds": (_no_group, _add_group),
    "moments of setup": (_moments_of_setup, _shrink_sums),
    "moments of training": (_moments_of_training, _take_moments),
    "a wrapper of two": (_wrapper, _halve_wrapped),
    "an average, held first": (_average(is_first=True), _use_average),
    "an average, held last": (_average(is_first=False), _use_average),
    "an average that training fills": (_filled, _fill),
    "a list in an extra state": (_extra, _use_items),
}


def _step(owner: Any, number: int, use: Callable[[Any], None]) -> None:
    for place, part in enumerate(owner.nets.parameters()):
        part.grad = torch.sin(number * part.detach() + place)
    owner.optimizer.step()
    use(owner)


def _bits_of(owner: Any) -> Any:
    return bits([owner.nets.state_dict(), owner.optimizer.state_dict()])


@pytest.mark.shows("S75")
@pytest.mark.parametrize("name", _CASES)
def test_what_is_held_of_a_loader_is_held_after_a_resume(
    name: str, tmp_path: Path, said: list[str]
) -> None:
    make, use = _CASES[name]
    owner = make()
    discovery = started(owner)
    for number in range(3):
        _step(owner, number, use)
    for resume in range(2):
        state = through_a_file(discovery.capture(), tmp_path / f"state{resume}")
        assert state["missing"] == {}
        again = make()
        other = started(again)
        other.restore(state)
        assert _bits_of(again) == _bits_of(owner)
        for number in range(3, 6):
            _step(owner, number, use)
            _step(again, number, use)
            assert _bits_of(again) == _bits_of(owner), number
        assert bits(other.capture()) == bits(discovery.capture())
        owner, discovery = again, other
    assert not said


class Renames(Average):
    """Keeps under another name what it has loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "seen": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow, self.latest = state_dict["shadow"], state_dict["seen"]
        del self.seen


@pytest.mark.shows("S75")
def test_what_cannot_be_linked_again_is_named(said: list[str]) -> None:
    def make() -> Any:
        nets = _nets()
        average = Renames(nets)
        return _with(_two_groups(nets), nets, average=average, seen=[average.seen])

    owner, again = make(), make()
    state = copy.deepcopy(started(owner).capture())
    discovery = started(again)
    discovery.restore(state)
    missing = discovery.capture()["missing"]
    assert "it refers to average.seen, which loading has replaced" in missing["seen"]
    assert "seen (it refers to average.seen" in "".join(said)
