"""What an event changes that runs for each replica is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.state import TrainingState
from tests.support.event_logs import Linear, Numbers
from tests.support.quiet import Quiet


class Noisy(Quiet):
    """Adds noise of its own to each batch."""

    calls = ends = 0

    def setup(self) -> None:
        self.noise = torch.Generator().manual_seed(7)

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch + torch.rand(batch.shape, generator=self.noise)

    def on_forward_start(self, context: Any) -> None:
        self.calls += 1

    def on_backward_end(self) -> None:
        self.ends += 1


@pytest.mark.shows("S58")
def test_what_an_event_of_a_turn_changes_is_named_with_the_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=6,
        chkpt_frequency=2,
        chkpt_root=tmp_path,
        use_cpu=True,
        num_replicas=2,
        print_banner=False,
        plugins=[Noisy()],
    )
    trainer.fit(Linear(), Numbers(24))
    (path,) = tmp_path.glob("linear/*_iter_2.json")
    assert json.loads(path.read_text())["level"] == "restart"
    for hook, name in (
        ("process_training_batch", "noise"),
        ("on_forward_start", "calls"),
        ("on_backward_end", "ends"),
    ):
        assert f"{hook} changes plugin 'noisy': {name}. Each replica changes it" in caplog.text
    assert "train_step changes" not in caplog.text
