"""The folder of a run: saving, tidying, the end of a run, moving aside."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import PlainWriter
from helios.checkpoint.store import CheckpointStore, PendingCheckpoint, RunFolder
from helios.storage import files
from tests.checkpoint.helpers import make_payload, make_sidecar, names, save


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root" / "model", CheckpointStore())


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


@pytest.mark.shows("S10")
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
    assert len(file_names.list_checkpoints(folder.path)) == 2


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
