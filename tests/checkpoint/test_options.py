"""What a user may ask of the store, and what each bad value says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import helios
from helios.checkpoint.options import CheckpointStore, KeepBest
from helios.errors import ArgumentError, UsageError


@pytest.mark.shows("S1")
def test_by_default_everything_stays_and_is_verified_and_written_aside() -> None:
    options = CheckpointStore()
    assert (options.is_async, options.digest, options.on_save_error) == (True, True, "continue")
    assert options.keeps_all


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    "rule", [{"keep_last": 1}, {"keep_every": 2}, {"keep_best": KeepBest(3, "accuracy", "min")}]
)
def test_any_rule_lets_something_go(rule: dict[str, Any]) -> None:
    assert not CheckpointStore(**rule).keeps_all


@pytest.mark.shows("S5")
def test_options_are_frozen_and_public() -> None:
    assert (helios.CheckpointStore, helios.KeepBest) == (CheckpointStore, KeepBest)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointStore().digest = False  # type: ignore[misc]


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("keep_last", value) for value in (0, -1, 2.0, True, "3")),
        *(("keep_every", value) for value in (0, -1, 2.0, True, "3")),
        *(("keep_best", value) for value in (3, "accuracy", (3, "accuracy"), KeepBest)),
        *(("on_save_error", value) for value in ("ignore", None, True)),
        *(("is_async", value) for value in (1, None, "yes")),
        *(("digest", value) for value in (1, None, "sha256")),
    ],
)
def test_a_bad_value_of_the_store_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^CheckpointStore\({name}=\.\.\.\) must be .* got "):
        CheckpointStore(**{name: value})


@pytest.mark.shows("S5")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("count", value) for value in (0, -1, 1.0, True, None)),
        *(("metric", value) for value in ("", None, 3)),
        *(("mode", value) for value in ("highest", None, True)),
    ],
)
def test_a_bad_value_of_the_best_is_named(name: str, value: Any) -> None:
    good: dict[str, Any] = {"count": 1, "metric": "loss"}
    with pytest.raises(ArgumentError, match=rf"^KeepBest\({name}=\.\.\.\) must be .* got "):
        KeepBest(**{**good, name: value})


@pytest.mark.shows("U28")
def test_the_score_of_the_best_must_be_computed() -> None:
    KeepBest(1, "loss", "max").check_scores({"loss": math.nan, "other": 1.0})
    for scores, found in (({"acc": 0.5, "a": 1.0}, r"\['a', 'acc'\]"), ({}, "none")):
        with pytest.raises(UsageError, match=rf"metric='loss'\) must name .* there are {found}\. "):
            KeepBest(1, "loss", "max").check_scores(scores)
