"""Ledgers for 1, 2 and 4 replicas, with losses of three types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import helios
from tests.golden.today.exact import Exact, ExactModel, NumberData, Record, fit
from tests.golden.today.manual import Sign

NAME = "ledger"
TOTAL = 6
SAVED = (4,)
KEPT = ("ledger.jsonl",)
VARIANTS = {
    f"v{replicas}_{name}": (replicas, dtype)
    for replicas, name, dtype in (
        (1, "fp32", torch.float32),
        (1, "bf16", torch.bfloat16),
        (1, "fp64", torch.float64),
        (2, "fp32", torch.float32),
        (4, "fp64", torch.float64),
    )
}


class Learner(ExactModel):
    def __init__(self, record: Record, dtype: torch.dtype) -> None:
        super().__init__(record, "ledger")
        self.dtype = dtype

    def setup(self, fast_init: bool = False) -> None:
        self.net, self.other = Exact(), Exact(torch.float32)
        # The hash of an optimizer covers its options, in which versions of PyTorch differ.
        parameters = [{"params": self.net.parameters()}, {"params": self.other.parameters()}]
        self.optimizer = Sign(parameters, lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train_step(self, batch: Any, state: Any) -> dict[str, Any]:
        ids, numbers = batch
        loss = (self.net.loss(ids, numbers) + self.other.loss(ids, numbers)).to(self.dtype)
        self._loss_items["loss"] = loss.detach()
        self._loss_items["size"] = torch.tensor(float(len(ids)), dtype=self.dtype)
        self.record.step(state.global_iteration, ids, numbers, loss.detach().double())
        return {"loss": loss, "size": len(ids)}

    def on_training_batch_end(self, state: Any, should_log: bool = False) -> None:
        helios.Model.on_training_batch_end(self, state, should_log)

    def on_training_end(self) -> None:
        self.describe("net", "other")


def train(root: Path, variant: str) -> dict[str, list[str]]:
    replicas, dtype = VARIANTS[variant]
    record = Record()
    fit(
        root,
        Learner(record, dtype),
        NumberData(64, batch_size=4, shuffle=True),
        total_steps=TOTAL,
        # The end of an epoch cuts no window.
        accumulation_steps=2 if replicas == 1 else 1,
        # For the norm: nothing is clipped.
        clip_norm=2.0**20,
        num_replicas=replicas,
        random_seed=15,
    )
    text = (root / NAME / "ledger.jsonl").read_text("utf-8")
    record.end += [f"ledger {line}" for line in text.splitlines()]
    return record.result()
