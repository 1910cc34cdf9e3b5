"""One replica by epochs: a last window that is shorter, saves in mid-epoch, an early stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import helios
from helios.data.samplers import ResumableSampler
from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    NumberData,
    Record,
    Recorder,
    describe_optimizer,
    draw,
    fit,
)

TOTAL = 9
SAVED = (2, 5, 17)


class Backwards(ResumableSampler):
    """An order that is drawn once a pass."""

    def __init__(self, length: int) -> None:
        super().__init__(batch_size=4)
        self.length = length

    def __iter__(self) -> Iterator[int]:
        shift = draw()[0] + self.epoch
        return iter([(shift - index) % self.length for index in range(self.length)])

    def __len__(self) -> int:
        return self.length


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.5)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=1
        )
        self.decay = torch.optim.lr_scheduler.MultiplicativeLR(self.optimizer, lambda epoch: 0.5)
        self.scheduler_interval = {"plateau": "validation:error", "decay": "epoch"}
        self.best = float("inf")

    def train_step(self, batch: Any, state: Any) -> dict[str, torch.Tensor]:
        return {"loss": super().train_step(batch, state)}

    def have_metrics_improved(self) -> bool:
        has_improved = self.metrics["error"] < self.best
        self.best = min(self.best, self.metrics["error"])
        self.record.line("have_metrics_improved", has_improved, self.best)
        return has_improved

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer), best=self.best)
        self.note(plateau=(self.plateau.best, self.plateau.num_bad_epochs, self.decay.last_epoch))


class Asking(helios.Plugin):
    """Asks for saves in mid-epoch."""

    def __init__(self) -> None:
        super().__init__("asking")

    def setup(self) -> None: ...

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        if state.global_iteration % 5 == 2:
            self.context.request_checkpoint()


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    fit(
        root,
        Learner(record, "epochs"),
        NumberData(18, 5, batch_size=4, sampler=Backwards(18)),
        train_unit="epoch",
        total_steps=TOTAL,
        valid_frequency=1,
        # Five batches of an epoch: the last window has one.
        accumulation_steps=2,
        early_stop_cycles=2,
        random_seed=4,
        plugins=[counting, Recorder(record), Asking()],
    )
    record.end.append(counting.describe())
    return record.result()
