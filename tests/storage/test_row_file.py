"""A file of rows: appended to, marked, cut back, and never written over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helios.storage import files
from helios.storage.row_file import RowFile

_HEADER = "a,b\n"


def _write(path: Path, *rows: str) -> dict[str, Any]:
    """Write a file and return its mark."""
    file = RowFile(path, _HEADER)
    file.restore()
    for row in rows:
        file.append(row)
    mark = file.mark()
    file.close()
    return mark


def _go_on(path: Path, mark: dict[str, Any] | None, *rows: str) -> None:
    file = RowFile(path, _HEADER)
    file.restore(mark)
    for row in rows:
        file.append(row)
    file.close()


def test_a_mark_is_taken_once_all_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = files.fsync
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(
        files, "fsync", lambda handle: (fsync(handle), synced.append(path.stat().st_size))
    )
    mark = _write(path, "1,2\n")
    assert synced == [8]
    assert mark["size"] == 8
    assert mark["path"] == str(path)


def test_a_file_is_cut_back_to_its_mark_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.csv"
    mark = _write(path, "1,2\n")
    _go_on(path, mark, "3,4\n")
    with path.open("ab") as handle:
        handle.write(b"5,half a r")
    _go_on(path, mark, "3,4\n", "5,6\n")
    assert path.read_bytes() == b"a,b\n1,2\n3,4\n5,6\n"
    assert not caplog.records
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_gone_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.csv"
    mark = _write(path, "1,2\n")
    _go_on(tmp_path / "other.csv", mark, "3,4\n")
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'other.csv'} is missing")
    assert "(8 bytes)" in message
    assert str(path) in message
    assert (tmp_path / "other.csv").read_bytes() == b"a,b\n3,4\n"
    assert path.read_bytes() == b"a,b\n1,2\n"


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (b"a,b\n1,", "its first 8 bytes differ"),
        (b"a,b\n9,2\n3,4\n", "its first 8 bytes differ"),
        (b"a,b\r\n1,2\r\n", "its first 8 bytes differ"),
    ],
    ids=["shorter", "changed", "of other line ends"],
)
def test_a_file_that_is_not_the_marked_one_is_kept_aside(
    now: bytes, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.csv"
    mark = _write(path, "1,2\n")
    path.write_bytes(now)
    _go_on(path, mark, "3,4\n")
    (message,) = caplog.messages
    assert says in message
    assert "without the rows up to the checkpoint" in message
    assert (tmp_path / "rows.before-1.csv").read_bytes() == now
    assert path.read_bytes() == b"a,b\n3,4\n"


def test_a_new_file_begins_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "rows.csv"
    _write(path, "1,2\n", "3,4\n")
    assert path.read_bytes() == b"a,b\n1,2\n3,4\n"
