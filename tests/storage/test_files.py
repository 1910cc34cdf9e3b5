"""The file operations that a save is made of."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helios.storage import files


def test_a_sync_waits_for_all_bytes_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "file"
    with path.open("wb") as handle:
        handle.write(b"12345")
        files.fsync(handle)
    assert synced == [(path.stat().st_ino, 5)]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be synced there")
def test_a_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    files.fsync_folder(tmp_path)
    assert synced == [tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    ("number", "is_raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_only_a_file_system_that_cannot_sync_folders_is_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_raised: bool
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    if is_raised:
        with pytest.raises(OSError, match="fsync"):
            files.fsync_folder(tmp_path)
    else:
        files.fsync_folder(tmp_path)


def test_what_is_put_aside_gets_the_first_free_number(tmp_path: Path) -> None:
    path = tmp_path / "book.jsonl"
    for text in ("first", "second", "third"):
        path.write_text(text)
        files.rename_aside(path)
    found = {aside.name: aside.read_text() for aside in tmp_path.iterdir()}
    names = [f"book.before-{number}.jsonl" for number in (1, 2, 3)]
    assert found == dict(zip(names, ("first", "second", "third"), strict=True))


def test_a_folder_is_removed_with_its_folders_and_without_what_links_lead_to(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    doomed = tmp_path / "doomed"
    (doomed / "inner").mkdir(parents=True)
    (doomed / "inner" / "file").touch()
    (doomed / "link").symlink_to(outside, target_is_directory=True)
    files.remove_folder(doomed)
    assert not doomed.exists()
    assert [path.name for path in outside.iterdir()] == ["kept"]
