"""Stored points: what a resumed run repeats stays as it was, and another course is another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helios.errors import FolderInUseError, UsageError
from helios.storage import files
from helios.storage.folder_lock import FolderLock
from helios.tracking.point_store import WRITER_LOCK_NAME, PointStore
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from tests.support.kills import run_in_child

_TARGET = {"kind": "MLflow", "uri": "u"}


def _open(
    folder: Path,
    mark: dict[str, Any] | None = None,
    *,
    forks: bool | None = None,
    params: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
) -> PointStore:
    run = TrackedRun("", "small", target or _TARGET, params or {}, created=1)
    found = PointStore(TrackerFolder(folder), run, forks=mark is None if forks is None else forks)
    found.open(mark)
    return found


def _row(iteration: int, value: Any = 0.5, *, time: int = 0) -> dict[str, Any]:
    return {"time": time, "epoch": 1, "iteration": iteration, "values": {"loss": value}}


def _stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]


def _write(folder: Path, numbers: range, *, marked: int = 0) -> tuple[str, dict[str, Any]]:
    """Store rows, and return the key of the run and the mark after the row ``marked``."""
    store = _open(folder)
    mark = store.mark()
    for number in numbers:
        store.add(_row(number, number / 10, time=number))
        if number == marked:
            mark = store.mark()
    store.close("killed")
    return store.run.key, mark


def another_process_is_refused(folder: Path) -> bool:
    """Try to write to the folder in another process."""

    def write() -> None:
        with pytest.raises(FolderInUseError):
            FolderLock(folder, name=WRITER_LOCK_NAME).acquire()

    return run_in_child(write, folder.parent / "outcome") == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tracker"


@pytest.mark.shows("P63")
def test_repeated_rows_keep_the_times_that_were_sent(folder: Path) -> None:
    key, mark = _write(folder, range(1, 6), marked=2)
    before = (folder / "points.jsonl").read_bytes()
    store = _open(folder, mark)
    for number in range(3, 8):
        assert not store.add(_row(number, number / 10, time=100 + number))
        assert (folder / "points.jsonl").read_bytes().startswith(before)
    assert [row["time"] for row in _stored(folder)] == [1, 2, 3, 4, 5, 106, 107]
    assert store.run.key == key
    store.close("finished")


def test_a_mark_among_repeated_rows_is_that_of_the_repeated_ones(folder: Path) -> None:
    _, mark = _write(folder, range(1, 6), marked=2)
    store = _open(folder, mark)
    store.add(_row(3, 0.3, time=9))
    mark = store.mark()
    store.close("killed")
    store = _open(folder, mark)
    store.add(_row(4, 0.4, time=9))
    assert [row["time"] for row in _stored(folder)] == [1, 2, 3, 4, 5]
    store.close("killed")


@pytest.mark.shows("P63")
@pytest.mark.parametrize("left", [b"", b"\n", bytes(99), b"{}\n", b"3\n", b"\0\n{}\n"])
def test_a_row_that_a_kill_has_cut_off_is_written_again(left: bytes, folder: Path) -> None:
    _, mark = _write(folder, range(1, 4), marked=1)
    path = folder / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-7] + left)
    store = _open(folder, mark)
    for number in (2, 3):
        store.add(_row(number, number / 10, time=7))
    store.close("killed")
    assert [(row["iteration"], row["time"]) for row in _stored(folder)] == [(1, 1), (2, 2), (3, 7)]


def test_a_start_without_a_checkpoint_repeats_the_same_run(folder: Path) -> None:
    key, _ = _write(folder, range(1, 4))
    store = _open(folder)
    for number in range(1, 5):
        assert not store.add(_row(number, number / 10, time=50))
    assert [row["time"] for row in _stored(folder)] == [1, 2, 3, 50]
    assert store.run.key == key
    store.close("finished")


@pytest.mark.parametrize("value", [0.0, "NaN", 0.2000000000000001, 2])
def test_another_value_in_a_plain_resume_stays_the_first_one_and_is_said_once(
    value: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, mark = _write(folder, range(1, 5), marked=1)
    store = _open(folder, mark)
    for number in (2, 3):
        assert not store.add(_row(number, value))
    store.close("killed")
    assert [row["values"]["loss"] for row in _stored(folder)] == [0.1, 0.2, 0.3, 0.4]
    assert store.run.key == key
    (message,) = caplog.messages
    assert "differ from those that were sent, first at iteration 2" in message


def test_signs_of_zero_are_values(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = _open(folder)
    store.add(_row(1, 0.0))
    store.close("killed")
    store = _open(folder, forks=False)
    store.add(_row(1, -0.0))
    store.close("killed")
    assert "differ from those that were sent" in caplog.text


@pytest.mark.shows("P66")
@pytest.mark.parametrize(("iteration", "forks"), [(3, True), (7, False), (7, True)])
def test_another_course_begins_a_new_run_with_all_its_points(
    iteration: int, forks: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, mark = _write(folder, range(1, 6), marked=2)
    before = (folder / "points.jsonl").read_bytes()
    store = _open(folder, mark, forks=forks)
    assert store.add(_row(iteration, 0.7))
    assert not store.add(_row(8, 0.8))
    store.close("killed")
    assert [row["values"]["loss"] for row in _stored(folder)] == [0.1, 0.2, 0.7, 0.8]
    assert store.run.key != key
    assert TrackerFolder(folder).read_run() == store.run
    aside = folder.with_name("tracker.before-1")
    assert (aside / "points.jsonl").read_bytes() == before
    assert TrackerFolder(aside).read_run().key == key
    assert "another course" in caplog.text
    # A checkpoint from before still fits.
    store = _open(folder, mark)
    assert not store.add(_row(iteration, 0.7))
    store.close("killed")


@pytest.mark.shows("P66")
@pytest.mark.parametrize("operation", ["truncate", "replace", "fsync_folder"])
def test_a_kill_while_a_course_is_cut_off_mixes_nothing(
    operation: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither run has points of the other: those that are dropped never get the new key."""
    key, mark = _write(folder, range(1, 6), marked=2)
    store = _open(folder, mark, forks=True)

    class Killed(BaseException):
        pass

    def die(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, operation, die)
        with pytest.raises(Killed):
            store.add(_row(3, 0.7))
    store._file.close()
    store._lock.release()
    store = _open(folder, mark)
    is_new = store.run.key != key
    assert [row["iteration"] for row in _stored(folder)] == ([1, 2] if is_new else [1, 2, 3, 4, 5])
    assert store.run.cut is None
    store.close("killed")


def test_a_run_that_ends_earlier_than_its_stored_points_is_another_one(folder: Path) -> None:
    key, mark = _write(folder, range(1, 6), marked=2)
    store = _open(folder, mark)
    store.add(_row(3, 0.3))
    assert store.end()
    assert store.run.key != key
    assert len(_stored(folder)) == 3
    assert not store.end()
    store.close("finished")


def test_other_parameters_are_another_run_unless_it_is_resumed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, mark = _write(folder, range(1, 4), marked=2)
    store = _open(folder, mark, params={"lr": 0.1})
    assert (store.run.key, store.run.params) == (key, {})
    store.close("killed")
    assert "hyper-parameters differ" in caplog.text
    store = _open(folder, params={"lr": 0.1})
    assert store.run.key != key
    assert _stored(folder) == []
    store.close("killed")
    assert len(_stored(folder.with_name("tracker.before-1"))) == 3


@pytest.mark.shows("P66")
def test_another_target_gets_all_points_as_a_run_of_its_own(folder: Path) -> None:
    key, mark = _write(folder, range(1, 4), marked=2)
    store = _open(folder, mark, target={"kind": "MLflow", "uri": "other"})
    assert store.run.key != key
    assert store.run.target["uri"] == "other"
    assert len(_stored(folder)) == 3
    store.close("killed")


@pytest.mark.shows("P66")
def test_points_that_are_lost_begin_a_new_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, mark = _write(folder, range(1, 4), marked=2)
    (folder / "points.jsonl").unlink()
    store = _open(folder, mark)
    assert store.run.key != key
    assert "is missing" in caplog.text
    store.close("killed")


def test_a_damaged_description_is_an_error_that_names_the_remedy(folder: Path) -> None:
    _write(folder, range(1, 4))
    (folder / "tracker.json").write_text("{")
    with pytest.raises(UsageError, match="Rename the folder"):
        _open(folder)


@pytest.mark.shows("P84")
def test_the_folder_stays_locked_when_it_is_moved_or_copied_aside(folder: Path) -> None:
    _, mark = _write(folder, range(1, 6), marked=2)
    for options in ({"mark": mark, "forks": True}, {"params": {"lr": 1}}):
        store = _open(folder, **options)
        assert store.add(_row(3, 0.7)) == ("mark" in options)
        assert another_process_is_refused(folder)
        store.close("killed")
        assert not another_process_is_refused(folder)
