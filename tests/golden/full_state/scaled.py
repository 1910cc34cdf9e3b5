"""fp16 with its loss scaler and skipped steps, a loader with a state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import helios
from tests.golden.today.exact import (
    Exact,
    ExactModel,
    Record,
    Recorder,
    describe_optimizer,
)

NAME = "scaled"
TOTAL = 8
SAVED = (3, 7)


class Stream:
    """Five batches a pass, whose numbers follow from a register."""

    def __init__(self) -> None:
        self.register, self.position = 17, 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        while self.position < 5:
            self.position += 1
            numbers = []
            for _ in range(8):
                self.register = (self.register * 75 + 74) % 65537
                numbers.append(self.register % 8)
            yield torch.tensor(numbers[:2]), torch.tensor(numbers).view(2, 4)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"register": self.register, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.register, self.position = state_dict["register"], state_dict["position"]


class Data(helios.DataModule):
    def setup(self) -> None: ...

    def train_dataloader(self) -> Any:
        return Stream(), None


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        if state.global_iteration in (4, 5):
            loss = loss * float("inf")
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer))


def train(root: Path, **options: Any) -> dict[str, list[str]]:
    record = Record()
    precision = helios.Precision.fp16(init_scale=4.0, growth_interval=2)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        precision=precision,
        random_seed=16,
        print_banner=False,
        use_cpu=True,
        plugins=[Recorder(record)],
        **options,
    )
    trainer.fit(Learner(record, "scaled"), Data())
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
