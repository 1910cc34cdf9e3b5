"""A real SIGKILL at every kind of moment, then the same command again (USERS.md 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tier
from tests.support.kills import (
    KillAt,
    KillAtFileOperation,
    outcome_of,
    run_in_child,
    train_in_child,
)
from tests.support.resume import assert_equal, assert_equal_ledgers
from tests.support.runs import Outcome, Setting, train

_SETTING = Setting(total_steps=9, chkpt_frequency=2, valid_frequency=4)

_EVENTS = (
    "on_training_batch_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_optimizer_step_end",
    "on_training_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_save_checkpoint",
    "on_training_epoch_end",
    "on_training_end",
    "teardown",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the undisturbed run."""
    return tmp_path_factory.mktemp("undisturbed") / "run"


@pytest.fixture(scope="module")
def whole(undisturbed: Path) -> Outcome:
    """Return the undisturbed run."""
    return train(undisturbed, _SETTING)


def _last_saved(folder: Path) -> int:
    return max((int(p.stem.split("_iter_")[1]) for p in folder.glob("*/*.pth")), default=0)


@pytest.mark.shows("L38", "S35", "U2", "P2")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("event", _EVENTS)
def test_a_kill_in_an_event_costs_no_bit(
    event: str, whole: Outcome, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    iteration = 0 if event in ("on_validation_end", "on_training_end", "teardown") else 5
    assert train_in_child(folder, _SETTING, KillAt(event, iteration)) == -9
    since = _last_saved(folder)
    assert train_in_child(folder, _SETTING) == 0
    resumed = outcome_of(folder)
    if resumed.has_ended:
        assert_equal(resumed, whole, since=since)
    else:
        assert event == "teardown"
    assert_equal_ledgers(folder, undisturbed)


# A kill after an operation leaves the files that a kill before the next one leaves.
@pytest.mark.shows("H28", "S34", "U2", "P2")
@pytest.mark.parametrize(
    "is_after",
    [pytest.param(False, id="before"), pytest.param(True, id="after", marks=pytest.mark.full)],
)
def test_a_kill_at_any_file_operation_costs_no_bit(
    is_after: bool, whole: Outcome, undisturbed: Path, tmp_path: Path
) -> None:
    # A save has ten operations: a stride of seven meets another one in each of the saves.
    stride = 1 if tier.is_full() else 7
    number, is_reached = 1 - stride, True
    while is_reached:
        number += stride
        folder = tmp_path / f"kill-{number}"

        def work(number: int = number, folder: Path = folder) -> Outcome:
            KillAtFileOperation(number, is_after=is_after).install()
            return train(folder, _SETTING)

        code = run_in_child(work, folder.with_suffix(".outcome"))
        assert code in (-9, 0)
        is_reached = code == -9
        since = _last_saved(folder)
        assert train_in_child(folder, _SETTING) == 0
        resumed = outcome_of(folder)
        if resumed.has_ended:
            assert_equal(resumed, whole, since=since)
        assert_equal_ledgers(folder, undisturbed)
    assert number > 25, "a run of five saves must have reached more file operations"
