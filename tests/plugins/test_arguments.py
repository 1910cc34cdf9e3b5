"""Arguments of plugins that break their rules are errors where the plugin is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins import EMA, SWA, EarlyStopping, Metrics
from helios.plugins.time_limit import TimeLimit
from helios.state import Phase

_STOPPING = {"metric": "x", "mode": "min", "patience": 1}
_METRIC = SimpleNamespace(update=len, compute=len, reset=len)
_METRICS = {"metrics": {"m": _METRIC}, "inputs": lambda context: (), "phase": Phase.TRAINING}


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (EMA, {"decay": 1.0}, r"EMA\(decay=...\) must be a number in \(0, 1\), got 1.0. Pass e.g."),
        (SWA, {"start": 0}, r"SWA\(start=...\) must be a positive int, got 0"),
        (EarlyStopping, _STOPPING | {"mode": "low"}, r"EarlyStopping\(mode=...\) must"),
        (EarlyStopping, _STOPPING | {"patience": 0}, r"EarlyStopping\(patience=...\) must"),
        (Metrics, _METRICS | {"metrics": {"a": len}}, "update, compute, reset.*got 'a'"),
        (Metrics, _METRICS | {"every": 0}, "positive number of steps, got 0"),
        (Metrics, _METRICS | {"every": 3, "phase": Phase.TESTING}, "has one value"),
        (TimeLimit, {"limit": 0}, "must be positive"),
        (TimeLimit, {"limit": "90"}, "must be of the form"),
        (TimeLimit, {"limit": None}, "must be a duration"),
    ],
)
def test_a_wrong_argument_is_named(kind: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
        kind(**arguments)
