"""Data of other kinds: mixtures, packs, streams, steps, and loader workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import helios
from helios.data import Mixture, Packed, Steps, Stream
from tests.golden.today.exact import Exact, ExactModel, Numbers, Record, draw, fit

NAME = "sources"
TOTAL = 8
SAVED = (3, 6)
VARIANTS = ("mixture", "packed", "read_again", "stateful", "steps", "workers")


class Packs(Dataset):
    """Packs of documents, as numbers."""

    def __init__(self) -> None:
        self.packs = Packed([3, 4, 2, 9, 1, 5, 7, 2, 8, 4, 6, 3, 5], 4)
        self.fingerprint = self.packs.fingerprint

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        numbers = [i + j for i, start, stop in self.packs[index] for j in range(start, stop)]
        return index, torch.tensor((numbers + [0] * 4)[:4]) + draw()[0] % 4


class Part:
    """A part of a stream, with a state if asked."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.position = index, count, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 12:
            self.position += 1
            number = self.position * self.count + self.index
            yield number, torch.tensor([number % 5, number % 7, *draw()[:2]]) % 8
        self.position = 0


class StatefulPart(Part):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def make_dataset(variant: str) -> Any:
    if variant == "mixture":
        sources = {"many": (Numbers(17), 0.75), "few": (Numbers(5), 0.25)}
        return Mixture(sources)
    if variant == "packed":
        return Packs()
    if variant in ("read_again", "stateful"):
        part = Part if variant == "read_again" else StatefulPart
        return Stream(lambda index, count: part(index, count))
    return Steps(5) if variant == "steps" else Numbers(22)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.5)

    def train_step(self, batch: Any, state: Any) -> Any:
        if isinstance(batch, int):
            batch = torch.tensor([batch] * 2), torch.randint(0, 8, (2, 4)) + batch
        return super().train_step(batch, state)

    def on_training_end(self) -> None:
        self.describe("net")


class Data(helios.DataModule):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant

    def setup(self) -> None:
        dataset = make_dataset(self.variant)
        if self.variant == "steps":
            self._train_dataset = dataset
            return
        is_stream = isinstance(dataset, Stream)
        num_workers = 2 if self.variant == "workers" else 0
        params = helios.DataLoaderParams(
            batch_size=2, shuffle=not is_stream, num_workers=num_workers, drop_last=True
        )
        self._train_dataset = self._create_dataset(dataset, params)


def train(root: Path, variant: str) -> dict[str, list[str]]:
    record = Record()
    fit(
        root,
        Learner(record, "sources"),
        Data(variant),
        total_steps=TOTAL,
        num_replicas=2,
        random_seed=20,
    )
    return record.result()
