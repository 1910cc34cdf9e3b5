"""Windows of four batches, a validation, and plugins of Helios with their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import helios
from helios.plugins import EarlyStopping, GradientNormMonitor, Metrics, NaNGuard, TimeLimit
from tests.golden.today.exact import Exact, ExactModel, NumberData, Record, describe_optimizer, fit

NAME = "windows"
TOTAL = 6
SAVED = (8, 12)


class Sum:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = self.count = 0

    def update(self, ids: Any) -> None:
        self.total += int(ids.sum())
        self.count += len(ids)

    def compute(self) -> float:
        return self.total * 1024 + self.count

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total, self.count = state_dict["total"], state_dict["count"]

    def merge_state(self, other: Any) -> None:
        self.total += other.total
        self.count += other.count


class Asking(helios.Plugin):
    """Asks for saves within windows, and records what is logged."""

    unsaved = ("record",)

    def __init__(self, record: Record) -> None:
        super().__init__("asking")
        self.record = record

    def setup(self) -> None: ...

    def on_log(self, values: dict[str, float], state: Any) -> None:
        self.record.line("on_log", sorted(values.items()), state.global_iteration)

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.context.request_checkpoint()


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=0
        )
        self.scheduler_interval = {"plateau": "validation:error"}

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        if 9 <= state.global_iteration <= 12:
            loss = loss * float("nan")
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, numbers = batch
        return {"error": ((self.net(ids, numbers) - ids).abs().sum(), len(ids))}

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer))
        self.note(plateau=(self.plateau.best, self.plateau.num_bad_epochs))


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    fit(
        root,
        Learner(record, "windows"),
        NumberData(64, 8, {"batch_size": 2, "shuffle": True}, batch_size=2, shuffle=True),
        total_steps=TOTAL,
        valid_frequency=2,
        chkpt_frequency=2,
        accumulation_steps=4,
        num_replicas=2,
        random_seed=19,
        plugins=[
            EarlyStopping("error", mode="min", patience=2),
            NaNGuard("skip", limit=4),
            Metrics(
                {"sum": Sum()},
                inputs=lambda context: (context.batch[0],),
                phase=helios.Phase.TRAINING,
            ),
            GradientNormMonitor(),
            TimeLimit("9-00:00:00"),
            Asking(record),
        ],
    )
    return record.result()
