"""Sizes in messages and tables."""

from __future__ import annotations

import pytest

from helios.core.sizes import size_text


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
