"""A loader's own state is tried on copies, and the run does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helios.core import rng
from helios.data.external_loader import compare_batches, try_state
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


def open_own(loader: Any) -> Source:
    return open_source(loader, run_seed=4, purpose=FETCH)


@pytest.mark.parametrize(
    ("loader", "verdict"),
    [
        (Counting(), True),
        (Counting(1), None),
        (Buffered(), False),
    ],
)
def test_a_state_is_kept_if_the_next_batch_comes_back(loader: Any, verdict: bool | None) -> None:
    assert try_state(open_own(loader)) is verdict
    assert try_state(limited(open_own(loader), 4)) is verdict


@pytest.mark.shows("S46")
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ({1, 2}, {1, 2}, True),
    ],
)
def test_batches_are_compared_on_bytes(left: Any, right: Any, expected: bool) -> None:
    assert compare_batches(left, right) is expected
