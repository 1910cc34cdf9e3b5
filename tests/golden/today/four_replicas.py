"""Four replicas on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    NumberData,
    Plain,
    Record,
    Recorder,
    describe_optimizer,
    fit,
)

TOTAL = 10
SAVED = (3, 4, 6)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact(torch.float32)
        self.some = Exact(torch.float32)
        parameters = [*self.net.parameters(), *self.some.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.25)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.total = 0.0

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        if (ids % 3 == 0).any():
            loss = loss + self.some.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss, self.net.seen, self.net.last)
        return loss

    def on_training_batch_end(self, state: Any, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.total += float(self.loss_items["loss"])

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        # Not recorded: which process has which batch depends on their number.
        ids, numbers = batch
        return {"error": ((self.net(ids, numbers) - ids).abs().sum(), len(ids))}

    def on_training_end(self) -> None:
        self.describe("net", "some")
        self.note(optimizer=describe_optimizer(self.optimizer), total=self.total)


class Quiet(Recorder):
    """Leaves out what comes as often as a process has batches of a validation."""

    def on_validation_batch_end(self, step: int) -> None:
        pass


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    fit(
        root,
        Learner(record, "four"),
        NumberData(30, 16, batch_size=2, shuffle=True),
        total_steps=TOTAL,
        valid_frequency=4,
        num_replicas=4,
        clip_value=2.0,
        random_seed=5,
        plugins=[counting, Plain(), Quiet(record)],
    )
    record.end.append(counting.describe())
    return record.result()
