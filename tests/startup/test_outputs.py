"""Where a run's results go, as far as nobody else tests it: what is said before the first step."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helios.checkpoint.file_names import find_checkpoints
from helios.checkpoint.loading import read_sidecar
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.runs import Setting, train


class Usage(NamedTuple):
    """What a disk says of itself."""

    total: int
    used: int
    free: int


class Listener(Plugin):
    """Notes what was on the screen when the first batch came."""

    unsaved = ("capture", "said")

    def __init__(self, capture: Any) -> None:
        super().__init__("listener")
        self.capture, self.said = capture, ""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_start(self) -> None:
        self.said = self.capture.readouterr().err


@pytest.mark.shows("S8", "U17")
@pytest.mark.parametrize(
    ("free", "expected"),
    [(100, "Not even one checkpoint will fit"), (1 << 40, "")],
)
def test_a_disk_that_is_too_small_is_told_of_before_the_first_step(
    free: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1 << 50, 0, free))
    listener = Listener(capsys)
    assert train(tmp_path, Setting(total_steps=2, chkpt_frequency=1), listener).has_ended
    assert expected in listener.said
    assert ("will fit" in listener.said) == bool(expected)


@pytest.mark.parametrize(
    ("unit", "total", "validated"), [("iteration", 9, [4, 8]), ("epoch", 3, [12])]
)
def test_a_sidecar_holds_scores_of_its_own_weights_only(
    unit: str, total: int, validated: list[int], tmp_path: Path
) -> None:
    """The best by a score would else be one that was never validated."""
    frequency = 4 if unit == "iteration" else 2
    setting = Setting(
        unit=unit, total_steps=total, valid_frequency=frequency, chkpt_frequency=1, requests=True
    )
    train(tmp_path, setting)
    sidecars = [read_sidecar(path) for path in find_checkpoints(tmp_path / "small")]
    assert len(sidecars) > len(validated)
    scored = [known.iteration for known in sidecars if known is not None and known.metrics]
    assert scored == validated


class Interrupting(Plugin):
    """Breaks the run off after two iterations."""

    def __init__(self) -> None:
        super().__init__("interrupting")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == 2:
            self.context.interrupt("the test says so")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_training_that_only_loads_ends_no_run(tmp_path: Path) -> None:
    setting = Setting(total_steps=6, chkpt_frequency=1)
    assert not train(tmp_path, setting, Interrupting()).has_ended
    saved = _content(tmp_path / "small")
    only_loads = dataclasses.replace(setting, chkpt_frequency=None)
    assert max(train(tmp_path, only_loads).records) == 6
    # A note of the end would make this run's checkpoint a finished one to `helios ls`.
    assert _content(tmp_path / "small") == saved
    assert sorted(train(tmp_path, setting).records) == [3, 4, 5, 6]
