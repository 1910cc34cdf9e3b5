"""Types, shapes and memory formats that training changes, and buffers that come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helios.state.discovery import Discovery
from tests.state.owners import Owner, bits, started, through_a_file


class Net(nn.Module):
    """Has buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("queue", torch.zeros(1, 2))
        self.register_buffer("later", None)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))


def _make() -> Any:
    torch.manual_seed(3)
    net = Net()
    scale = nn.Parameter(torch.ones(2))
    return Owner(net=net, scale=scale, optimizer=torch.optim.Adam([*net.parameters(), scale]))


def _step(owner: Any) -> None:
    for number, part in enumerate(owner.optimizer.param_groups[0]["params"]):
        part.grad = torch.sin(part.detach() + number)
    owner.optimizer.step()


def _double(owner: Any) -> None:
    owner.net.double()
    for part, state in owner.optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(part.dtype)


def _resize(owner: Any) -> None:
    part = owner.net.empty
    part.data = torch.ones(3, 2)
    part.grad = None
    owner.optimizer.state.pop(part, None)


def _double_loose(owner: Any) -> None:
    owner.scale.data = owner.scale.data.double()
    owner.scale.grad = None
    owner.optimizer.state.pop(owner.scale, None)


def _delete(owner: Any) -> None:
    del owner.net.queue, owner.net.later


_FOURS = torch.full((2,), 4.0)
_CHANGES: dict[str, Callable[[Any], Any]] = {
    "double": _double,
    "half": lambda owner: owner.net.conv.to(torch.bfloat16),
    "channels last": lambda owner: owner.net.to(memory_format=torch.channels_last),
    "grow": lambda owner: setattr(owner.net, "queue", torch.ones(4, 2)),
    "fill": lambda owner: setattr(owner.net, "later", torch.arange(3)),
    "clear": lambda owner: setattr(owner.net, "queue", None),
    "register": lambda owner: owner.net.norm.register_buffer("seen", _FOURS),
    "register hidden": lambda owner: owner.net.norm.register_buffer(
        "seen", _FOURS, persistent=False
    ),
    "hide": lambda owner: owner.net.register_buffer("queue", torch.ones(1, 2), persistent=False),
    "show": lambda owner: owner.net.register_buffer("mean", torch.ones(2)),
    "delete": _delete,
    "resize": _resize,
    "double what is loose": _double_loose,
}


def _look(net: nn.Module) -> dict[str, Any]:
    """Return every tensor of a network with what it is besides its bits."""
    parameters = {name: (bits(part), part.stride()) for name, part in net.named_parameters()}
    buffers = {
        f"{place}.{key}": (
            None if buffer is None else (bits(buffer), buffer.stride()),
            key in part._non_persistent_buffers_set,
        )
        for place, part in net.named_modules()
        for key, buffer in part._buffers.items()
    }
    return {**parameters, **buffers}


@pytest.mark.shows("S59")
@pytest.mark.parametrize("name", _CHANGES)
def test_what_training_makes_of_tensors_is_resumed(
    name: str, tmp_path: Path, said: list[str]
) -> None:
    owner = _make()
    discovery = started(owner)
    _step(owner)
    _CHANGES[name](owner)
    if name != "half":
        _step(owner)
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    again = _make()
    held = list(again.net.parameters())
    other = started(again)
    other.restore(state)
    assert _look(again.net) == _look(owner.net)
    assert all(part is before for part, before in zip(again.net.parameters(), held, strict=True))
    assert bits(other.capture()) == bits(discovery.capture())
    if name != "half":
        for each in (owner, again):
            _step(each)
    assert _look(again.net) == _look(owner.net)
    moments = [[s["exp_avg"].stride() for s in o.optimizer.state.values()] for o in (owner, again)]
    assert moments[0] == moments[1]
    assert not said


def _of_type(dtype: torch.dtype) -> tuple[Any, Discovery]:
    owner = Owner(net=nn.Linear(2, 2).to(dtype), bias=nn.Parameter(torch.ones(1)))
    return owner, started(owner)


@pytest.mark.shows("S59")
def test_another_type_built_by_setup_is_named_and_the_values_are_cast(said: list[str]) -> None:
    owner, discovery = _of_type(torch.float32)
    again, other = _of_type(torch.float64)
    other.restore(discovery.capture())
    (text,) = said
    assert "net.weight, net.bias (torch.float32, now torch.float64)" in text
    assert again.net.weight.dtype == torch.float64
    assert bits(again.net.weight.float()) == bits(owner.net.weight)
