"""``verify`` finds every change of a ledger, and says where."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helios.errors import LedgerError
from helios.ledger.book import FILE_NAME, Book
from helios.ledger.line import seal, stated_hash
from helios.ledger.verification import verify
from tests.checkpoint.helpers import make_sidecar

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Return a ledger of six iterations that has ended."""
    book = Book(tmp_path, run="r")
    book.open(None, after=0)
    for number in range(1, 7):
        book.append([f'{{"at":[1,{number},{number}],"loss":{{"loss":"{number:016x}"}}'])
    book.append(['{"at":[1,6,6],"end":1'])
    book.close()
    return tmp_path / FILE_NAME


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def _is_good(path: Path) -> bool:
    try:
        return verify(path).is_good
    except LedgerError:
        return False


@pytest.mark.shows("P11")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [*lines[:3], lines[3].replace(b"03", b"13"), *lines[4:]], ["line 4"]),
        (lambda lines: [*lines[:3], *lines[4:]], ["line 4"]),
        (lambda lines: [*lines[:4], lines[3], *lines[4:]], ["line 5"]),
        (
            lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
            ["line 3", "line 4", "line 5"],
        ),
        (lambda lines: lines[1:], ["line 1"]),
        (lambda lines: [*lines, lines[-1]], ["line 9"]),
        (lambda lines: [*lines[:5], lines[5][:20]], ["line 6"]),
    ],
    ids=["changed", "removed", "repeated", "exchanged", "no header", "after the end", "cut off"],
)
def test_each_bad_line_is_named(ledger: Path, change, expected: list[str]) -> None:  # type: ignore[no-untyped-def]
    ledger.write_bytes(b"".join(change(_lines(ledger))))
    found = verify(ledger)
    assert not found.is_good
    assert [name for name in expected if not any(name in text for text in found.findings)] == []


@pytest.mark.shows("P11")
def test_every_change_of_a_single_byte_is_found(ledger: Path) -> None:
    data = ledger.read_bytes()
    unseen = []
    for place in range(len(data)):
        for flipped in (data[place] ^ 1, data[place] ^ 0x20):
            ledger.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
            if _is_good(ledger):
                unseen.append((place, flipped))
    assert not unseen


@pytest.mark.shows("P11")
def test_a_checkpoint_of_another_ledger_is_named(ledger: Path) -> None:
    size = sum(map(len, _lines(ledger)[:4]))
    own = {"size": size, "hash": _lines(ledger)[3][-19:-3].decode(), "every": 1000}
    assert verify(ledger, {"own.pth": make_sidecar(1, 3, ledger=own)}).is_good
    for other in ({**own, "hash": "0" * 16}, {**own, "size": size + 1}, {**own, "size": 10**6}):
        marks = {"other.pth": other, "own.pth": own}
        sidecars = {name: make_sidecar(1, 3, ledger=mark) for name, mark in marks.items()}
        (text,) = verify(ledger, sidecars).findings
        assert text.startswith("other.pth")


def test_a_run_that_has_ended_has_the_line_of_its_end(ledger: Path) -> None:
    lines = _lines(ledger)
    size = sum(map(len, lines[:-1]))
    ended_at = {"size": size, "hash": lines[-2][-19:-3].decode(), "every": 1000}
    last = {"last.pth": make_sidecar(1, 3, ledger=ended_at, finished="total_steps reached")}
    assert verify(ledger, last).is_good
    ledger.write_bytes(b"".join(lines[:-1]))
    (text,) = verify(ledger, last).findings
    assert "the last line does not say so" in text
    # A run that was made longer, and has not saved since.
    mark = {"size": size - len(lines[-2]), "hash": lines[-3][-19:-3].decode(), "every": 1000}
    before = make_sidecar(1, 2, ledger=mark, finished="total_steps reached")
    assert verify(ledger, {"last.pth": before}).is_good


@pytest.mark.shows("P62")
@pytest.mark.parametrize(
    ("body", "what"),
    [
        ('{"x":1', "lacks entries of a line of a ledger"),
        ('{"at":[1]', "lacks entries of a line of a ledger"),
        ('{"at":null', "lacks entries of a line of a ledger"),
        ("at", "is not JSON"),
    ],
)
def test_a_line_of_another_kind_is_named_though_its_hash_is_right(
    body: str, what: str, ledger: Path
) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)[:3]
    lines.append(seal(body, stated_hash(lines[-1]))[0])
    ledger.write_bytes(b"".join(lines))
    assert verify(ledger).findings == [f"line 4, after iteration 2, {what}"]


@pytest.mark.shows("P11")
def test_the_program_of_the_page_checks_the_chain(ledger: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import hashlib\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(program.splitlines()) <= 22
    script = tmp_path / "check.py"
    script.write_text(program)

    def check() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(ledger)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    book = Book(tmp_path, run="r")
    lines = _lines(ledger)
    size = sum(map(len, lines[:4]))
    book.open({"size": size, "hash": stated_hash(lines[3]), "every": 1000}, after=3)
    book.append_scores(3, {"error": 0.5}, ())
    book.append([lines[4].decode()[:-25]])
    book.close()
    assert check().stdout.strip() == stated_hash(lines[4])
    for place in (2, 4):
        changed = _lines(ledger)
        changed[place] = changed[place].replace(b"0", b"1", 1)
        before = ledger.read_bytes()
        ledger.write_bytes(b"".join(changed))
        assert check().stderr.strip() == f"line {place + 1} does not follow from the line before it"
        ledger.write_bytes(before)
