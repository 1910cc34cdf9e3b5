"""What a plugin loses at a resume is named (R5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.runs import Setting, train


class Counting(Plugin):
    def __init__(self) -> None:
        super().__init__("counting")
        self.count = 0

    def setup(self) -> None:
        self.net = nn.Linear(1, 1)

    def on_training_start(self) -> None:
        self.borrowed = self.trainer.model.net

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.count += 1


def test_a_plugin_that_changes_without_a_state_dict_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, Setting(total_steps=3), Counting())
    said = capsys.readouterr().err
    assert said.count("Plugin 'counting' has no state_dict") == 1
    assert "finds count, net as setup() makes it" in said


def test_a_plugin_that_declares_or_saves_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Declaring(Counting):
        unsaved = ("count", "net")

    class Saving(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    train(tmp_path / "declaring", Setting(total_steps=2), Declaring())
    train(tmp_path / "saving", Setting(total_steps=2), Saving())
    assert "'counting'" not in capsys.readouterr().err
