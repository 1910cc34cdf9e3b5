"""What every replica changes on its own: a process for each, and each goes on with its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import helios
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
SAVED = (2, 4)


class Meter:
    """An object with a state."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25)
        self.level, self.seen = 0, []
        self.meter = Meter()
        base = torch.zeros(6, dtype=torch.float64)
        self.low, self.high = base[:4], base[2:]

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        self.level = (self.level + int(ids.sum())) % 8
        self.seen.append(ids.tolist())
        self.meter.total += self.level
        self.low += self.level
        self.high += len(ids)
        scale = 1 + (self.level + self.meter.total + int(self.low[3]) + int(self.high[0])) % 4
        loss = self.net.loss(ids, numbers) * scale
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer), level=self.level, seen=self.seen)
        self.note(meter=self.meter.total, low=self.low, high=self.high)


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(14), params)


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        # Sums over four replicas are halved twice: three would round.
        num_replicas=4,
        random_seed=9,
        print_banner=False,
        use_cpu=True,
        plugins=[counting, Recorder(record)],
        **options,
    )
    trainer.fit(Learner(record, "by_rank"), Data())
    record.end.append(f"counting {counting.sums} {bits(counting.last)}")
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
