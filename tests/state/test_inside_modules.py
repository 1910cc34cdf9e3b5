"""What ``state_dict`` of a module leaves out is treated as plain attributes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.state.owners import (
    Owner,
    bits,
    changed,
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


@pytest.mark.parametrize("declared", ["net.1", "net.1.count", "net"])
def test_paths_inside_modules_can_be_declared_as_unsaved(declared: str, said: list[str]) -> None:
    owner = Owner(net=nn.Sequential(nn.Linear(2, 2), Noisy()))
    discovery = started(owner, unsaved=(declared,))
    owner.net[1].count += 1
    assert changed(discovery) == {}
    owner.net[1].drop.p = 0.3
    assert [*changed(discovery)] == (["net.1.drop.p"] if declared == "net.1.count" else [])
    assert not said
