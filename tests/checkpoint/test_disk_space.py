"""A disk that is too small is told of before the first step (USERS.md 17)."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helios.checkpoint.disk_space import count_kept, warn_if_too_large
from helios.checkpoint.options import CheckpointStore, KeepBest


class Usage(NamedTuple):
    """What a disk says of itself."""

    total: int
    used: int
    free: int


@pytest.mark.shows("S8")
@pytest.mark.parametrize(
    ("options", "num_saves", "expected"),
    [
        ({}, 40, 40),
        ({}, math.inf, math.inf),
        ({"keep_last": 3}, 40, 5),
        ({"keep_last": 3}, 2, 2),
        ({"keep_last": 1, "keep_best": KeepBest(4, "score", "max")}, 40, 7),
        ({"keep_best": KeepBest(4, "score", "max")}, 1, 5),
        ({"keep_every": 10}, 40, 7),
    ],
)
def test_how_many_lie_there_at_once_follows_from_the_rules(
    options: dict[str, Any], num_saves: float, expected: float
) -> None:
    assert count_kept(CheckpointStore(**options), num_saves) == expected


@pytest.mark.shows("S8")
@pytest.mark.parametrize(
    ("free", "num_saves", "options", "expected"),
    [
        (99, 1, {}, "Not even one checkpoint will fit"),
        (1000, 11, {}, r"will not fit into .*: up to 11 of about 100 bytes each, and 1000 bytes"),
        (1000, 10, {}, ""),
        (1000, math.inf, {"keep_last": 3}, ""),
        (400, math.inf, {"keep_last": 3}, "up to 5 of"),
    ],
)
def test_a_run_that_cannot_fit_is_warned_about(
    free: int,
    num_saves: float,
    options: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[Path] = []

    def answer(path: Path) -> Usage:
        asked.append(path)
        return Usage(5000, 5000 - free, free)

    monkeypatch.setattr(shutil, "disk_usage", answer)
    folder = tmp_path / "root" / "model"
    warn_if_too_large(
        folder, num_bytes=100, num_saves=num_saves, options=CheckpointStore(**options)
    )
    assert asked == [tmp_path]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(expected)
    if expected:
        assert re.search(expected, messages[0])
        assert str(folder) in messages[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "Keep fewer, with store=CheckpointStore(keep_last=3), save less often, or make room.",
        ),
        ({"keep_last": 2}, "Keep fewer, with less than 2 in keep_last of CheckpointStore"),
        (
            {"keep_every": 3, "keep_last": 1, "keep_best": KeepBest(2, "score", "max")},
            "with more than 3 in keep_every or less than 2 in keep_best of CheckpointStore",
        ),
        ({"keep_last": 1}, "make room, or set chkpt_root to another disk."),
    ],
)
def test_the_advice_is_none_that_the_rules_follow_already(
    options: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(5000, 4900, 100))
    warn_if_too_large(tmp_path, num_bytes=100, num_saves=20, options=CheckpointStore(**options))
    assert expected in caplog.text
