"""Sizes and numbers in messages and tables."""

from __future__ import annotations

import pytest

from helios.text import number_text, size_text


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1000, "1000 bytes"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (5000 << 40, "5000 TiB")],
)
def test_a_size_has_the_unit_that_suits_it(num_bytes: int, expected: str) -> None:
    assert size_text(num_bytes) == expected


@pytest.mark.parametrize("digits", [4, 6])
@pytest.mark.parametrize("number", [0.99996, 1.00004, 123456.789, -0.99999999])
def test_only_a_whole_number_looks_like_one(number: float, digits: int) -> None:
    """As an accuracy of 0.99996 that is shown as 1."""
    assert float(number_text(number, digits)) == pytest.approx(number, rel=10.0 ** (1 - digits))
    assert not number_text(number, digits).lstrip("-").isdecimal()
