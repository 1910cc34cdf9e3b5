"""The small public helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from helios import core


def test_the_folder_is_changed_and_restored_also_after_an_error(tmp_path: Path) -> None:
    start = Path.cwd()
    with core.ChdirContext(tmp_path) as previous:
        assert previous == start
        assert Path.cwd() == tmp_path.resolve()
    assert Path.cwd() == start
    with pytest.raises(ZeroDivisionError), core.ChdirContext(tmp_path):
        _ = 1 / 0
    assert Path.cwd() == start


@pytest.mark.shows("H62")
def test_the_timer_averages_its_newest_records() -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    timer = core.AverageTimer(sliding_window=2, clock=lambda: next(times))
    averages = [timer.get_average_time()]
    for _ in range(4):
        timer.record()
        averages.append(timer.get_average_time())
    assert averages == [0.0, 1.0, 1.5, 2.5, 3.5]


class _Unsafe:
    def __reduce__(self) -> tuple[object, ...]:
        return (sys.exit, ("executed",))


def test_a_safe_load_returns_tensors_and_executes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.arange(3)}, path)
    loaded = core.safe_torch_load(path, map_location="cpu")
    assert torch.equal(loaded["weight"], torch.arange(3))
    torch.save(_Unsafe(), path)
    with pytest.raises(Exception, match="Weights only load failed"):
        core.safe_torch_load(path)
