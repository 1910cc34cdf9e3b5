"""The sidecar's text: nothing is lost, and no change goes unseen."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from helios.checkpoint.file_names import SCHEMA
from helios.checkpoint.sidecar import Sidecar, _checksum
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from tests.checkpoint.helpers import make_sidecar

FULL = make_sidecar(
    3,
    100,
    metrics={"loss": 0.1, "ä": 1e-300},
    finished="total_steps reached",
    resumed_from="/runs/\udc80/x.pth",
    changes=["batch_size: 8 -> 4"],
    options={"seed": 1, "sampler": None, "nested": {"a": [1, 2.5, True]}},
    digest="sha256:00",
    version="3.0.0",
    count=12,
)


def read(text: str) -> Sidecar:
    return Sidecar.from_json(text, name="x.json")


def test_a_sidecar_comes_back_as_it_was() -> None:
    assert read(FULL.to_json()) == FULL
    assert read(make_sidecar(1, 1).to_json()) == make_sidecar(1, 1)


def test_metrics_that_are_not_finite_survive_in_standard_json() -> None:
    sidecar = make_sidecar(1, 1, metrics={"a": math.nan, "b": -math.inf})
    text = sidecar.to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(read(text).metrics["a"])
    assert read(text).metrics["b"] == -math.inf


def test_options_that_json_has_not_become_text() -> None:
    text = make_sidecar(1, 1, options={"total_steps": math.inf, 3: {"x"}}).to_json()
    assert read(text).options == {"total_steps": "inf", "3": "{'x'}"}


def test_what_a_later_version_added_is_kept_when_the_sidecar_is_written_again() -> None:
    text = dataclasses.replace(FULL, extra={"book": {"page": 3}}).to_json()
    again = dataclasses.replace(read(text), finished="stopped")
    assert json.loads(again.to_json())["book"] == {"page": 3}
    assert read(again.to_json()).extra == {"book": {"page": 3}}


@pytest.mark.shows("S18")
def test_every_flipped_bit_of_a_sidecar_is_seen() -> None:
    data = FULL.to_json().encode()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                sidecar = read(bytes(changed).decode("utf-8", "replace"))
            except DamagedCheckpointError:
                continue
            assert sidecar == FULL, "only white space outside of values may change unseen"


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", "{", "[" * 100_000, '{"check": 1}'])
def test_text_that_is_no_sidecar_is_damaged(text: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"x\.json"):
        read(text)


def test_a_later_format_is_incompatible_and_not_damaged() -> None:
    text = make_sidecar(1, 1, schema=SCHEMA + 1).to_json()
    with pytest.raises(IncompatibleCheckpointError, match=r"x\.json.*Install"):
        read(text)


def test_a_sidecar_of_a_version_that_counted_nothing_is_read() -> None:
    sidecar = make_sidecar(1, 1, count=3)
    table = json.loads(sidecar.to_json())
    del table["count"], table["check"]
    table["check"] = _checksum(table)
    assert read(json.dumps(table)) == make_sidecar(1, 1, count=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": "3"},
        {"count": True},
        {"epoch": "1"},
        {"epoch": True},
        {"metrics": {"a": "word"}},
        {"run_name": None},
    ],
)
def test_a_value_of_the_wrong_type_is_damaged(changes: dict[str, Any]) -> None:
    sidecar = make_sidecar(1, 1)
    text = json.dumps({**json.loads(sidecar.to_json()), **changes})
    with pytest.raises(DamagedCheckpointError, match=r"x\.json"):
        read(text)
