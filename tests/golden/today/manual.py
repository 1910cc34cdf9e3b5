"""Manual steps: gradients that are open when a checkpoint is written, and optimizers by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.golden.today.exact import (
    Counting,
    Exact,
    ExactModel,
    NumberData,
    Record,
    Recorder,
    describe_optimizer,
    fit,
)

TOTAL = 10
SAVED = (2, 4, 7)


class Sign(torch.optim.Optimizer):
    """Moves each weight by the sign of all its gradients' sum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["sum"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                state["sum"] += parameter.grad
                parameter -= group["lr"] * state["sum"].sign()


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net, self.other, self.rounded = Exact(), Exact(torch.float32), Exact(torch.float32)
        self.first = Sign(self.net.parameters(), lr=0.5)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.25, momentum=0.5)
        # What it makes of weights is rounded: only its counters are compared.
        self.adam = torch.optim.Adam(self.rounded.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.second, 0.5)

    def train_step(self, batch: Any, state: Any) -> None:
        ids, numbers = batch
        number = state.global_iteration
        loss = self.net.loss(ids, numbers)
        loss.backward()
        other = self.other.loss(ids, numbers)
        other.backward()
        self.rounded.loss(ids, numbers).backward()
        self.record.step(number, ids, numbers, loss, other, self.net.weight.grad)
        if number % 3 == 0:
            self.first.step()
            self.first.zero_grad()
        if number % 2 == 0:
            self.second.step()
            self.second.zero_grad(set_to_none=False)
            self.adam.step()
            self.adam.zero_grad()
        if number % 4 == 0:
            self.scheduler.step()

    def on_training_end(self) -> None:
        self.describe("net", "other")
        self.note(first=describe_optimizer(self.first), second=describe_optimizer(self.second))
        steps = [self.adam.state[p]["step"].item() for p in self.rounded.parameters()]
        self.note(adam=steps, scheduler=self.scheduler.last_epoch)
        self.note(rounded={k: v for k, v in self.rounded.describe().items() if k == "seen"})


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    fit(
        root,
        Learner(record, "manual"),
        NumberData(18, batch_size=4, shuffle=True, drop_last=True),
        total_steps=TOTAL,
        random_seed=6,
        plugins=[counting, Recorder(record)],
    )
    record.end.append(counting.describe())
    return record.result()
