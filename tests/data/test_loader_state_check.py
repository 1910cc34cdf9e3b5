"""A loader's own state is tried on copies, and the run does not notice."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helios.core import rng
from helios.data.loader_state_check import Verdict, compare_batches, try_state
from helios.data.phase_sources import open_source
from helios.data.source import Source
from tests.data.datasets import FETCH, limited


class Counting:
    """A loader whose state is all it needs; each batch draws from every generator."""

    def __init__(self, length: int = 6) -> None:
        self.length = length
        self.position = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            noise = [random.random(), np.random.rand(), torch.rand(2)]
            noise.append(rng.get_default_numpy_rng().generator.normal())
            yield {"number": torch.tensor(self.position), "noise": noise[2:]}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Buffered(Counting):
    """Reads two ahead, as a shuffle buffer does, and its state leaves the buffer out."""

    def __iter__(self) -> Iterator[Any]:
        waiting = []
        for batch in super().__iter__():
            waiting.append(batch["number"])
            if len(waiting) > 2:
                yield waiting.pop(0)
        yield from waiting


class Clock:
    """Stands still for some calls, then jumps by an hour."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def __call__(self) -> float:
        self.left -= 1
        return 0.0 if self.left >= 0 else 3600.0


def open_own(loader: Any) -> Source:
    return open_source(loader, run_seed=4, purpose=FETCH)


@pytest.mark.parametrize(
    ("loader", "verdict"),
    [
        (Counting(), Verdict.KEPT),
        (Counting(2), Verdict.KEPT),
        (Counting(1), Verdict.UNKNOWN),
        (Buffered(), Verdict.BROKEN),
    ],
)
def test_a_state_is_kept_if_the_next_batch_comes_back(loader: Any, verdict: Verdict) -> None:
    assert try_state(open_own(loader)) is verdict
    assert try_state(limited(open_own(loader), 4)) is verdict


@pytest.mark.shows("S46")
def test_a_trial_leaves_the_loader_and_all_generators_as_they_were() -> None:
    rng.seed_rngs(3)
    np.random.seed(3)
    loader = Counting()
    before = rng.get_rng_state_dict(), repr(np.random.get_state())
    generator = rng.get_default_numpy_rng().generator
    assert try_state(open_own(loader)) is Verdict.KEPT
    after = rng.get_rng_state_dict(), repr(np.random.get_state())
    assert torch.equal(before[0].pop("torch"), after[0].pop("torch"))
    assert before == after
    assert rng.get_default_numpy_rng().generator is generator
    assert vars(loader) == {"length": 6, "position": 0}


@pytest.mark.shows("S46")
@pytest.mark.parametrize("num_calls", range(8))
def test_a_trial_that_takes_more_than_two_seconds_says_nothing(num_calls: int) -> None:
    assert try_state(open_own(Buffered()), clock=Clock(num_calls + 1)) is Verdict.UNKNOWN


def test_a_trial_in_time_looks_at_the_clock_nine_times() -> None:
    clock = Clock(9)
    assert try_state(open_own(Buffered()), clock=clock) is Verdict.BROKEN
    assert clock.left == 0


def test_a_loader_that_cannot_be_copied_is_not_tried() -> None:
    loader = Buffered()
    loader.lock = threading.Lock()  # type: ignore[attr-defined]
    assert try_state(open_own(loader)) is Verdict.UNKNOWN


@pytest.mark.shows("S46")
@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_much_data_is_not_copied_for_a_trial(kind: Any) -> None:
    begun = []

    class Heavy(Buffered):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            begun.append("a copy")
            return self

    loader = Heavy()
    loader.data = {"rows": [kind(20 << 20)]}  # type: ignore[attr-defined]
    assert try_state(open_own(loader)) is Verdict.UNKNOWN
    assert begun == []


def test_an_error_on_the_copy_is_none_of_the_run() -> None:
    class Failing(Counting):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise OSError("gone")

    assert try_state(open_own(Failing())) is Verdict.UNKNOWN


class Item:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.shows("S46")
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array(["a"], dtype=object), np.array(["a"], dtype=object), True),
        ([1, "a"], [1, "a"], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({1, 2}, {1, 2}, True),
        ({1, 2}, {1, 3}, False),
        (deque([1]), deque([1]), True),
        (deque([1]), deque([2]), False),
        (0.0, -0.0, False),
        (Item([1]), Item([1]), True),
        (Item([1]), Item([2]), False),
        (Slotted([1]), Slotted([1]), True),
        (Slotted([1]), Slotted([2]), False),
    ],
)
def test_batches_are_compared_on_bytes(left: Any, right: Any, expected: bool) -> None:
    assert compare_batches(left, right) is (Verdict.KEPT if expected else Verdict.BROKEN)


def test_what_cannot_be_compared_is_not_judged() -> None:
    class Odd(Counting):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield (each for each in [batch])

    assert try_state(open_own(Odd())) is Verdict.UNKNOWN
