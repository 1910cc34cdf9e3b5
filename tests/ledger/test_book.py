"""The file of a ledger: cut back at a resume, never in the way of a training."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from helios.ledger.book import FILE_NAME, Book
from helios.ledger.verification import verify
from helios.storage import files


def _open(folder: Path, mark: Any = None, *, after: int = 0, run: str = "r") -> Book:
    book = Book(folder, run=run)
    book.open(mark, after=after)
    return book


def _append(book: Book, *iterations: int) -> None:
    book.append(f'{{"at":[1,{number},{number}]' for number in iterations)


def _whole(folder: Path, count: int) -> bytes:
    folder.mkdir()
    book = _open(folder)
    _append(book, *range(1, count + 1))
    book.close()
    return (folder / FILE_NAME).read_bytes()


@pytest.mark.parametrize("further", [0, 1, 70])
def test_a_resume_cuts_back_to_the_line_of_its_checkpoint(tmp_path: Path, further: int) -> None:
    book = _open(tmp_path)
    _append(book, *range(1, 101))
    mark = book.mark()
    _append(book, *range(101, 101 + further))
    book.close()
    book = _open(tmp_path, mark)
    _append(book, *range(101, 121))
    book.close()
    assert (tmp_path / FILE_NAME).read_bytes() == _whole(tmp_path / "whole", 120)


@pytest.mark.shows("P7")
@pytest.mark.parametrize("harm", ["missing", "shorter", "changed", "another run"])
def test_a_ledger_that_does_not_match_is_kept_and_a_new_one_begins(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = _open(tmp_path)
    _append(book, *range(1, 11))
    mark = book.mark()
    book.close()
    path = tmp_path / FILE_NAME
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "shorter":
        path.write_bytes(data[:-1])
    elif harm == "changed":
        path.write_bytes(data[:-5] + b"0" + data[-4:])
    else:
        path.write_bytes(data.replace(b'"r"', b'"s"'))
        mark = {**mark, "hash": "0" * 16}
    before = path.read_bytes() if path.exists() else None
    with caplog.at_level(logging.WARNING):
        book = _open(tmp_path, mark, after=10)
    _append(book, 11)
    book.close()
    assert "ledger" in caplog.text
    assert "put the file back" in caplog.text
    kept = tmp_path / "ledger.before-1.jsonl"
    assert (kept.read_bytes() if kept.exists() else None) == before
    assert verify(tmp_path).findings == ["the lines up to iteration 10 are missing"]


def test_a_ledger_of_another_run_is_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for run in ("first", "second", "third"):
        book = _open(tmp_path, run=run)
        book.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ledger.before-1.jsonl", "ledger.before-2.jsonl", FILE_NAME]
    assert "ledger.before-2.jsonl" in caplog.text


@pytest.mark.shows("P6")
@pytest.mark.parametrize("taken", [0, 30])
def test_lines_that_the_disk_refuses_wait_in_order(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    book = _open(tmp_path)
    _append(book, *range(1, 65))
    write = files.write

    def refuse(handle: Any, data: bytes) -> int:
        write(handle, data[:taken])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", refuse)
    _append(book, *range(65, 300))
    with pytest.raises(OSError, match="No space"):
        book.sync()
    mark = book.mark()
    assert caplog.text.count("Could not write the ledger") == 1
    monkeypatch.undo()
    _append(book, 300)
    book.sync()
    book.close()
    data = (tmp_path / FILE_NAME).read_bytes()
    assert data == _whole(tmp_path / "whole", 300)
    assert data[: mark["size"]].endswith(f'{mark["hash"]}"}}\n'.encode())
