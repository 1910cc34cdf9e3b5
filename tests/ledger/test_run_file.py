"""The lineage: events of a run, whatever happens while they are written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from helios.ledger import run_file
from helios.ledger.run_file import FILE_NAME, RunFile, read_run_file
from helios.storage import files
from tests.support.warned import collect_warnings


def test_events_are_read_in_their_order(tmp_path: Path) -> None:
    events = RunFile(tmp_path / "run")
    events.add(run_file.START, iteration=0, checkpoint=None)
    RunFile(tmp_path / "run").add(run_file.END, cause="total_steps reached")
    first, second = read_run_file(tmp_path / "run")
    assert {"event": "start", "iteration": 0}.items() <= first.items()
    assert "checkpoint" not in first
    assert second["cause"] == "total_steps reached"


def test_without_a_file_there_are_no_events(tmp_path: Path) -> None:
    assert list(read_run_file(tmp_path)) == []


def test_a_line_that_a_kill_has_cut_off_costs_only_itself(tmp_path: Path) -> None:
    events = RunFile(tmp_path)
    for event in ("start", "save"):
        events.add(event)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    events.add("resume")
    assert [each["event"] for each in read_run_file(tmp_path)] == ["start", "resume"]


def test_a_disk_that_refuses_an_event_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    events = RunFile(tmp_path)
    with monkeypatch.context() as patch, collect_warnings() as said:
        patch.setattr(files, "write", refuse)
        events.add("start")
        events.add("save")
    assert len(said) == 1
    assert "No space left" in said[0]
    events.add("end")
    assert [each["event"] for each in read_run_file(tmp_path)] == ["end"]
