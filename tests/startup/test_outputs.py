"""Where a run's results go, as far as nobody else tests it: what is said before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helios.plugins import Plugin
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
