"""The folder of a run: saving, tidying, the end of a run, moving aside (DESIGN section 5, 6)."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import PlainWriter
from helios.checkpoint.store import CheckpointStore, PendingCheckpoint, RunFolder
from helios.errors import DamagedCheckpointError, StateError
from helios.storage import digest, files
from tests.checkpoint.helpers import is_same, make_payload, make_sidecar, names, save, save_payload


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root" / "model", CheckpointStore())


def test_a_checkpoint_is_a_file_and_a_sidecar_with_its_digest(folder: RunFolder) -> None:
    path = save(folder, 3, 100)
    assert path == folder.path / "run_epoch_3_iter_100.pth"
    assert names(folder.path) == ["run_epoch_3_iter_100.json", "run_epoch_3_iter_100.pth"]
    table = json.loads((folder.path / "run_epoch_3_iter_100.json").read_text())
    assert table["digest"] == digest.digest_file(path)
    assert (table["epoch"], table["iteration"], table["num_replicas"]) == (3, 100, 1)
    assert (table["schema"], table["run_name"]) == (file_names.SCHEMA, "run")
    assert table["level"] == "restart"
    assert table["version"]


def test_what_was_saved_is_loaded(folder: RunFolder) -> None:
    save(folder, 1, 3, extra=np.float32(0.5))
    loaded = folder.load_newest()
    assert loaded is not None
    assert is_same(loaded.payload, make_payload(1, 3, extra=np.float32(0.5)))
    assert loaded.sidecar is not None
    assert loaded.sidecar.metrics == {"loss": 0.25}


def test_a_new_folder_has_no_checkpoint(folder: RunFolder) -> None:
    assert folder.load_newest() is None
    assert folder.entries() == []
    folder.clean()
    assert folder.move_aside() is None
    assert not folder.path.exists()


def test_entries_are_sorted_by_epoch_and_iteration(folder: RunFolder) -> None:
    for place in [(10, 4), (2, 50), (2, 6)]:
        save(folder, *place)
    assert [(e.epoch, e.iteration) for e in folder.entries()] == [(2, 6), (2, 50), (10, 4)]


@pytest.mark.shows("R41", "S18")
def test_a_committed_pair_is_not_written_again_whatever_its_metadata(folder: RunFolder) -> None:
    path = save(folder, 1, 3)
    before = path.read_bytes()

    def describe(payload: dict[str, Any]) -> PendingCheckpoint:
        stem = file_names.stem("run", 1, 3) + "_acc_0.5"
        return PendingCheckpoint(folder.path_of(stem), payload, make_sidecar(1, 3))

    again = RunFolder(folder.path, CheckpointStore(is_async=False))
    assert PlainWriter(again, describe).save(make_payload(1, 3, other=1)) == path
    assert path.read_bytes() == before
    assert len(names(folder.path)) == 2


def test_a_value_that_cannot_be_loaded_is_named_and_leaves_no_file(folder: RunFolder) -> None:
    with pytest.raises(StateError, match=r"^model\.history\[1\] "):
        save(folder, 1, 1, history=[1, object()])
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("stem", "sidecar", "text"),
    [
        ("run_epoch_1_iter_2", make_sidecar(1, 1), r"iteration\) \(1, 1\) / \(1, 2\)"),
        ("run_epoch_1_iter_1", make_sidecar(1, 2), r"iteration\) \(1, 1\) / \(1, 2\)"),
        ("run_epoch_1_iter_1", make_sidecar(1, 1, num_replicas=2), "num_replicas 1 / 2"),
        ("run", make_sidecar(1, 1), "must name"),
    ],
)
def test_a_save_that_would_be_refused_later_is_refused_now(
    folder: RunFolder, stem: str, sidecar: Any, text: str
) -> None:
    with pytest.raises(StateError, match=text):
        save_payload(folder, make_payload(1, 1), stem=stem, sidecar=sidecar)
    assert not folder.path.exists()


@pytest.mark.shows("H18")
def test_a_payload_without_a_required_key_is_refused(folder: RunFolder) -> None:
    payload = make_payload(1, 1)
    del payload["rng"]
    with pytest.raises(StateError, match="lacks 'rng'"):
        save_payload(folder, payload, stem="run_epoch_1_iter_1", sidecar=make_sidecar(1, 1))


@pytest.mark.shows("H28")
def test_the_commit_is_the_rename_after_file_and_sidecar_are_on_the_disk(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.mkdir(parents=True)
    order: list[str] = []

    def record(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            order.append(f"{name} {Path(getattr(args[-1], 'name', args[-1])).name}")
            return call(*args)

        return recorded

    for name in ("create", "fsync", "replace", "fsync_folder"):
        monkeypatch.setattr(files, name, record(name, getattr(files, name)))
    save(folder, 1, 1)
    stem = "run_epoch_1_iter_1"
    assert order == [
        f"create {stem}.pth.tmp",
        f"fsync {stem}.pth.tmp",
        f"create {stem}.json.tmp",
        f"fsync {stem}.json.tmp",
        f"replace {stem}.json",
        "fsync_folder model",
        f"replace {stem}.pth",
        "fsync_folder model",
    ]


@pytest.mark.shows("S6", "U17")
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "replace"])
def test_a_save_that_fails_removes_its_partial_file_and_keeps_the_older_checkpoint(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    save(folder, 1, 1)

    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, operation, fail)
        with pytest.raises(OSError, match="No space") as caught:
            save(folder, 1, 2)
    assert caught.value.errno == errno.ENOSPC
    assert names(folder.path) == ["run_epoch_1_iter_1.json", "run_epoch_1_iter_1.pth"]
    assert save(folder, 1, 2).exists()


def test_retention_deletes_file_and_sidecar_but_not_the_one_resumed_from(tmp_path: Path) -> None:
    for iteration in range(1, 4):
        save(RunFolder(tmp_path), 1, iteration)
    folder = RunFolder(tmp_path, CheckpointStore(keep_last=2))
    loaded = folder.load_newest()
    assert loaded is not None
    for iteration in range(4, 8):
        save(folder, 1, iteration)
    stems = [f"run_epoch_1_iter_{iteration}" for iteration in (3, 6, 7)]
    assert names(tmp_path) == sorted(f"{stem}{end}" for stem in stems for end in (".json", ".pth"))


@pytest.mark.shows("S11")
def test_the_file_goes_before_its_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(keep_last=1))
    save(folder, 1, 1)
    removed: list[str] = []
    monkeypatch.setattr(files, "unlink", lambda path, **kwargs: removed.append(path.suffix))
    save(folder, 1, 2)
    assert removed == [".pth", ".json"]


@pytest.mark.shows("S11")
def test_a_deletion_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(keep_last=1))
    save(folder, 1, 1)

    def fail(path: Path, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "unlink", fail)
    assert save(folder, 1, 2).exists()
    assert "run_epoch_1_iter_1.pth was not deleted" in caplog.text
    assert len(folder.entries()) == 2


@pytest.mark.shows("S32")
def test_the_end_of_a_run_is_noted_under_the_same_digest(folder: RunFolder) -> None:
    path = save(folder, 1, 1)
    before = folder.read_sidecar(path)
    folder.mark_finished(path, "total_steps reached")
    after = folder.read_sidecar(path)
    assert before is not None
    assert after is not None
    assert (before.finished, after.finished) == (None, "total_steps reached")
    assert after.digest == before.digest == digest.digest_file(path)
    assert folder.load_newest() is not None
    assert len(names(folder.path)) == 2


def test_the_end_of_a_run_cannot_be_noted_without_a_sidecar(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(folder, 1, 1)
    file_names.sidecar_path(path).unlink()
    folder.mark_finished(path, "stopped")
    assert "no sidecar" in caplog.text
    assert names(folder.path) == [path.name]


@pytest.mark.shows("U2")
def test_cleaning_removes_what_a_kill_left_and_nothing_else(folder: RunFolder) -> None:
    path = save(folder, 1, 1)
    kept = {
        *names(folder.path),
        *("notes.json", "best.pth", "weights.pth.tmp", "table_epoch_1_iter_9.json"),
        *("run_epoch_1_iter_8.pth.damaged", "run_epoch_1_iter_8.json.damaged", "x.tmp"),
        "run_epoch_1_iter_7.txt.tmp",
    }
    orphan = make_sidecar(1, 5).to_json()
    for name in kept - set(names(folder.path)):
        (folder.path / name).write_text('{"own": "result"}')
    (folder.path / "run_epoch_1_iter_5.json").write_text(orphan)
    (folder.path / "run_epoch_1_iter_2.pth.tmp").write_bytes(b"half")
    (folder.path / "run_epoch_1_iter_2.json.tmp").write_bytes(b"{")
    folder.clean()
    assert set(names(folder.path)) == kept
    assert path.exists()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system", str(args[0]))


def test_what_a_kill_left_on_a_read_only_disk_is_told_of_and_stays(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1, 1)
    (folder.path / "run_epoch_1_iter_2.pth.tmp").write_bytes(b"half")
    (folder.path / "run_epoch_1_iter_3.json.tmp").write_bytes(b"{")
    present = names(folder.path)
    monkeypatch.setattr(files, "unlink", _refuse)
    folder.clean()
    assert names(folder.path) == present
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "iter_2.pth.tmp" in caplog.text
    assert folder.load_newest() is not None


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_passed_over_and_written_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1, 1)
    path = save(folder, 1, 2)
    path.write_bytes(path.read_bytes()[:-100])
    present = names(folder.path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", _refuse)
        loaded = folder.load_newest()
    assert loaded is not None
    assert file_names.parse(loaded.path) == (1, 1)
    assert names(folder.path) == present
    assert "iter_2.pth could not be renamed" in caplog.text
    assert folder.find(1, 2) is None
    assert save(folder, 1, 2) == folder.find(1, 2) == path
    assert is_same(folder.load(path).payload, make_payload(1, 2))


def test_where_all_are_damaged_and_none_can_be_renamed_no_start_begins_afresh(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1, 1).write_bytes(b"")
    monkeypatch.setattr(files, "replace", _refuse)
    with pytest.raises(DamagedCheckpointError, match=r"iter_1\.pth"):
        folder.load_newest()


def test_what_is_protected_by_any_way_that_leads_to_it_stays(
    folder: RunFolder, tmp_path: Path
) -> None:
    paths = [save(folder, 1, iteration) for iteration in (1, 2, 3)]
    (tmp_path / "link.pth").symlink_to(paths[0])
    (tmp_path / "folder").symlink_to(folder.path)
    keeping = RunFolder(folder.path, CheckpointStore(keep_last=1))
    keeping.protect(tmp_path / "link.pth")
    keeping.protect(tmp_path / "folder" / paths[1].name)
    save(keeping, 1, 4)
    assert [entry.iteration for entry in keeping.entries()] == [1, 2, 4]


def test_everything_of_the_run_is_moved_aside_and_nothing_else(folder: RunFolder) -> None:
    save(folder, 1, 1)
    save(folder, 1, 2)
    folder.rename_damaged(save(folder, 1, 3))
    (folder.path / "notes.txt").touch()
    moved = names(folder.path)
    moved.remove("notes.txt")
    target = folder.move_aside()
    assert target is not None
    assert target.name.startswith("before-")
    assert names(target) == moved
    assert names(folder.path) == [target.name, "notes.txt"]
    assert folder.load_newest() is None
    assert RunFolder(target).load(target / "run_epoch_1_iter_2.pth").sidecar is not None


def test_a_second_move_in_the_same_second_takes_another_name(folder: RunFolder) -> None:
    save(folder, 1, 1)
    first = folder.move_aside()
    save(folder, 1, 1)
    second = folder.move_aside()
    assert first != second
    assert first is not None
    assert second is not None
    assert names(first) == names(second)


def test_the_checkpoint_to_start_from_stays(folder: RunFolder) -> None:
    save(folder, 1, 1)
    save(folder, 1, 2)
    target = folder.move_newer_aside(1)
    assert target is not None
    stay = ["run_epoch_1_iter_1.json", "run_epoch_1_iter_1.pth"]
    assert names(folder.path) == [target.name, *stay]


def test_without_digest_the_file_is_checked_by_its_own_sums(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CheckpointStore(digest=False))
    path = save(folder, 1, 1)
    loaded = folder.load(path)
    assert loaded.sidecar is not None
    assert loaded.sidecar.digest == ""
    data = bytearray(path.read_bytes())
    data[data.find(torch.arange(50.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        folder.load(path)


def test_saving_many_checkpoints_says_nothing(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for iteration in range(3):
            save(folder, 1, iteration)
        folder.load_newest()
    assert caplog.text == ""


def test_an_error_of_the_disk_names_the_checkpoint_and_keeps_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        # As the system does for a file that is open.
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(files, "fsync", refuse)
    with pytest.raises(OSError, match=r"run_epoch_1_iter_2\.pth") as caught:
        save(RunFolder(tmp_path), 1, 2)
    assert type(caught.value) is OSError
    assert caught.value.errno == errno.EDQUOT


@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"keep_last": 2}, 1)])
def test_a_commit_lists_its_folder_once_at_most(
    options: dict[str, Any], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run", CheckpointStore(**options))
    save(folder, 1, 1)
    listed: list[Any] = []
    scandir = os.scandir

    def note(path: Any) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", note)
    save(folder, 1, 2)
    assert len(listed) == expected
    assert folder.find(1, 2) is not None
    assert len(listed) == expected + 1
