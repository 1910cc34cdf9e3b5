"""What a network's own ``state_dict`` leaves out is saved beside it once training changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.state.owners import Owner, bits, started, through_a_file


class Headed(nn.Module):
    """A frozen backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.body.requires_grad_(False)

    def forward(self, batch: Tensor) -> Any:
        return self.head(self.body(batch))


class OnlyHead(Headed):
    """Saves its head alone, as scripts do that load the backbone from a file of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for key in [key for key in state if ".body." in f".{key}"]:
            del state[key]
        return state


class OwnPair(OnlyHead):
    """Loads what it saves by a method of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


class Dropping(Headed):
    """A method that torch calls for each module, which leaves a parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}scale"]


def _hooked() -> nn.Module:
    def drop(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}body.")]:
            del state[key]

    net = Headed()
    net.register_state_dict_post_hook(drop)
    return net


def _prefixed() -> nn.Module:
    """Return a network that adds a prefix to all names, and takes it away when it loads."""

    def add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for key in list(state):
            state[f"{prefix}model.{key.removeprefix(prefix)}"] = state.pop(key)

    def remove(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}model.")]:
            state[prefix + key.removeprefix(f"{prefix}model.")] = state.pop(key)

    net = Headed()
    net.register_state_dict_post_hook(add)
    net.register_load_state_dict_pre_hook(remove)
    return net


def _train(owner: Any, number: int, *, all_of_it: bool = True) -> None:
    owner.net(torch.full((2, 2), float(number))).sum().backward()
    with torch.no_grad():
        for name, part in owner.net.named_parameters():
            if all_of_it or "head" in name:
                part.add_(torch.sin(part * number + number))
    owner.net.zero_grad()


_NETS: list[Callable[[], nn.Module]] = [OnlyHead, OwnPair, Dropping, _hooked, _prefixed]
_MAKERS = [*_NETS, lambda: nn.Sequential(OnlyHead(), nn.Linear(2, 1))]


@pytest.mark.parametrize("make", _MAKERS)
def test_what_a_network_leaves_out_resumes_to_the_same_bits(
    make: Callable[[], nn.Module], tmp_path: Path, said: list[str]
) -> None:
    owner = Owner(net=make())
    discovery = started(owner)
    for number in range(1, 4):
        _train(owner, number)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    again = Owner(net=make())
    other = started(again)
    other.restore(state)
    assert bits(dict(again.net.named_parameters())) == bits(dict(owner.net.named_parameters()))
    assert bits(other.capture()) == bits(discovery.capture())
    for number in range(4, 6):
        _train(owner, number)
        _train(again, number)
    assert bits(dict(again.net.named_parameters())) == bits(dict(owner.net.named_parameters()))
    assert bits(dict(again.net.named_buffers())) == bits(dict(owner.net.named_buffers()))
    assert not said


@pytest.mark.parametrize("make", [OnlyHead, _hooked])
def test_a_frozen_backbone_is_neither_saved_nor_named(
    make: Callable[[], nn.Module], tmp_path: Path, said: list[str]
) -> None:
    owner = Owner(net=make())
    owner.net.body.eval()
    discovery = started(owner)
    _train(owner, 1, all_of_it=False)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert not [name for name in state["omitted"].get("net", {}) if "body" in name]
    again = Owner(net=make())
    started(again).restore(state)
    assert bits(dict(again.net.named_parameters())) == bits(dict(owner.net.named_parameters()))
    assert not said
