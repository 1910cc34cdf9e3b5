"""What an optimizer's own ``state_dict`` leaves out, or tells by address, comes back by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helios.state_graph.owner_states import Owner as Holder
from helios.state_graph.owner_states import Owners
from tests.state_graph.owners import Owner, bits, started, through_a_file


class Stateless(torch.optim.SGD):
    """Returns its settings alone."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": super().state_dict()["param_groups"]}


class Silent(torch.optim.SGD):
    """Returns nothing at all: neither momentum nor learning rates."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _hooked(params: Any, **options: Any) -> Optimizer:
    optimizer = torch.optim.SGD(params, **options)
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "state": {}})
    return optimizer


class SlowInState(Optimizer):
    """Lookahead with slow weights in its state, and the ``state_dict`` of the inner optimizer."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            for part in group["params"]:
                table = self.state[part]
                slow = table.setdefault("slow", part.detach().clone())
                slow.add_(part.detach() - slow, alpha=0.5)
                part.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Published(Optimizer):
    """Lookahead as it is published: no ``super().__init__()``, slow weights by address."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.optimizer = torch.optim.SGD(params, **options)
        self.k, self.alpha = 2, 0.5
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group: dict[str, Any]) -> None:
        for fast in group["params"]:
            table = self.state[fast]
            if "slow_param" not in table:
                table["slow_param"] = torch.zeros_like(fast.data)
                table["slow_param"].copy_(fast.data)
            slow = table["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        slow = {(id(k) if isinstance(k, Tensor) else k): v for k, v in self.state.items()}
        return {
            "fast_state": fast["state"],
            "slow_state": slow,
            "param_groups": fast["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["slow_state"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.fast_state = self.optimizer.state


class Unfinished(Optimizer):
    """Another one that is published: torch's ``state_dict``, tables of the inner optimizer."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.optimizer = torch.optim.SGD(params, **options)
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.slow = [part.detach().clone() for g in self.param_groups for part in g["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        fast = [part for group in self.param_groups for part in group["params"]]
        for slow, part in zip(self.slow, fast, strict=True):
            slow.add_(part.detach() - slow, alpha=0.5)
            # The state is that of the inner optimizer.
            part.data.copy_(slow).add_(self.state[part]["momentum_buffer"], alpha=0.01)


class Plain:
    """The published one without the base class of torch."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.optimizer = torch.optim.SGD(params, **options)
        self.param_groups = self.optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.fast_state = self.optimizer.state

    update = Published.update
    alpha = 0.5

    def step(self) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            self.update(group)  # type: ignore[arg-type, misc]
            for part in group["params"]:
                part.data.add_(self.fast_state[part]["momentum_buffer"], alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {
            "fast": self.optimizer.state_dict(),
            "slow": {(id(k) if isinstance(k, Tensor) else k): v for k, v in self.state.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.state = defaultdict(dict, state_dict["slow"])
        self.fast_state = self.optimizer.state


_KINDS: list[Callable[..., Any]] = [
    *(Stateless, Silent, _hooked, SlowInState, Published, Unfinished, Plain),
]


def _make(kind: Callable[..., Any]) -> Any:
    torch.manual_seed(2)
    net = nn.Linear(2, 3)
    return Owner(net=net, optimizer=kind(net.parameters(), lr=0.1, momentum=0.9))


def _groups(optimizer: Any) -> Any:
    return optimizer.param_groups


def _train(owner: Any, number: int) -> None:
    owner.net(torch.full((1, 2), float(number))).sin().sum().backward()
    owner.optimizer.step()
    owner.net.zero_grad()
    for group in _groups(owner.optimizer):
        group["lr"] *= 0.5


@pytest.mark.parametrize("kind", _KINDS)
def test_what_an_optimizer_leaves_out_resumes_to_the_same_bits(
    kind: Callable[..., Any], tmp_path: Path, said: list[str]
) -> None:
    owner = _make(kind)
    discovery = started(owner)
    for number in range(1, 4):
        _train(owner, number)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert state["missing"] == {}
    again = _make(kind)
    other = started(again)
    other.restore(state)
    for number in range(4, 7):
        _train(owner, number)
        _train(again, number)
        assert bits(again.net.state_dict()) == bits(owner.net.state_dict()), number
    # A second resume finds the same as the first.
    state = through_a_file(other.capture(), tmp_path / "second")
    third = _make(kind)
    started(third).restore(state)
    for number in range(7, 9):
        _train(owner, number)
        _train(third, number)
        assert bits(third.net.state_dict()) == bits(owner.net.state_dict()), number
    assert not said


@pytest.mark.parametrize("kind", [Published, Unfinished, Plain, SlowInState])
def test_tables_of_an_inner_optimizer_stay_those_of_the_wrapper(kind: Callable[..., Any]) -> None:
    owner = _make(kind)
    discovery = started(owner)
    _train(owner, 1)
    again = _make(kind)
    started(again).restore(discovery.capture())
    inner = again.optimizer.base if kind is SlowInState else again.optimizer.optimizer
    assert again.optimizer.param_groups is inner.param_groups
    if kind is Unfinished:
        assert again.optimizer.state is inner.state
    if kind in (Published, Plain):
        assert again.optimizer.fast_state is inner.state


def test_a_zero_gets_the_sign_that_it_had(tmp_path: Path) -> None:
    def make() -> Any:
        owner = _make(Silent)
        owner.optimizer.param_groups[0]["shift"] = 0.0
        owner.optimizer.state[owner.net.bias]["sums"] = torch.zeros(2)
        return owner

    owner = make()
    discovery = started(owner)
    owner.optimizer.param_groups[0]["shift"] = -0.0
    owner.optimizer.state[owner.net.bias]["sums"].neg_()
    again = make()
    started(again).restore(through_a_file(discovery.capture(), tmp_path / "state"))
    assert str(again.optimizer.param_groups[0]["shift"]) == "-0.0"
    assert again.optimizer.state[again.net.bias]["sums"].tolist() == [-0.0, -0.0]
    assert again.optimizer.state[again.net.bias]["sums"].signbit().all()


def test_states_larger_than_the_limit_of_plain_values_are_saved(said: list[str]) -> None:
    owner = _make(Published)
    discovery = started(owner)
    discovery.values.limit = 40
    _train(owner, 1)
    state = discovery.capture()
    assert state["missing"] == {}
    assert not said
    names = {entry[0] for entry in state["tables"]["optimizer"]["entries"]}
    assert names == {"<net.weight>", "<net.bias>"}


def test_an_optimizer_with_torchs_own_state_dict_is_saved_once() -> None:
    owner = _make(torch.optim.SGD)
    discovery = started(owner)
    _train(owner, 1)
    assert discovery.capture()["tables"] == {}


def test_an_entry_that_no_checkpoint_holds_is_named(said: list[str]) -> None:
    owner = _make(Stateless)
    discovery = started(owner)
    _train(owner, 1)
    owner.optimizer.state[owner.net.bias]["run"] = lambda: 1
    state = discovery.capture()
    assert list(state["missing"]) == ["optimizer.state.<net.bias>.run"]
    assert said


def test_a_model_with_its_own_state_has_what_its_optimizer_leaves_out(tmp_path: Path) -> None:
    def make() -> tuple[Any, Owners]:
        model = _make(SlowInState)
        owners = Owners([Holder("model", model, has_own_state=True, is_model=True)])
        owners.take_baseline()
        return model, owners

    def state_of(model: Any) -> dict[str, Any]:
        return {"net": model.net.state_dict(), "optimizer": model.optimizer.state_dict()}

    model, owners = make()
    for number in range(3):
        _train(model, number)
    states, missing = owners.capture({"model": state_of(model)})
    assert missing == {}
    own, states = through_a_file([state_of(model), states], tmp_path / "state")
    again, others = make()
    others.prepare(states)
    again.net.load_state_dict(own["net"])
    again.optimizer.load_state_dict(own["optimizer"])
    others.restore(states)
    for number in range(3, 6):
        _train(model, number)
        _train(again, number)
    assert bits(again.net.state_dict()) == bits(model.net.state_dict())
