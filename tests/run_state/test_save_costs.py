"""What saving a value takes is counted in all its parts, and all processes leave out the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.run_state import changes
from helios.run_state.changes import PlainValues
from helios.run_state.discovery import Discovery
from helios.run_state.plain_values import Identities
from helios.state import TrainingState
from tests.distributed.train_script import Module, parse
from tests.run_state.owners import Owner
from tests.run_state.test_limits import Slow
from tests.support.clock import Hands
from tests.support.models import Fitting
from tests.support.ranks import run_ranks


class Timed(Fitting):
    """Measures costs by a clock of its own, and takes a while to be looked at."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.hands = Hands()
        self.seconds = seconds

    unsaved = ("hands", "seconds")
    part = 1

    def setup(self, fast_init: bool = False) -> None:
        self.discovery.values = PlainValues(Identities(), clock=self.hands)
        super().setup(fast_init)
        self.slow = Slow(self.hands, self.seconds)
        self.table: list[tuple[int, torch.Tensor]] = []

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.table.append((state.global_iteration, torch.ones(2)))


def _fit(folder: Path, model: Timed, **options: Any) -> Timed:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=8,
        chkpt_frequency=2,
        chkpt_root=folder,
        use_cpu=True,
        **options,
    )
    assert trainer.fit(model, Module(parse([])))
    return model


def _missing(folder: Path) -> list[list[str]]:
    sidecars = [json.loads(path.read_text()) for path in folder.glob("net/*_iter_*.json")]
    return [sorted(each["missing"]) for each in sorted(sidecars, key=lambda s: s["iteration"])]


def test_what_encoding_takes_is_counted_for_the_value(tmp_path: Path) -> None:
    costs = _fit(tmp_path, Timed()).discovery.values.costs
    assert costs.seconds("table") > 0, "the clock of looks stands still"
    assert costs.seconds("slow") == 0, "it has no code"


def test_a_value_that_takes_too_long_to_be_encoded_is_left_out() -> None:
    clock = Hands()
    owner = Owner(table=[])
    discovery = Discovery(owner)
    discovery.values = PlainValues(Identities(), clock=clock)
    discovery.take_baseline()
    for number in range(4):
        clock.time += 1
        owner.table.append(number)
        state = discovery.capture()
        assert list(state["missing"]) == (["table"] if number > 1 else [])
        meters = discovery.values.meters
        assert list(meters) == [id(owner.table)] * (number < 2)
        for meter in meters.values():
            meter(0.2)


@dataclass
class Row:
    """A record, of which files hold a copy."""

    numbers: list[int]


def test_what_copying_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    owner = Owner(row=Row([1]), other=[0])
    discovery = Discovery(owner)
    discovery.values = PlainValues(Identities(), clock=clock)
    discovery.take_baseline()
    substitute = changes.substitute

    def slowly(*arguments: Any) -> Any:
        clock.time += 0.2
        return substitute(*arguments)

    monkeypatch.setattr(changes, "substitute", slowly)
    for number in range(3):
        clock.time += 1
        owner.row.numbers.append(number)
        owner.other.append(number)
        assert list(discovery.capture()["missing"]) == (["row"] if number > 1 else [])


def _run(rank: int, folder: Path, slow_rank: int) -> tuple[list[list[str]], int]:
    model = _fit(folder, Timed(0.2 * (rank == slow_rank)), num_replicas=2)
    return _missing(folder), model.slow.looks


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_all_processes_leave_out_what_is_too_slow_on_rank_0(slow_rank: int, tmp_path: Path) -> None:
    (first, looks), (second, others) = run_ranks(_run, 2, tmp_path, slow_rank)
    assert first == second
    assert first == [[], *[["slow"] if slow_rank == 0 else []] * 3]
    assert looks == others
