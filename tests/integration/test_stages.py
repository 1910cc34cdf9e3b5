"""One run in stages, each with a larger total: the same script again goes on in the last one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.checkpoint.store import RunFolder
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.kills import KillAt, run_in_child
from tests.support.runs import Outcome, Setting, train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")

_STAGES = {"iteration": (4, 8, 14), "epoch": (1, 2, 4)}
_KILLS = {"iteration": 12, "epoch": 20}


def _setting(unit: str, total: int, **changes: Any) -> Setting:
    # In time, so that the kill finds the checkpoint before it committed.
    store = helios.CheckpointStore(is_async=False)
    options = {"store": store}
    return Setting(unit=unit, total_steps=total, valid_frequency=1, options=options, **changes)


def _train_in_stages(folder: Path, unit: str, kill: KillAt | None = None) -> list[Outcome]:
    *before, last = _STAGES[unit]
    stages = [train(folder, _setting(unit, total)) for total in before]
    kills = [] if kill is None else [kill]
    return [*stages, train(folder, _setting(unit, last), *kills)]


def _finished(folder: Path) -> dict[str, str | None]:
    sidecars = [json.loads(path.read_text()) for path in (folder / "small").glob("*_iter_*.json")]
    return {sidecar["iteration"]: sidecar["finished"] for sidecar in sidecars}


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_kill_in_the_last_stage_costs_no_bit(unit: str, tmp_path: Path) -> None:
    whole = _train_in_stages(tmp_path / "whole", unit)[-1]
    assert whole.records

    def killed() -> Any:
        return _train_in_stages(tmp_path / "run", unit, KillAt("on_backward_end", _KILLS[unit]))

    assert run_in_child(killed, tmp_path / "outcome") == -9
    stages = _train_in_stages(tmp_path / "run", unit)
    assert [bool(stage.records) for stage in stages] == [False, False, True]
    last = stages[-1]
    begun = min(last.records)
    assert last.records == {n: seen for n, seen in whole.records.items() if n >= begun}
    assert last.bits() == whole.bits()
    assert _finished(tmp_path / "run") == _finished(tmp_path / "whole")


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_only_the_last_stage_of_a_finished_script_warns_that_nothing_is_to_do(
    unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train_in_stages(tmp_path, unit)
    capsys.readouterr()
    assert not any(stage.records for stage in _train_in_stages(tmp_path, unit))
    said = [line for line in capsys.readouterr().err.splitlines() if "Nothing to do" in line]
    assert [("INFO" in line, "WARNING" in line) for line in said] == [
        *[(True, False)] * 2,
        (False, True),
    ]


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_total_that_the_run_has_passed_finishes_nothing(unit: str, tmp_path: Path) -> None:
    first, _, last = _STAGES[unit]

    def killed() -> Any:
        kill = KillAt("on_backward_end", _KILLS[unit])
        return train(tmp_path / "run", _setting(unit, last), kill)

    assert run_in_child(killed, tmp_path / "outcome") == -9
    before = _finished(tmp_path / "run")
    assert not train(tmp_path / "run", _setting(unit, first)).records
    assert _finished(tmp_path / "run") == before
    assert set(before.values()) == {None}


def test_a_patience_that_the_run_has_passed_finishes_nothing(tmp_path: Path) -> None:
    def patient(cycles: int | None) -> Setting:
        return _setting("iteration", 40, early_stop_cycles=cycles)

    whole = train(tmp_path / "whole", patient(3))
    end = max(whole.records)

    def killed() -> Any:
        return train(tmp_path / "run", patient(3), KillAt("on_backward_end", end))

    assert run_in_child(killed, tmp_path / "outcome") == -9
    assert not train(tmp_path / "run", patient(1)).records
    last = train(tmp_path / "run", patient(3))
    assert last.records == {end: whole.records[end]}
    assert last.bits() == whole.bits()


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_mark_that_a_smaller_total_has_left_in_mid_run_does_not_count(
    unit: str, tmp_path: Path
) -> None:
    """Earlier versions let a start with a smaller total finish the run for good."""
    last = _STAGES[unit][-1]

    def killed() -> Any:
        kill = KillAt("on_backward_end", _KILLS[unit])
        return train(tmp_path / "run", _setting(unit, last), kill)

    assert run_in_child(killed, tmp_path / "outcome") == -9
    newest = helios.find_last_checkpoint(tmp_path / "run" / "small")
    assert newest is not None
    folder = RunFolder(newest.parent)
    folder.mark_finished(newest, "total_steps reached")
    assert train(tmp_path / "run", _setting(unit, last)).records


def test_a_stop_on_request_counts_whatever_its_reason_sounds_like(tmp_path: Path) -> None:
    class Asker(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            if state.global_iteration == 5:
                self.trainer.request_stop("no improvement in 2 validations")

    train(tmp_path, _setting("iteration", 14), Asker("asker"))
    assert _finished(tmp_path)[5] == "no improvement in 2 validations"
    assert not train(tmp_path, _setting("iteration", 14), Asker("asker")).records


def test_a_run_that_is_finished_stays_so_for_smaller_totals(tmp_path: Path) -> None:
    train(tmp_path, _setting("iteration", 8))
    marked = _finished(tmp_path)
    for total in (8, 4, 8):
        assert not train(tmp_path, _setting("iteration", total)).records
    assert _finished(tmp_path) == marked == marked | {8: "total_steps reached"}
