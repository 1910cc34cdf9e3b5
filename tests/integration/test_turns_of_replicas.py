"""What an event changes that runs for each replica, and states that differ between processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.plugins import Plugin
from helios.state import TrainingState

TOTAL, CUT = 6, 2


class Linear(helios.Model):
    """Fits a line."""

    def __init__(self) -> None:
        super().__init__("line")

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return (self.net(batch) - 2 * batch).square().mean()


class Rows(helios.DataModule):
    """A few numbers."""

    def setup(self) -> None:
        rows = torch.arange(24.0).reshape(-1, 1) / 24
        self._train_dataset = self._create_dataset(rows, helios.DataLoaderParams(batch_size=2))


class Noisy(Plugin):
    """Adds noise of its own to each batch."""

    def __init__(self) -> None:
        super().__init__("noisy")
        self.calls = self.ends = 0

    def setup(self) -> None:
        self.noise = torch.Generator().manual_seed(7)

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch + torch.rand(batch.shape, generator=self.noise)

    def on_forward_start(self, context: Any) -> None:
        self.calls += 1

    def on_backward_end(self) -> None:
        self.ends += 1


def _fit(folder: Path, plugin: Plugin) -> Linear:
    model = Linear()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=CUT,
        chkpt_root=folder,
        use_cpu=True,
        num_replicas=2,
        print_banner=False,
        plugins=[plugin],
    )
    trainer.fit(model, Rows())
    return model


def _sidecar(folder: Path, iteration: int) -> dict[str, Any]:
    (path,) = folder.glob(f"line/*_iter_{iteration}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.shows("S58")
def test_what_an_event_of_a_turn_changes_is_named_with_the_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, Noisy())
    sidecar = _sidecar(tmp_path, CUT)
    assert sidecar["level"] == "restart"
    for hook, name in (
        ("process_training_batch", "noise"),
        ("on_forward_start", "calls"),
        ("on_backward_end", "ends"),
    ):
        assert f"{hook} changes plugin 'noisy': {name}. Each replica changes it" in caplog.text
    assert "train_step changes" not in caplog.text
