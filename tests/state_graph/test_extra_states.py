"""Modules with ``get_extra_state``: what it returns is theirs, all other attributes count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.state_graph.owners import Owner, bits, resumed, saved_attributes, started, through_a_file


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
    assert discovery.capture()["values"]["nodes"] == {}
    owner.net[1].train_a_bit()
    state = through_a_file(discovery.capture(), tmp_path / "state")
    # The counter and the table are in the extra state itself.
    saved = saved_attributes(state)
    assert sorted(saved["net.1"]) == ["note", "scale"]
    assert saved["net.1.seen"] == [1]
    again = resumed(_make, state).net[1]
    assert (again.count, again.seen, again.note) == (1, [1], "trained")
    assert bits([again.scale, again.table]) == bits([owner.net[1].scale, owner.net[1].table])
    assert not said


def test_a_copy_in_an_extra_state_is_not_saved_twice() -> None:
    class Copying(Extra):
        def get_extra_state(self) -> Any:
            return {"count": self.count, "table": {"a": self.table["a"].clone()}}

    owner = Owner(net=Copying())
    discovery = started(owner)
    owner.net.table["a"].add_(1)
    assert discovery.capture()["values"]["nodes"] == {}


class Odd(Extra):
    """Has something that no checkpoint holds, of which its extra state tells in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Any = iter(range(10))
        self.taken = 0

    def take(self) -> None:
        next(self.run)
        self.taken += 1

    def get_extra_state(self) -> Any:
        return torch.tensor([self.taken])

    def set_extra_state(self, state: Any) -> None:
        self.run, self.taken = iter(range(int(state), 10)), int(state)


@pytest.mark.parametrize("attribute", ["take", "run"])
def test_what_no_checkpoint_holds_is_left_to_an_extra_state_that_changes(
    attribute: str, said: list[str]
) -> None:
    owner = Owner(net=Odd())
    discovery = started(owner)
    owner.net.take() if attribute == "take" else next(owner.net.run)
    missing = discovery.capture()["missing"]
    assert list(missing) == ([] if attribute == "take" else ["net.run"])
    assert len(said) == len(missing)


def test_objects_of_a_module_with_an_extra_state_come_back(said: list[str]) -> None:
    def make() -> Any:
        owner = _make()
        owner.net[1].hidden = [nn.Linear(1, 1)]
        owner.net[1].generator = torch.Generator()
        return owner

    owner = make()
    discovery = started(owner)
    owner.net[1].hidden[0].weight.data.fill_(3)
    torch.rand(1, generator=owner.net[1].generator)
    again = resumed(make, discovery.capture()).net[1]
    assert bits(again.hidden[0].weight) == bits(owner.net[1].hidden[0].weight)
    draws = [torch.rand(1, generator=net.generator) for net in (again, owner.net[1])]
    assert bits(draws[0]) == bits(draws[1])
    assert not said
