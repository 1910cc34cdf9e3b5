"""What ``state_dict`` of a module leaves out is treated as plain attributes are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.state.owners import (
    Owner,
    bits,
    changed,
    resumed,
    saved_attributes,
    started,
    through_a_file,
)


class Noisy(nn.Module):
    """A module with all kinds of state beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.scale = torch.ones(2)
        self.history: list[Tensor] = []
        self.register_buffer("mask", torch.zeros(3), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(2)

    def train_a_bit(self) -> None:
        self.count += 1
        self.scale = self.scale * 3
        self.history.append(torch.full((1,), 5.0))
        self.get_buffer("mask").add_(2)
        self.late = torch.ones(1)
        self.drop.p = 0.4
        self.norm.momentum = 0.01


def _nested() -> Any:
    return Owner(nets=[nn.Sequential(nn.Linear(2, 2), Noisy())])


def test_what_training_changed_inside_a_module_comes_back(tmp_path: Path, said: list[str]) -> None:
    owner = _nested()
    discovery = started(owner)
    assert changed(discovery) == {}
    owner.nets[0][1].train_a_bit()
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert sorted(saved_attributes(state)) == [
        f"nets.0.1.{name}"
        for name in ("count", "drop.p", "history", "late", "mask", "norm.momentum", "scale")
    ]
    again = _nested()
    other = started(again)
    other.restore(state)
    noisy = again.nets[0][1]
    assert (noisy.count, noisy.drop.p, noisy.norm.momentum) == (1, 0.4, 0.01)
    assert bits([noisy.scale, noisy.history]) == bits(
        [torch.full((2,), 3.0), [torch.tensor([5.0])]]
    )
    assert bits(dict(noisy.named_buffers(recurse=False))) == bits(
        {"mask": torch.full((3,), 2.0), "late": torch.ones(1)}
    )
    assert not {"mask", "late"} & noisy.state_dict().keys()
    assert bits(other.capture()) == bits(state)
    assert not said


def test_what_was_removed_from_a_module_stays_removed() -> None:
    owner = _nested()
    discovery = started(owner)
    del owner.nets[0][1].count, owner.nets[0][1].mask
    again = resumed(_nested, discovery.capture()).nets[0][1]
    assert "count" not in vars(again)
    assert "mask" not in dict(again.named_buffers())


def test_what_cannot_be_saved_inside_a_module_is_named(said: list[str]) -> None:
    owner = _nested()
    discovery = started(owner)
    owner.nets[0][1].state = torch.ones(1, requires_grad=True) * 2
    discovery.capture()
    state = discovery.capture()
    (text,) = said
    assert "nets.0.1.state (it holds a tensor with a computation graph" in text
    assert list(state["missing"]) == ["nets.0.1.state"]


@pytest.mark.parametrize("declared", ["net.1", "net.1.count", "net"])
def test_paths_inside_modules_can_be_declared_as_unsaved(declared: str, said: list[str]) -> None:
    owner = Owner(net=nn.Sequential(nn.Linear(2, 2), Noisy()))
    discovery = started(owner, unsaved=(declared,))
    owner.net[1].count += 1
    assert changed(discovery) == {}
    owner.net[1].drop.p = 0.3
    assert [*changed(discovery)] == (["net.1.drop.p"] if declared == "net.1.count" else [])
    assert not said


def _old(wrap: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net: nn.Module = getattr(nn.utils, wrap)(nn.Linear(3, 2))
    return net


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


_PRUNED = prune.l1_unstructured  # type: ignore[attr-defined]
_KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 2, num_layers=2, batch_first=True),
    "old weight_norm": lambda: _old("weight_norm"),
    "old spectral_norm": lambda: _old("spectral_norm"),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "pruned": lambda: _PRUNED(nn.Linear(3, 2), "weight", amount=0.5),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()),
    "tied": _tied,
    "compiled": lambda: torch.compile(nn.Linear(3, 2), backend="eager"),  # type: ignore
    "traced": lambda: torch.fx.symbolic_trace(nn.Linear(3, 2)),
    "data parallel": lambda: nn.DataParallel(nn.Linear(3, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True),
    "quantisation stubs": lambda: torch.ao.quantization.QuantWrapper(nn.Linear(3, 2)),
}


def _forward(net: nn.Module, number: int) -> None:
    result = net(torch.full((4, 1, 3) if isinstance(net, nn.LSTM) else (4, 3), float(number)))
    (result[0] if isinstance(result, tuple) else result).sum().backward()


@pytest.mark.parametrize("name", _KINDS)
def test_modules_of_torch_train_and_resume_without_a_word(name: str, said: list[str]) -> None:
    def make() -> Any:
        torch.manual_seed(2)
        return Owner(net=_KINDS[name]())

    owner = make()
    discovery = started(owner)
    for number in range(3):
        _forward(owner.net, number)
        state = discovery.capture()
    again = make()
    other = started(again)
    other.restore(state)
    assert bits(other.capture()) == bits(state)
    _forward(owner.net, 3)
    _forward(again.net, 3)
    assert bits(other.capture()) == bits(discovery.capture())
    assert not said
