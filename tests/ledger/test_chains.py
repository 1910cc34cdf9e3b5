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

from helios.ledger import verify
from helios.loops import YieldLoop
from helios.plugins import Plugin
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
from tests.support.kills import run_in_child
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
