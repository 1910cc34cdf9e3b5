"""Sizes and numbers in messages and tables."""

from __future__ import annotations

import pytest

from helios.text import number_text, size_text


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
