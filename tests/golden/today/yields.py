"""A YieldLoop: two networks, two optimizers and their schedulers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import helios
from helios.loops import YieldLoop
from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    Numbers,
    Record,
    Recorder,
    bits,
    describe_optimizer,
)

TOTAL = 6
SAVED = (2, 4, 8)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net, self.critic = Exact(), Exact()
        self.slow = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)
        self.fast = torch.optim.SGD(self.critic.parameters(), lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.fast, 2, gamma=0.5)
        self.seen = 0

    def train_step(self, batch: Any, state: Any) -> Iterator[Any]:
        ids, numbers = batch
        guess = self.net(ids, numbers)
        target = self.critic(ids, numbers)
        self.seen += len(ids)
        first = (target - guess.detach()).abs().sum() / 8
        self.record.step(state.global_iteration, ids, numbers, first)
        yield first
        second = (self.critic(ids, numbers).detach() - guess).abs().sum() / 8
        self.record.step(state.global_iteration, ids, numbers, second)
        yield {"loss": second, "size": len(ids)}

    def on_training_end(self) -> None:
        self.describe("net", "critic")
        self.note(slow=describe_optimizer(self.slow), fast=describe_optimizer(self.fast))
        self.note(scheduler=self.scheduler.last_epoch, seen=self.seen)


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(10), params)


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        accumulation_steps=2,
        random_seed=7,
        print_banner=False,
        use_cpu=True,
        plugins=[counting, Recorder(record)],
        **options,
    )
    loop = YieldLoop(optimizers=("fast", "slow"))
    trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    trainer.fit(Learner(record, "yields"), Data())
    record.end.append(f"counting {counting.sums} {bits(counting.last)}")
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
