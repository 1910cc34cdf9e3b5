"""What makes saves slow is named, and saved all the same: no clock decides what a file holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helios
from helios.state import TrainingState
from helios.state_graph.discovery import Allowance, Discovery
from helios.storage import codec
from tests.distributed.train_script import Module, parse
from tests.state_graph.owners import Owner, saved_attributes
from tests.storage.test_codes import is_same
from tests.support.clock import Hands
from tests.support.models import Fitting
from tests.support.ranks import run_ranks

"""A checkpoint of commit cdb25de, whose clock made it leave out the table."""


class Ticking:
    """A clock by which everything takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


_TAKES: dict[int, tuple[Hands, float]] = {}


class Slow(set[None]):
    """An object that takes its time to be looked at."""

    def __init__(self, clock: Hands, seconds: float) -> None:
        super().__init__()
        self.take(clock, seconds)

    def take(self, clock: Hands, seconds: float) -> None:
        # As attributes, they would be state that has changed.
        _TAKES[id(self)] = clock, seconds

    def __reduce__(self) -> Any:
        clock, seconds = _TAKES[id(self)]
        clock.time += seconds
        return Slow, (None, 0.0)


class Table(Fitting):
    """Adds a row to a table in each iteration, and measures its saves by a clock of its own."""

    unsaved = ("clock",)
    part = 1

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def setup(self, fast_init: bool = False) -> None:
        self.discovery.values = Allowance(clock=self.clock)
        super().setup(fast_init)
        self.table: list[tuple[int, Tensor]] = []

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.table.append((state.global_iteration, torch.ones(2)))


def fit(folder: Path, model: Table, total_steps: int = 8, **options: Any) -> Table:
    """Train a model; save it every second iteration."""
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=total_steps,
        chkpt_frequency=2,
        chkpt_root=folder,
        use_cpu=True,
        **options,
    )
    assert trainer.fit(model, Module(parse([])))
    return model


def _sidecars(folder: Path) -> list[dict[str, Any]]:
    sidecars = [json.loads(path.read_text()) for path in folder.glob("net/*_iter_*.json")]
    return sorted(sidecars, key=lambda sidecar: int(sidecar["iteration"]))


def _payloads(folder: Path) -> list[Any]:
    payloads = [codec.read(path) for path in sorted(folder.glob("net/*.pth"))]
    for payload in payloads:
        del payload["training_state"]["average_iter_time"]
    return payloads


def _timed(owner: object, clock: Callable[[], float], **options: Any) -> Discovery:
    discovery = Discovery(owner, **options)
    discovery.values = Allowance(clock=clock)
    discovery.take_baseline()
    return discovery


@pytest.mark.shows("S50", "S73")
def test_a_run_on_a_slow_clock_saves_what_a_fast_one_saves(tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    fit(slow, Table(Ticking(10.0)))
    fit(fast, Table(Ticking(0.0)))
    assert is_same(_payloads(slow), _payloads(fast))
    assert [each["missing"] for each in _sidecars(slow)] == [{}] * 4
    resumed = fit(slow, Table(Ticking(10.0)), 10)
    assert [number for number, _ in resumed.table] == list(range(1, 11))


def _run(rank: int, folder: Path, slow_rank: int) -> list[dict[str, str]]:
    fit(folder, Table(Ticking(10.0 * (rank == slow_rank))), num_replicas=2)
    return [each["missing"] for each in _sidecars(folder)]


@pytest.mark.shows("S73")
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_process_saves_all_as_well(slow_rank: int, tmp_path: Path) -> None:
    assert run_ranks(_run, 2, tmp_path, slow_rank) == [[{}] * 4] * 2


@pytest.mark.shows("S50")
def test_a_slow_attribute_is_named_once_with_its_seconds(said: list[str]) -> None:
    clock = Hands()
    owner = Owner(slow=Slow(clock, 0.2), quick=Slow(clock, 0.04), best=0)
    discovery = _timed(owner, clock)
    owner.best = 1
    for number in range(4):
        clock.time += 1
        state = discovery.capture()
        assert not state["missing"]
        assert saved_attributes(state) == {"best": 1}
        assert len(said) == (number > 0), "one slow look may be due to the machine"
    assert said == [
        "WARNING: Each save takes 0.2 s to inspect slow of the model. If a resumed run does not "
        'need it, declare that: unsaved = ("slow",).'
    ]
