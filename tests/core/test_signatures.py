"""Annotations of what users write are never evaluated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import helios

SCRIPT = """
from typing import TYPE_CHECKING

import torch

import helios
from helios.data import Stream

if TYPE_CHECKING:
    from nowhere import Batch, Closure, Metric, Part, State


class Net(helios.Model):
    scheduler_interval = {"plateau": "validation:loss"}

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(2, 1)
        self.optimizer = Descent(self.net.parameters(), lr=0.1)
        self.plateau = Plateau(self.optimizer)

    def train_step(self, batch: Batch, state: State) -> torch.Tensor:
        return self.net(batch).mean()

    def valid_step(self, batch: Batch, step: int) -> dict[str, Metric]:
        return {"loss": (self.net(batch).sum(), len(batch))}


class Descent(torch.optim.SGD):
    def step(self, closure: Closure | None = None) -> None:
        return super().step(closure)


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, metrics: Metric, epoch: int | None = None) -> None:
        super().step(metrics)


def read(index: Part, count: Part):
    yield from torch.ones(8, 2)[index::count]


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(Stream(read), params)
        self._valid_dataset = self._create_dataset(torch.ones(4, 2), params)
"""


def test_annotations_may_name_what_only_type_checkers_import(tmp_path: Path) -> None:
    """Before Python 3.14, with the import from __future__ that such annotations need."""
    source = SCRIPT
    if sys.version_info < (3, 14):
        source = "from __future__ import annotations\n" + source
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, "script.py", "exec", dont_inherit=True), script)
    trainer = helios.Trainer(run_name="run", chkpt_root=tmp_path, total_steps=4, valid_frequency=2)
    assert trainer.fit(script["Net"]("net"), script["Data"]())
