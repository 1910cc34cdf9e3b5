"""Modules with ``get_extra_state``: what it returns is theirs, all other attributes count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.state.owners import (
    Owner,
    bits,
    changed,
    resumed,
    saved_attributes,
    started,
    through_a_file,
)


class Extra(nn.Module):
    """Tells of a counter, and has attributes that it does not tell of."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seen: list[int] = []
        self.scale = torch.ones(2)
        self.table = {"a": torch.zeros(2)}
        self.note = "none"
        self.run: Any = None

    def get_extra_state(self) -> Any:
        return {"count": self.count, "table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.table = state["count"], state["table"]

    def train_a_bit(self) -> None:
        self.count += 1
        self.seen.append(self.count)
        self.scale = self.scale * 3
        self.table["a"].add_(1)
        self.note = "trained"


def _make() -> Any:
    return Owner(net=nn.Sequential(nn.Linear(1, 1), Extra()))


def test_attributes_that_an_extra_state_leaves_out_come_back(
    tmp_path: Path, said: list[str]
) -> None:
    owner = _make()
    discovery = started(owner)
    assert changed(discovery) == {}
    owner.net[1].train_a_bit()
    state = through_a_file(discovery.capture(), tmp_path / "state")
    # The counter and the table are in the extra state itself.
    assert sorted(saved_attributes(state)) == ["net.1.note", "net.1.scale", "net.1.seen"]
    again = resumed(_make, state).net[1]
    assert (again.count, again.seen, again.note) == (1, [1], "trained")
    assert bits([again.scale, again.table]) == bits([owner.net[1].scale, owner.net[1].table])
    assert not said
