"""One run in stages, each with a larger total: the same script again goes on in the last one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import helios
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
