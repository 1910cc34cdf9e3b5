"""The profiler: traces of the iterations that were asked for, and no trace in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity

from helios.plugins.profiler import Profiler
from tests.support.runs import Setting, train

_CPU = {"activities": [ProfilerActivity.CPU]}


def _traces(folder: Path) -> list[set[str]]:
    """Return the names in each trace, in the order of their writing."""
    paths = sorted(folder.glob("*.pt.trace.json"), key=lambda path: path.name.split(".")[-4])
    return [{event["name"] for event in _events(path)} for path in paths]


def _events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def _steps(names: set[str]) -> list[int]:
    return sorted(int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#"))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_trace_is_written_for_each_cycle(tmp_path: Path) -> None:
    profiler = Profiler(
        tmp_path / "new" / "traces", skip_first=1, wait=1, warmup=1, active=2, repeat=2, **_CPU
    )
    train(tmp_path / "run", Setting(), profiler)
    traces = _traces(tmp_path / "new" / "traces")
    assert [_steps(names) for names in traces] == [[3, 4], [7, 8]]
    assert any("aten::addmm" in names or "aten::linear" in names for names in traces)
