"""What a user may ask of the store, and what each bad value says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helios.checkpoint.retention import CheckpointStore, KeepBest
from helios.errors import ArgumentError, UsageError


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_last", 0),
        ("keep_every", 2.0),
        ("keep_best", 3),
        ("on_save_error", "ignore"),
        ("is_async", 1),
        ("digest", "sha256"),
    ],
)
def test_a_bad_value_of_the_store_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^CheckpointStore\({name}=\.\.\.\) must be .* got "):
        CheckpointStore(**{name: value})


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    ("name", "value"),
    [("count", 0), ("metric", ""), ("mode", "highest")],
)
def test_a_bad_value_of_the_best_is_named(name: str, value: Any) -> None:
    good: dict[str, Any] = {"count": 1, "metric": "loss", "mode": "min"}
    with pytest.raises(ArgumentError, match=rf"^KeepBest\({name}=\.\.\.\) must be .* got "):
        KeepBest(**{**good, name: value})


@pytest.mark.shows("U28")
def test_the_score_of_the_best_must_be_computed() -> None:
    KeepBest(1, "loss", "max").check_scores({"loss": math.nan, "other": 1.0})
    for scores, found in (({"acc": 0.5, "a": 1.0}, r"\['a', 'acc'\]"), ({}, "none")):
        with pytest.raises(UsageError, match=rf"metric='loss'\) must name .* there are {found}\. "):
            KeepBest(1, "loss", "max").check_scores(scores)
