"""What is said of files without loading them is what loading them would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.checkpoint import loading, status
from helios.checkpoint.loading import Condition, Depth
from helios.checkpoint.store import RunFolder
from helios.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint import hostile
from tests.checkpoint.helpers import save


@pytest.mark.shows("S27")
@pytest.mark.parametrize("name", hostile.CASES)
def test_a_file_is_called_what_loading_it_makes_of_it(name: str, tmp_path: Path) -> None:
    expected, make = hostile.CASES[name]
    path = tmp_path / "run" / hostile.NAME
    make(path)
    before = {part.name: part.read_bytes() for part in path.parent.iterdir()}
    found = status.examine(path, Depth.BYTES)
    assert found.condition.value == expected
    assert (not found.reason) == found.is_good
    if not found.is_good:
        assert str(path.with_suffix("")) in found.reason or path.name in found.reason
    assert {part.name: part.read_bytes() for part in path.parent.iterdir()} == before
    try:
        loading.load(path)
    except DamagedCheckpointError:
        assert found.condition is Condition.DAMAGED
    except CheckpointError:
        assert found.condition in (Condition.NEWER, Condition.UNMIGRATED, Condition.FOREIGN)
    else:
        assert found.is_good


def make_folder(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    for iteration in (1, 2, 3):
        save(run, 1, iteration)
    return run


def test_runs_below_a_folder_are_found_except_what_was_moved_aside(tmp_path: Path) -> None:
    make_folder(tmp_path / "b")
    run = make_folder(tmp_path / "a" / "deep")
    aside = run.move_aside()
    assert aside is not None
    save(run, 1, 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "epoch.pth").write_text("not ours")
    found = list(status.survey(tmp_path))
    assert [folder.path.relative_to(tmp_path).as_posix() for folder in found] == [
        "a/deep",
        "b",
    ]
    (moved,) = status.survey(aside)
    assert len(moved.files) == 3
