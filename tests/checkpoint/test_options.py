"""What a user may ask of the store, and what each bad value says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helios.checkpoint.retention import CheckpointStore, KeepBest
from helios.errors import ArgumentError, UsageError

_BEST: dict[str, Any] = {"count": 1, "metric": "loss", "mode": "min"}


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CheckpointStore, "keep_last", 0),
        (CheckpointStore, "keep_every", 2.0),
        (CheckpointStore, "keep_best", 3),
        (CheckpointStore, "on_save_error", "ignore"),
        (CheckpointStore, "is_async", 1),
        (CheckpointStore, "max_plain_bytes", -1),
        (KeepBest, "count", 0),
        (KeepBest, "metric", ""),
        (KeepBest, "mode", "highest"),
    ],
)
def test_a_bad_value_is_named(kind: Any, name: str, value: Any) -> None:
    good = _BEST if kind is KeepBest else {}
    message = rf"^{kind.__name__}\({name}=\.\.\.\) must be .* got "
    with pytest.raises(ArgumentError, match=message):
        kind(**{**good, name: value})


@pytest.mark.shows("U28")
def test_the_score_of_the_best_must_be_computed() -> None:
    KeepBest(1, "loss", "max").check_scores({"loss": math.nan, "other": 1.0})
    for scores, found in (({"acc": 0.5, "a": 1.0}, "a, acc"), ({}, "none")):
        with pytest.raises(
            UsageError, match=rf"metric='loss'\) must name .* scores are: {found}\. "
        ):
            KeepBest(1, "loss", "max").check_scores(scores)
