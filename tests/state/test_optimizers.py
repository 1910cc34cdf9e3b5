"""The state of an optimizer follows its parameters by name, whatever order setup gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from helios.errors import StateError
from helios.state.owners import Owner as Holder
from helios.state.owners import Owners
from tests.state.owners import Owner, bits, resumed, started, through_a_file

_NAMES = ["a", "b", "c"]


def _nets(order: list[str] = _NAMES) -> nn.ModuleDict:
    torch.manual_seed(4)
    nets = {name: nn.Linear(2, 2) for name in _NAMES}
    return nn.ModuleDict({name: nets[name] for name in order})


def _train(owner: Any, num_steps: int = 1) -> None:
    """Step every optimizer; each parameter has gradients of its own, in whatever order it is."""
    for _ in range(num_steps):
        parameters = dict(owner.nets.named_parameters())
        for number, name in enumerate(sorted(parameters), 1):
            parameters[name].grad = torch.sin(number * parameters[name].detach() + number)
        for optimizer in vars(owner).values():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step(None)


def _check(make: Callable[[], Any], remake: Callable[[], Any], path: Path) -> Any:
    """Resume in what another setup makes; both then train to the same bits."""
    owner = make()
    discovery = started(owner)
    _train(owner, 2)
    state = through_a_file(discovery.capture(), path / "state.pth")
    again = remake()
    other = started(again)
    other.restore(state)
    assert bits(other.capture()) == bits(discovery.capture())
    for each in (owner, again):
        _train(each)
    assert bits(dict(sorted(again.nets.state_dict().items()))) == bits(
        dict(sorted(owner.nets.state_dict().items()))
    )
    assert bits(other.capture()["objects"]["optimizer"]) == bits(
        discovery.capture()["objects"]["optimizer"]
    )
    return again


def _one_group(order: list[str], kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> Any:
    nets = _nets()
    parameters = [part for name in order for part in nets[name].parameters()]
    return Owner(nets=nets, optimizer=kind(parameters, lr=0.1))  # type: ignore[call-arg]


def _named(order: list[str]) -> Any:
    nets = _nets()
    named = [pair for name in order for pair in nets[name].named_parameters(prefix=f"my-{name}")]
    return Owner(nets=nets, optimizer=torch.optim.Adam(named, lr=0.1))


def _groups(order: list[str], **options: Any) -> Any:
    nets = _nets()
    groups = [{"params": nets[name].parameters(), "tag": name} for name in order]
    return Owner(nets=nets, optimizer=torch.optim.Adam(groups, lr=0.1), **options)


@pytest.mark.shows("S52")
@pytest.mark.parametrize("make", [_one_group, _named, _groups])
def test_an_optimizer_gets_the_order_that_was_saved(
    make: Callable[[list[str]], Any], tmp_path: Path
) -> None:
    again = _check(lambda: make(["a", "b", "c"]), lambda: make(["c", "a", "b"]), tmp_path)
    groups = again.optimizer.param_groups
    assert [id(part) for group in groups for part in group["params"]] == [
        id(part) for name in _NAMES for part in again.nets[name].parameters()
    ]


@pytest.mark.shows("S52")
def test_networks_that_are_built_in_another_order_keep_their_moments(tmp_path: Path) -> None:
    def make(order: list[str]) -> Any:
        nets = _nets(order)
        return Owner(nets=nets, optimizer=torch.optim.Adam(nets.parameters(), lr=0.1))

    owner, again = make(_NAMES), make(["b", "c", "a"])
    discovery = started(owner)
    _train(owner, 2)
    started(again).restore(discovery.capture())
    for each in (owner, again):
        _train(each)
    for name in _NAMES:
        assert bits(again.nets[name].state_dict()) == bits(owner.nets[name].state_dict())


def _replace(owner: Any) -> None:
    del owner.optimizer.state[owner.nets["a"].weight]
    owner.optimizer.param_groups[0]["params"][0] = owner.nets["c"].weight


def _split(owner: Any) -> None:
    part = owner.optimizer.param_groups[0]["params"].pop()
    owner.optimizer.add_param_group({"params": [part, owner.nets["c"].bias]})
    owner.optimizer.param_groups.reverse()


@pytest.mark.shows("S52")
@pytest.mark.parametrize("change", [_replace, _split])
@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]], ids=str)
def test_what_training_puts_into_other_groups_is_resumed(
    change: Callable[[Any], None], order: list[str], tmp_path: Path, said: list[str]
) -> None:
    owner = _groups(["a", "b"])
    discovery = started(owner)
    _train(owner)
    change(owner)
    _train(owner)
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    again = resumed(lambda: _groups(order), state)
    for each in (owner, again):
        _train(each)
    assert bits(again.optimizer.state_dict()) == bits(owner.optimizer.state_dict())
    assert bits(again.nets.state_dict()) == bits(owner.nets.state_dict())
    assert not said


def _exchanged(*, is_other: bool) -> Any:
    nets = _nets()
    one, other = (torch.optim.Adam(nets[name].parameters()) for name in "ab")
    return Owner(nets=nets, one=other if is_other else one, other=one if is_other else other)


@pytest.mark.shows("S52")
@pytest.mark.parametrize(
    ("make", "remake", "words"),
    [
        (
            lambda: _exchanged(is_other=False),
            lambda: _exchanged(is_other=True),
            r"one must .* not in it now: nets\.a\.bias, nets\.a\.weight\. .* saved: nets\.b\.bias",
        ),
        (
            lambda: _groups(["a", "b"]),
            lambda: _one_group(["a", "b"]),
            "in the same groups",
        ),
    ],
    ids=["exchanged", "other groups"],
)
def test_an_optimizer_of_other_parameters_is_refused_by_name(
    make: Callable[[], Any], remake: Callable[[], Any], words: str
) -> None:
    state = started(make()).capture()
    again = remake()
    discovery = started(again)
    before = bits(discovery.capture())
    with pytest.raises(StateError, match=words):
        discovery.restore(state)
    assert bits(discovery.capture()) == before


def _scheduled(order: list[str]) -> Any:
    owner = _exchanged(is_other=False)
    owner.schedulers = [ExponentialLR(vars(owner)[name], 0.5) for name in order]
    return owner


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    state = started(_scheduled(["one", "other"])).capture()
    assert state["drivers"] == {"schedulers.0": "one", "schedulers.1": "other"}
    with pytest.raises(
        StateError, match=r"schedulers\.0 must set the learning rates of one, .* other"
    ):
        resumed(lambda: _scheduled(["other", "one"]), state)


def _two(*, is_named: bool) -> Any:
    torch.manual_seed(4)
    owner = Owner(head=nn.Linear(2, 1), backbone=nn.Linear(2, 2))
    params = owner.head.named_parameters() if is_named else owner.head.parameters()
    owner.optimizer = torch.optim.Adam(params, lr=0.1)
    return owner


def _step_both(owner: Any) -> None:
    owner.optimizer.zero_grad()
    owner.head(owner.backbone(torch.ones(3, 2))).sum().backward()
    owner.optimizer.step()


@pytest.mark.parametrize("is_named", [False, True])
def test_groups_that_an_optimizer_got_in_training_are_resumed(
    is_named: bool, said: list[str]
) -> None:
    def make() -> Any:
        return _two(is_named=is_named)

    owner = make()
    discovery = started(owner)
    _step_both(owner)
    named = owner.backbone.named_parameters()
    for name, part in named:
        owner.optimizer.add_param_group(
            {"params": [(name, part)] if is_named else [part], "lr": 0.01, "tag": name}
        )
    _step_both(owner)
    state = copy.deepcopy(discovery.capture())
    head = ["head.weight", "head.bias"]
    assert state["members"] == {"optimizer": [head, ["backbone.weight"], ["backbone.bias"]]}
    assert state["built"] == {"optimizer": [head]}
    again = make()
    other = started(again)
    other.restore(state)
    assert bits(other.capture()) == bits(state)
    _step_both(owner)
    _step_both(again)
    assert bits(other.capture()) == bits(discovery.capture())
    assert not said


def _moments(nets: Any, optimizer: torch.optim.Optimizer) -> Any:
    return {name: bits(optimizer.state[part]) for name, part in sorted(nets.named_parameters())}


def test_an_optimizer_in_the_state_of_a_model_gets_the_order_that_was_saved(tmp_path: Path) -> None:
    def make(order: list[str]) -> tuple[Any, Owners]:
        model = _one_group(order)
        owners = Owners([Holder("model", model, has_own_state=True, is_model=True)])
        owners.take_baseline()
        return model, owners

    model, owners = make(["a", "b", "c"])
    _train(model, 2)
    own = {"nets": model.nets.state_dict(), "opt": model.optimizer.state_dict()}
    states, missing = owners.capture({"model": own})
    assert missing == {}
    own, states = through_a_file([own, states], tmp_path / "state")
    again, others = make(["c", "a", "b"])
    others.prepare(states)
    again.nets.load_state_dict(own["nets"])
    again.optimizer.load_state_dict(own["opt"])
    others.restore(states)
    assert _moments(again.nets, again.optimizer) == _moments(model.nets, model.optimizer)
    for each in (model, again):
        _train(each)
    assert bits(again.nets.state_dict()) == bits(model.nets.state_dict())
