"""Sizes in messages and tables, and single numbers out of losses, scores and what is logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.core import text
from helios.core.text import (
    as_number,
    as_numbers,
    find_peak_memory,
    number_text,
    peak_text,
    size_text,
)
from helios.errors import UsageError


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (3 << 30, "3 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_a_size_has_the_unit_that_suits_it(num_bytes: int, expected: str) -> None:
    assert size_text(num_bytes) == expected


@pytest.mark.parametrize(
    "value", [2, 2.0, torch.tensor(2), torch.tensor([2.0], requires_grad=True), True + 1]
)
def test_a_number_or_a_tensor_of_one_element_is_a_number(value: Any) -> None:
    number = as_number("loss", value)
    assert type(number) is float
    assert number == 2.0


@pytest.mark.parametrize("value", [None, "two", [2.0], torch.zeros(2), {}])
def test_anything_else_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a single number, but 'loss' is"):
        as_number("loss", value)


def test_scores_that_are_no_single_numbers_are_left_out() -> None:
    scores = {"a": 1, 2: torch.tensor([0.5]), "c": torch.zeros(2), "d": "text", "e": None}
    assert as_numbers(scores) == {"a": 1.0, "2": 0.5}


@pytest.mark.parametrize("digits", [4, 6])
@pytest.mark.parametrize(
    "number", [0.99996, 0.9999996, 1.00004, 99.996, 1234.5678, 123456.789, -0.99999999, 2 - 2**-24]
)
def test_only_a_whole_number_looks_like_one(number: float, digits: int) -> None:
    """As an accuracy of 0.99996 that is shown as 1."""
    assert float(number_text(number, digits)) == pytest.approx(number, rel=10.0 ** (1 - digits))
    assert not number_text(number, digits).lstrip("-").isdecimal()


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1.0, "1"), (0.1 + 0.2 + 0.7, "1"), (3e8, "3e+08"), (0.5, "0.5"), (0.123456, "0.1235")],
)
def test_other_numbers_have_four_digits(number: float, expected: str) -> None:
    assert number_text(number, 4) == expected


def test_numbers_that_are_not_finite_are_shown() -> None:
    assert [number_text(float(name)) for name in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]


_SCRIPT = """
import sys
held = bytearray(int(sys.argv[1]) << 20)
held[::4096] = b"x" * len(held[::4096])
if sys.argv[2:]:
    import subprocess
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2]]).returncode)
"""
_CHILD = """
from helios.core.text import find_peak_memory
print(max(find_peak_memory().values()))
"""


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    """``ru_maxrss`` is inherited over fork and exec."""
    command = [sys.executable, "-c", _SCRIPT, "800", _CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 20 << 20 < int(done.stdout) < 700 << 20


def test_a_peak_by_another_name_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_bytes(b"Name:\tpython\nVmHWM:\t  204800 kB\nVmRSS:\t 1024 kB\n")
    monkeypatch.setattr(text, "_STATUS", status)
    assert peak_text(find_peak_memory()) == "peak 200 MiB"
    for content in (b"Name:\tpython\n", None):
        status.unlink()
        if content is not None:
            status.write_bytes(content)
        assert find_peak_memory()["memory"] >= 1 << 24, "in bytes"
        assert peak_text(find_peak_memory()).endswith(" (ru_maxrss)")
