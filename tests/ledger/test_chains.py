"""Chains of starts that are killed, signalled or short of disk: one ledger and one end.

The places are drawn by a seed. The full tier disturbs each run twenty times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - optimizers import it: once here, not in every child

from helios.ledger import diff, verify
from helios.loops import YieldLoop
from helios.plugins import Plugin
from tests.distributed.test_elastic import run
from tests.engines.test_scaler import SMALL, Planted
from tests.integration.test_yield_loop import Gan, Samples
from tests.loops.recorded import record
from tests.support import tier
from tests.support.disturbed import (
    KINDS,
    MOST_STEPS,
    SIGNAL,
    Disturb,
    draw,
    draw_store,
    newest_iteration,
    vary,
)
from tests.support.elastic import Elastic, assert_same, read_bits
from tests.support.kills import run_in_child
from tests.support.ranks import RankError
from tests.support.resume import assert_equal, assert_equal_ledgers
from tests.support.runs import Outcome, Setting, train

NUM_STARTS = 20 if tier.is_full() else 4
STEPS = NUM_STARTS * MOST_STEPS + 4
_EPOCHS = {"unit": "epoch", "scheduler": "epoch", "valid_frequency": 1, "requests": True}

SETTINGS = {
    "steps": Setting(total_steps=STEPS),
    "windows": Setting(total_steps=STEPS, accumulation=2),
    "epochs": Setting(total_steps=STEPS // 3 + 1, accumulation=2, **_EPOCHS),
    "manual": Setting(total_steps=STEPS, is_manual=True),
    "overflows": Setting(total_steps=STEPS, options={"precision": SMALL}),
}


def _train_gan(folder: Path, *plugins: Plugin, **options: Any) -> Outcome:
    def connect(trainer: Any) -> None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())

    options |= {"total_steps": STEPS, "train_unit": "iteration", "random_seed": 7}
    return record(folder, Gan(), Samples(), *plugins, prepare=connect, **options)


@pytest.mark.shows("P41")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*SETTINGS, "two optimizers that yield"])
def test_a_chain_of_disturbed_starts_leaves_the_ledger_of_an_undisturbed_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(name)
    if name == "overflows":
        monkeypatch.setattr("tests.support.runs.SmallModel", Planted)

    def start(folder: Path, *plugins: Plugin) -> Outcome:
        if name in SETTINGS:
            return train(folder, vary(SETTINGS[name], chance), *plugins)
        return _train_gan(folder, *plugins, store=draw_store(chance))

    whole = start(tmp_path / "whole")
    folder = tmp_path / "chain"
    kinds = {_disturb(folder, start, chance) for _ in range(NUM_STARTS)}
    assert not tier.is_full() or kinds == set(KINDS)
    since = newest_iteration(folder)
    assert 0 < since < len(whole.records), "a start was not disturbed before its end"
    assert_equal(start(folder), whole, since=since)
    assert_equal_ledgers(folder, tmp_path / "whole")
    assert verify(folder).is_good


def _disturb(folder: Path, start: Callable[..., Outcome], chance: random.Random) -> str:
    """Start once in a child, and disturb it; returns how."""
    disturbance = draw(chance)
    # The child draws from a copy.
    chance.random()
    code = run_in_child(lambda: start(folder, Disturb(disturbance)), folder.with_suffix(".outcome"))
    # It comes after the end of a run, too.
    assert code == -9 or (disturbance.kind == SIGNAL and code in (0, 75))
    return disturbance.kind


@pytest.mark.full
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_ledger_is_the_same_on_any_number_of_processes(unit: str, tmp_path: Path) -> None:
    """Four processes, two, one and three, of which each start but the last is disturbed."""
    chance = random.Random(unit)
    setting = Elastic(
        num_replicas=4,
        unit=unit,
        total_steps=STEPS if unit == "iteration" else STEPS // 2,
        accumulation=2,
    )
    run(tmp_path / "alone", 1, setting)
    folder = tmp_path / "several"
    for num_processes in (4, 2, 1, 3) * (NUM_STARTS // 4):
        _disturb_processes(folder, num_processes, setting, chance)
    assert not verify(folder).has_ended, "a start was not disturbed before its end"
    run(folder, 3, setting)
    assert_same(read_bits(folder), read_bits(tmp_path / "alone"))
    assert diff(folder, tmp_path / "alone").is_equal


def _disturb_processes(
    folder: Path, num_processes: int, setting: Elastic, chance: random.Random
) -> None:
    """Start several processes once, and disturb one of them."""
    disturbance, errors = draw(chance, num_processes), []
    try:
        run(folder, num_processes, vary(setting, chance), Disturb(disturbance))
    except RankError as error:
        errors.append(str(error))
    assert all("-9" in text for text in errors)
    assert errors or disturbance.kind == SIGNAL
