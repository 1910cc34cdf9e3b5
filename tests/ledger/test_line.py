"""Lines of a ledger: exact numbers, and a hash that binds each to the one before."""

from __future__ import annotations

import math

import pytest

from helios.errors import LedgerError
from helios.ledger.line import hash_of, read_float, seal, unseal, write_float


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, 1e-310, math.inf, -math.inf])
def test_a_number_is_read_back_exactly(number: float) -> None:
    digits = write_float(number)
    assert len(digits) == 16
    assert math.copysign(1, read_float(digits)) == math.copysign(1, number)
    assert read_float(digits) == number


@pytest.mark.parametrize("chain", ["", "1" * 16])
def test_a_line_that_does_not_follow_is_refused(chain: str) -> None:
    data, _ = seal('{"at":[1,2,3]', "0" * 16)
    with pytest.raises(LedgerError, match="does not follow"):
        unseal(data, chain)


def test_a_definition_has_the_hash_that_ledgers_hold() -> None:
    assert hash_of({"b": [2.5, "ä"], "a": {"c": None}}) == "b7ebfed6685d80b2"
