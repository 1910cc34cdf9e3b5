"""What each of two replicas changes on its own, beside values: a process for each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import helios
from tests.golden.today.exact import (
    Exact,
    ExactModel,
    NumberData,
    Record,
    Recorder,
    bits,
    describe_optimizer,
    fit,
)

NAME = "places"
TOTAL = 7
SAVED = (2, 3, 5)


class Meter:
    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class Holder:
    """Holds a meter that its state lacks."""

    def __init__(self) -> None:
        self.meter, self.calls = Meter(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]


def build(owner: Any) -> None:
    owner.meters = {"a": Meter(), "b": Meter(), "c": Meter()}
    owner.current, owner.holder = owner.meters["a"], Holder()
    owner.torch_random = torch.Generator()
    owner.python_random, owner.numpy_random = random.Random(3), np.random.default_rng(4)
    owner.level, owner.seen = 0, []


def move(owner: Any, number: int) -> int:
    """Change everything by a number that replicas do not share."""
    for _ in range(1 + number % 3):
        drawn = int(torch.randint(0, 8, (1,), generator=owner.torch_random))
        drawn += owner.python_random.getrandbits(3) + int(owner.numpy_random.random() * 8)
    owner.current.total += drawn
    owner.holder.calls += 1
    owner.holder.meter.total += number
    owner.level = (owner.level + drawn + owner.holder.meter.total) % 16
    owner.seen.append(drawn)
    owner.current = owner.meters["abc"[number % 3]]
    first = "abc"[owner.level % 3]
    owner.meters[first] = owner.meters.pop(first)
    totals = [part.total * place for place, part in enumerate(owner.meters.values(), 1)]
    return (owner.level + sum(totals) + owner.current.total) % 8


def describe(owner: Any) -> str:
    names = {id(part): name for name, part in owner.meters.items()}
    totals = {name: part.total for name, part in owner.meters.items()}
    holder = (owner.holder.calls, owner.holder.meter.total)
    return f"{totals} {names[id(owner.current)]} {holder} {owner.level} {owner.seen}"


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25)
        build(self)

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers) * (1 + move(self, int(ids.sum())))
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        return loss

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(optimizer=describe_optimizer(self.optimizer), places=describe(self))


class Place(helios.Plugin):
    """A plugin whose attributes differ between processes."""

    unsaved = ("record",)

    def __init__(self, record: Record) -> None:
        super().__init__("place")
        self.record = record

    def setup(self) -> None:
        build(self)

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        moved = move(self, state.global_iteration + self.rank)
        self.record.steps.append(f"{state.global_iteration} place {moved}")


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    place = Place(record)
    fit(
        root,
        Learner(record, "places"),
        NumberData(16, batch_size=2, shuffle=True),
        total_steps=TOTAL,
        num_replicas=2,
        random_seed=13,
        plugins=[place, Recorder(record)],
    )
    record.end.append(f"place {bits(describe(place))}")
    return record.result()
