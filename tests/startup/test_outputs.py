"""Where a run's results go, as far as nobody else tests it: what is said before the first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helios.checkpoint.file_names import find_checkpoints
from helios.checkpoint.loading import read_sidecar
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.runs import Setting, train


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
