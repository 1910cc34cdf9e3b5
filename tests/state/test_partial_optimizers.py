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


class Silent(torch.optim.SGD):
    """Returns nothing at all: neither momentum nor learning rates."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Sam(Optimizer):
    """A sharpness-aware optimizer as people write it: the inner one's state is nobody's."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.num_ascents = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_ascents += 1
        self.base_optimizer.step()


class Lookahead:
    """Slow weights beside fast ones, with a ``state_dict`` that leaves the slow ones out."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.inner = torch.optim.SGD(params, **options)
        inner = self.inner
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]
        self.count = 0

    def step(self) -> None:
        self.inner.step()
        self.count += 1
        fast = [p for g in self.inner.param_groups for p in g["params"]]
        for slow, part in zip(self.slow, fast, strict=True):
            slow.add_(part.detach() - slow, alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


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


_KINDS: list[Callable[..., Any]] = [Silent, Published, Unfinished, Sam, Lookahead]


def _make(kind: Callable[..., Any]) -> Any:
    torch.manual_seed(2)
    net = nn.Linear(2, 3)
    return Owner(net=net, optimizer=kind(net.parameters(), lr=0.1, momentum=0.9))


def _train(owner: Any, number: int) -> None:
    owner.net(torch.full((1, 2), float(number))).sin().sum().backward()
    owner.optimizer.step()
    owner.net.zero_grad()
    for group in owner.optimizer.param_groups:
        group["lr"] *= 0.5


@pytest.mark.shows("S54")
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


@pytest.mark.shows("S54")
def test_an_optimizer_with_torchs_own_state_dict_is_saved_once() -> None:
    owner = _make(torch.optim.SGD)
    discovery = started(owner)
    _train(owner, 1)
    assert changed(discovery) == {}
