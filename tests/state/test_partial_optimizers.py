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

from tests.state.owners import Owner, bits, changed, started, through_a_file


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


_KINDS: list[Callable[..., Any]] = [
    *(Silent, SlowInState, Published, Unfinished),
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


def test_an_optimizer_with_torchs_own_state_dict_is_saved_once() -> None:
    owner = _make(torch.optim.SGD)
    discovery = started(owner)
    _train(owner, 1)
    assert changed(discovery) == {}


def test_moments_by_name_do_not_count_as_plain_values(said: list[str]) -> None:
    owner = _make(SlowInState)
    discovery = started(owner)
    discovery.limit = 16
    _train(owner, 1)
    assert discovery.capture()["missing"] == {}
    assert not said


def test_a_hook_says_what_the_state_of_an_optimizer_holds(tmp_path: Path) -> None:
    def make() -> Any:
        owner = _make(torch.optim.SGD)

        def drop(optimizer: Optimizer, state: dict[str, Any]) -> None:
            state["state"] = {}

        owner.optimizer.register_state_dict_post_hook(drop)
        return owner

    owner, again = make(), make()
    discovery = started(owner)
    _train(owner, 1)
    started(again).restore(through_a_file(discovery.capture(), tmp_path / "state"))
    for each in (owner, again):
        _train(each, 2)
    assert bits(again.net.state_dict()) == bits(owner.net.state_dict())
