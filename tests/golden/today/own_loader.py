"""A loader that Helios did not make, split by rank, whose state each process has of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import helios
from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    Record,
    Recorder,
    describe_optimizer,
    draw,
    fit,
)

TOTAL = 7
SAVED = (2, 3, 5)


class Stream:
    """Five batches a pass, whose numbers follow from a register of this process."""

    def __init__(self, rank: int) -> None:
        self.register, self.position = 17 + 40 * rank, 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        while self.position < 5:
            self.position += 1
            numbers = []
            for _ in range(8):
                self.register = (self.register * 75 + 74) % 65537
                numbers.append(self.register % 8)
            ids = torch.tensor(numbers[:2])
            yield ids, torch.tensor(numbers).view(2, 4) + draw()[0] % 4
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"register": self.register, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.register, self.position = state_dict["register"], state_dict["position"]


class Data(helios.DataModule):
    def setup(self) -> None: ...

    def train_dataloader(self) -> Any:
        return Stream(self.trainer.rank), None


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25)

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer))


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    fit(
        root,
        Learner(record, "stream"),
        Data(),
        total_steps=TOTAL,
        num_replicas=2,
        random_seed=10,
        plugins=[counting, Recorder(record)],
    )
    record.end.append(counting.describe())
    return record.result()
