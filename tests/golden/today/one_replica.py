"""One replica by iterations: what training changes in a model's plain values is state."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
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
    draw,
    fit,
)

TOTAL = 9
SAVED = (6, 12)


class Shadow:
    def __init__(self) -> None:
        self.sum = torch.zeros(4, dtype=torch.float64)
        self.updates = 0

    def update(self, weight: torch.Tensor) -> None:
        self.sum += weight.detach()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sum, self.updates = state_dict["sum"].clone(), state_dict["updates"]


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.side = torch.nn.ModuleDict({"a": Exact(), "b": Exact()})
        self.side["a"].requires_grad_(False)
        self.shadow = Shadow()
        self.shadows = [Shadow(), {"inner": Shadow()}]
        parameters = [
            {"params": self.net.parameters(), "momentum": 0.5},
            {"params": self.side.parameters(), "lr": 0.125},
        ]
        self.optimizer = torch.optim.SGD(parameters, lr=0.25)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.5)
        self.count, self.half, self.name_of_last, self.nothing = 0, 0.5, "", None
        self.history: list[Any] = []
        self.alias = self.history
        self.window: collections.deque[int] = collections.deque(maxlen=3)
        self.groups: dict[Any, Any] = {"set": set(), 7: frozenset(), "nested": {"pair": (0, [])}}
        self.table = collections.defaultdict(int)
        self.ordered = collections.OrderedDict()
        self.array = np.zeros(3, dtype=np.int32)
        self.scalar = np.float64(0)
        self.loose = torch.zeros(2, dtype=torch.int64)
        self.shared = self.loose[1:]
        self.path = Path("start")
        self.untouched = {"set": {1, 2}}

    def on_training_epoch_start(self, current_epoch: int) -> None:
        if current_epoch == 2:
            self.side["a"].requires_grad_(True)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers) + self.side["b"].loss(ids, numbers)
        if ids[0] % 2:
            loss = loss + self.side["a"].loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_batch_end(self, state: Any, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        number = state.global_iteration
        self.shadow.update(self.net.weight)
        self.shadows[0].update(self.side["a"].weight)
        self.shadows[1]["inner"].update(self.side["b"].weight)
        self.count += 1
        self.half += number
        self.name_of_last = f"batch {number}"
        self.nothing = None if number % 2 else number
        self.history.append((number, draw()))
        self.window.append(number)
        self.groups["set"].add(number % 4)
        self.groups[7] |= {number}
        self.groups["nested"]["pair"] = (number, [*self.groups["nested"]["pair"][1], number])
        self.table[number % 3] += 1
        self.ordered[-number] = None
        self.array[number % 3] += number
        self.scalar = np.float64(self.scalar + number)
        self.loose += number
        self.path = Path("start") / str(number)

    def have_metrics_improved(self) -> bool:
        return self.metrics["error"] <= 100

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(a=self.side["a"].describe(), b=self.side["b"].describe())
        self.note(optimizer=describe_optimizer(self.optimizer))
        self.note(scheduler=(self.scheduler.last_epoch, self.scheduler.get_last_lr()))
        shadows = [self.shadow, self.shadows[0], self.shadows[1]["inner"]]
        self.note(shadows=[(shadow.updates, shadow.sum.tolist()) for shadow in shadows])
        self.note(count=self.count, half=self.half, name=self.name_of_last, nothing=self.nothing)
        self.note(history=self.history, is_alias=self.alias is self.history, window=self.window)
        self.note(groups=[sorted(self.groups["set"]), sorted(self.groups[7])])
        self.note(nested=self.groups["nested"], table=self.table, ordered=list(self.ordered))
        self.note(array=(self.array.dtype.name, self.array.tolist()), scalar=float(self.scalar))
        self.note(loose=self.loose, shared=self.shared, path=self.path.as_posix())
        self.loose += 1
        self.note(shares=self.shared, untouched=self.untouched)


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    counting = Counting()
    fit(
        root,
        Learner(record, "one"),
        NumberData(26, 6, batch_size=4, shuffle=True),
        total_steps=TOTAL,
        valid_frequency=3,
        accumulation_steps=2,
        random_seed=3,
        plugins=[counting, Plain(), Recorder(record)],
    )
    record.end.append(counting.describe())
    return record.result()
