"""A kill between any two file operations leaves a run that goes on (USERS.md 2, H28)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.checkpoint import layout
from helios.checkpoint.store import CheckpointStore, RunFolder
from tests.checkpoint import kill_child
from tests.checkpoint.helpers import is_same, make_payload, names, save

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")

_ROOTS = (Path(helios.__file__ or "").parents[1], Path(__file__).parents[2])


def play(scene: str, root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", kill_child.__name__, scene, str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _ROOTS)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def committed(folder: Path) -> list[int]:
    return [path[1] for path in map(layout.parse, layout.find_checkpoints(folder)) if path]


def test_a_kill_before_or_after_any_operation_of_a_save_loses_no_committed_checkpoint(
    tmp_path: Path,
) -> None:
    result = play("save", tmp_path)
    assert result["status"] == 0
    assert set(result["names"]) == set(kill_child.OPERATIONS)
    assert len(result["codes"]) == 2 * len(result["names"]) > 100
    assert set(result["codes"].values()) == {-9}
    seen = set()
    for point in result["codes"]:
        root = tmp_path / point
        report = root / "report.txt"
        returned = [int(line) for line in report.read_text().split()] if report.exists() else []
        present = committed(root / "model")
        assert max(present, default=0) >= max(returned, default=0), point
        check_recovery(RunFolder(root / "model", CheckpointStore(keep_last=1)), present, point)
        seen.add(max(present, default=0))
    assert seen == {0, 1, 2, 3}


def check_recovery(folder: RunFolder, present: list[int], point: str) -> None:
    """What the next start does: it tidies, loads the newest in full, and goes on saving."""
    folder.clean()
    found = names(folder.path) if folder.path.exists() else []
    stems = {f"run_epoch_1_iter_{iteration}" for iteration in present}
    assert set(found) == {stem + end for stem in stems for end in (".pth", ".json")}, point
    loaded = folder.load_newest()
    if not present:
        assert loaded is None
    else:
        assert loaded is not None
        assert loaded.sidecar is not None, point
        assert is_same(loaded.payload, make_payload(1, max(present))), point
    for iteration in (max(present, default=0) + 1, 9):
        save(folder, 1, iteration)
    again = RunFolder(folder.path).load_newest()
    assert again is not None
    assert is_same(again.payload, make_payload(1, 9)), point


def test_a_kill_while_files_are_put_aside_never_brings_a_damaged_one_back(tmp_path: Path) -> None:
    result = play("repair", tmp_path)
    assert result["status"] == 0
    assert set(result["codes"].values()) == {-9}
    for point in result["codes"]:
        folder = RunFolder(tmp_path / point / "model")
        is_whole = (tmp_path / point / "report.txt").exists()
        present = committed(folder.path)
        folder.clean()
        if present in ([], [2]) or is_whole:
            continue
        loaded = folder.load_newest()
        assert loaded is not None, point
        assert is_same(loaded.payload, make_payload(1, max(committed(folder.path)))), point


def test_the_kills_cover_every_file_operation_that_changes_something() -> None:
    from helios.core import files

    public = {
        name
        for name, value in vars(files).items()
        if callable(value) and getattr(value, "__module__", "") == files.__name__
    }
    assert public - set(kill_child.OPERATIONS) == {"temporary_path", "truncate"}
