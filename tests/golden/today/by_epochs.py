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
    Numbers,
    Record,
    Recorder,
    bits,
    describe_optimizer,
    draw,
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
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return {"loss": loss}

    def have_metrics_improved(self) -> bool:
        has_improved = self.metrics["error"] < self.best
        self.best = min(self.best, self.metrics["error"])
        self.record.line("have_metrics_improved", has_improved, self.best)
        return has_improved

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer), best=self.best)
        self.note(plateau=(self.plateau.best, self.plateau.num_bad_epochs, self.decay.last_epoch))


class Data(helios.DataModule):
    def setup(self) -> None:
        # Five batches, in windows of two: the last one of an epoch has one batch.
        params = helios.DataLoaderParams(batch_size=4, sampler=Backwards(18))
        self._train_dataset = self._create_dataset(Numbers(18), params)
        self._valid_dataset = self._create_dataset(
            Numbers(5), helios.DataLoaderParams(batch_size=4)
        )


class Asking(helios.Plugin):
    """Asks for saves in mid-epoch."""

    def __init__(self) -> None:
        super().__init__("asking")

    def setup(self) -> None: ...

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        if state.global_iteration % 5 == 2:
            self.context.request_checkpoint()


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    trainer = helios.Trainer(
        train_unit="epoch",
        total_steps=TOTAL,
        valid_frequency=1,
        chkpt_frequency=1,
        chkpt_root=root,
        accumulation_steps=2,
        early_stop_cycles=2,
        random_seed=4,
        print_banner=False,
        use_cpu=True,
        plugins=[counting, Recorder(record), Asking()],
        **options,
    )
    trainer.fit(Learner(record, "epochs"), Data())
    record.end.append(f"counting {counting.sums} {bits(counting.last)}")
    return record.result()
