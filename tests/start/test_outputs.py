"""What a sidecar says of its weights, and how a start reads a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.checkpoint.file_names import find_checkpoints
from helios.checkpoint.loading import read_sidecar
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
