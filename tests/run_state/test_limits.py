"""What is too large, or takes too long to be looked at, is named at every capture."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from helios.checkpoint.options import CheckpointStore
from helios.errors import ArgumentError
from helios.run_state.changes import PlainValues
from helios.run_state.discovery import Discovery
from helios.run_state.plain_values import LIMIT, Identities
from helios.run_state.save_costs import Costs
from tests.run_state.owners import Owner, changed, started
from tests.support.clock import Hands


class Slow:
    """An object that takes its time to be looked at."""

    def __init__(self, clock: Hands, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.looks = 0

    def __reduce__(self) -> Any:
        self.clock.time += self.seconds
        self.looks += 1
        return Slow, (None, 0.0)


def _timed(owner: object, clock: Hands) -> Discovery:
    discovery = Discovery(owner)
    discovery.values = PlainValues(Identities(), clock=clock)
    discovery.take_baseline()
    return discovery


def test_what_is_too_large_is_missing_at_every_capture_and_named_once(said: list[str]) -> None:
    owner = Owner(big=b"", helper=threading.Lock())
    discovery = started(owner)
    discovery.values.limit = 2**20
    owner.big, owner.helper = b"x" * 2**21, threading.Lock()
    for _ in range(3):
        missing = discovery.capture()["missing"]
        assert list(missing) == ["helper", "big"]
        assert missing["big"].startswith("plain values are saved up to a total of 1 MiB: register ")
        assert "lock" in missing["helper"]
    assert len(said) == 1
    owner.big, owner.helper = b"x", None
    assert not discovery.capture()["missing"]
    assert sorted(changed(discovery)) == ["big", "helper"]


@pytest.mark.parametrize(("limit", "text"), [(1000, "1000 bytes"), (3 << 19, "1.5 MiB")])
def test_a_limit_is_named_in_the_unit_that_suits_it(limit: int, text: str, said: list[str]) -> None:
    owner = Owner(big=b"")
    discovery = started(owner)
    discovery.values.limit = limit
    owner.big = b"x" * (limit + 1)
    expected = f"plain values are saved up to a total of {text}"
    assert discovery.capture()["missing"]["big"].startswith(f"{expected}: ")
    assert expected in said[0]


def test_the_limit_is_that_of_the_store() -> None:
    assert CheckpointStore().max_plain_bytes == LIMIT == 64 * 2**20
    with pytest.raises(ArgumentError, match=r"max_plain_bytes=.* must be a non-negative int"):
        CheckpointStore(max_plain_bytes=-1)
    with pytest.raises(ArgumentError, match="max_plain_bytes"):
        CheckpointStore(max_plain_bytes=1.5)  # type: ignore[arg-type]


def test_the_disk_estimate_counts_plain_values_up_to_the_limit() -> None:
    discovery = started(Owner(table=np.zeros(1000), helper=object()))
    assert 8000 <= discovery.values.num_bytes < 9000
    discovery.values.limit = 100
    assert discovery.values.num_bytes == 100


def test_a_place_that_is_slow_twice_is_named_and_no_longer_looked_at(said: list[str]) -> None:
    clock = Hands()
    slow = Slow(clock, 0.2)
    owner = Owner(slow=slow, quick=Slow(clock, 0.04), best=0)
    discovery = _timed(owner, clock)
    owner.best = 1
    clock.time += 1
    assert not discovery.capture()["missing"]
    for _ in range(3):
        clock.time += 1
        state = discovery.capture()
        assert state["missing"] == {
            "slow": "saving it takes 0.2 s, more than 5% of the time between saves: save less "
            "often, or give it state_dict() and load_state_dict()"
        }
        assert state["values"]["changed"] == {"": {"best": 1}}
    assert slow.looks == 2
    assert len(said) == 1
    assert "slow (saving it takes 0.2 s" in said[0]


def test_a_slow_place_is_looked_at_again_once_saves_are_rare_enough() -> None:
    clock = Hands()
    owner = Owner(slow=Slow(clock, 0.2))
    discovery = _timed(owner, clock)
    for seconds, expected in ((1, 0), (1, 1), (3.9, 1), (4.1, 0), (0.1, 0), (0.1, 0)):
        clock.time += seconds
        assert len(discovery.capture()["missing"]) == expected


def test_a_place_that_was_saved_is_given_up_only_when_it_gets_slower() -> None:
    clock = Hands()
    slow = Slow(clock, 0.01)
    discovery = _timed(Owner(slow=slow), clock)
    for seconds, expected in ((0.01, 0), (0.2, 0), (0.01, 0), (0.2, 0), (0.2, 0), (0.2, 1)):
        slow.seconds = seconds
        clock.time += 1
        assert len(discovery.capture()["missing"]) == expected


def test_all_that_lies_below_one_attribute_counts_together() -> None:
    clock = Hands()
    costs = Costs(clock)
    for _ in range(2):
        costs.begin()
        for _ in range(3):
            costs.add("table", 0.02)
        costs.end()
    assert list(costs.too_slow()) == ["table"]
