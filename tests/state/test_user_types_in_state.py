"""Enum members and dataclasses are saved by names, and built from types that setup knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum, Flag, IntEnum, IntFlag
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.state.owners import Owner, resumed, started, through_a_file


class Phase(Enum):
    WARM = "warm"
    MAIN = "main"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Parts(Flag):
    HEAD = 1
    BODY = 2
    TAIL = 4


class Bits(IntFlag):
    A = 1
    B = 8


@dataclasses.dataclass
class Stats:
    count: int = 0
    values: list[float] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WARM
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rate: float
    best: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise AssertionError("A constructor ran.")


_Make = Callable[[], Any]


def _resume(make: _Make, change: Callable[[Any], None], folder: Path) -> tuple[Any, Any]:
    owner = make()
    discovery = started(owner)
    change(owner)
    state = discovery.capture()
    assert not state["missing"]
    return owner, resumed(make, through_a_file(state, folder / "state.pth"))


@pytest.mark.shows("S68")
def test_enum_members_of_all_kinds_come_back_as_the_same_objects(tmp_path: Path) -> None:
    def make() -> Any:
        return Owner(phase=Phase.WARM, level=Level.LOW, parts=Parts.HEAD, bits=Bits.A, late=None)

    def change(owner: Any) -> None:
        owner.phase, owner.level = Phase.MAIN, Level.HIGH
        owner.parts, owner.bits = Parts.HEAD | Parts.TAIL, Bits(0)
        owner.late = {Phase.WARM: [Level.LOW]}

    _, again = _resume(make, change, tmp_path)
    assert (again.phase, again.level) == (Phase.MAIN, Level.HIGH)
    assert type(again.level) is Level
    assert again.parts is Parts.HEAD | Parts.TAIL
    assert again.bits is Bits(0)
    assert again.late == {Phase.WARM: [Level.LOW]}
    assert type(next(iter(again.late))) is Phase


@pytest.mark.shows("S68")
def test_a_dataclass_comes_back_with_its_fields_and_no_constructor_runs(tmp_path: Path) -> None:
    def make() -> Any:
        return Owner(stats=Stats(), frozen=Frozen(0.5))

    def change(owner: Any) -> None:
        owner.stats.count, owner.stats.made = 7, 3
        owner.stats.values.append(float("inf"))
        owner.stats.phase = Phase.MAIN
        owner.frozen = dataclasses.replace(owner.frozen, best=torch.ones(2))
        object.__setattr__(owner.frozen, "rate", 2.0)

    owner, again = _resume(make, change, tmp_path)
    assert again.stats == owner.stats
    assert again.stats is not owner.stats
    assert again.frozen.rate == 2.0
    assert again.frozen.best.tolist() == [1, 1]


@pytest.mark.shows("S68")
def test_a_member_found_late_of_an_unknown_type_is_named_with_the_remedy(said: list[str]) -> None:
    owner = Owner(phase=None)
    discovery = started(owner)
    owner.phase = Phase.MAIN
    state = discovery.capture()
    assert state["values"] == {}
    assert "types_for_safe_load()" in state["missing"]["phase"]
    assert "test_user_types_in_state.Phase" in said[0]
    discovery.safe_types = (Phase,)
    assert not discovery.capture()["missing"]


@pytest.mark.shows("S68")
def test_a_type_from_the_safe_types_is_enough(tmp_path: Path) -> None:
    def make(value: Any = None) -> tuple[Any, Any]:
        owner = Owner(stats=value)
        discovery = started(owner)
        discovery.safe_types = (Stats, Phase)
        return owner, discovery

    owner, discovery = make()
    owner.stats = Stats(3)
    state = through_a_file(discovery.capture(), tmp_path / "state.pth")
    again, other = make()
    other.restore(state)
    assert again.stats == Stats(3)
