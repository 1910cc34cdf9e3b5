"""Processes that have made other data than rank 0 are told so before the first step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import helios
from helios.errors import UsageError
from tests.support.models import Fitting
from tests.support.ranks import run_ranks

COUNT = 24
AT_THE_TOP = np.random.default_rng().permutation(COUNT)


class Rows(Dataset[torch.Tensor]):
    """Samples that are their index."""

    def __init__(self, length: int = COUNT) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class SplitAtTheTop(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(int(AT_THE_TOP[index]))


class Holding(Rows):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Ordered(Rows):
    """Read in the order of a sampler that each process draws."""


class Free(Holding):
    unsaved = ("held",)


class Transform:
    """Shown by its address, or anything else that differs from process to process."""

    def __repr__(self) -> str:
        return f"<Transform at {random.SystemRandom().random()}>"


def draw() -> list[int]:
    """Return a permutation that no seed of the run decides."""
    return [*map(int, np.random.default_rng().permutation(COUNT))]


def files(folder: str, order: list[int]) -> list[tuple[str, int]]:
    return [(f"{folder}/{number}.png", number % 3) for number in order]


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a split in setup": (lambda: Subset(Rows(), draw()[:20]), "data set.indices"),
    "a split at the top of the script": (lambda: Subset(Rows(), AT_THE_TOP), "data set.indices"),
    "a split that only a method names": (lambda: SplitAtTheTop(), "data set.AT_THE_TOP"),
    "other values": (lambda: TensorDataset(torch.tensor(draw()).view(6, 4)), "data set.tensors"),
    "a list of samples": (lambda: [torch.tensor(draw()[:4]) for _ in range(8)], "data set, but"),
    "other noise on the same values": (
        lambda: Holding({"noise": np.random.default_rng().normal(size=3)}),
        "data set.held",
    ),
    "file names": (lambda: Holding(files("/data", draw())), "data set.held"),
    "a shuffled table": (
        lambda: Holding(pd.DataFrame({"name": list("abcdefgh" * 3)}).iloc[draw()]),
        "data set.held",
    ),
    "a split in a sampler": (Ordered, "the first samples"),
    "a part of another data set": (
        lambda: ConcatDataset([Rows(), Subset(Rows(), draw())]),
        "data set.datasets.1.indices",
    ),
}

ALIKE: dict[str, Callable[[], Any]] = {
    "numpy.random in setup": lambda: Subset(Rows(), np.random.permutation(COUNT)),
    "random and torch in setup": lambda: Subset(
        Rows(), random.sample(range(COUNT), 20) + torch.randperm(4).tolist()
    ),
    "what is declared": lambda: Free(np.random.default_rng().normal(size=3)),
    "objects": lambda: Holding([Transform(), {"crop": Transform(), 2: Transform}, lambda: None]),
    "entries and members in another order": lambda: Holding(
        [dict.fromkeys(draw(), 1), set(map(str, draw()))]
    ),
    "options of the process": lambda: Holding(
        {"device": f"cuda:{random.SystemRandom().random()}", "nested": {"pid": os.getpid()}}
    ),
    "other folders": lambda: Holding(files(f"/node{random.SystemRandom().random()}", [1, 2])),
}


class Data(helios.DataModule):
    """Data of a form, in one phase; that of the others is equal in all processes."""

    def __init__(self, form: str, phase: str) -> None:
        super().__init__()
        self.form, self.phase = form, phase

    def setup(self) -> None:
        make = OTHERS[self.form][0] if self.form in OTHERS else ALIKE[self.form]
        params = helios.DataLoaderParams(batch_size=2)
        for phase in ("train", "valid", "test"):
            data = make() if phase == self.phase else Rows()
            if isinstance(data, Ordered) and phase == self.phase:
                lists = BatchSampler(SubsetRandomSampler(draw()[:20]), 2, drop_last=False)
                params = helios.DataLoaderParams(batch_sampler=lists)
            setattr(self, f"_{phase}_dataset", self._create_dataset(data, params))


class Linear(Fitting):
    def make_net(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def valid_step(self, batch: Any, step: int) -> None:
        """Nothing to score."""

    test_step = valid_step


def start(rank: int, forms: list[str], phase: str, num_replicas: int) -> dict[str, str]:
    """Return by form of the data the error of a start."""
    found = {}
    for form in forms:
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=1,
            num_replicas=num_replicas,
            use_cpu=True,
            print_banner=False,
        )
        call = partial(trainer.test, checkpoint=None) if phase == "test" else trainer.fit
        try:
            call(Linear("net"), Data(form, phase))
            found[form] = ""
        except UsageError as error:
            found[form] = str(error)
    return found


def test_processes_with_other_data_do_not_start() -> None:
    first, second = run_ranks(start, 2, [*OTHERS], "train", 2)
    assert first == second
    for form, (_, place) in OTHERS.items():
        assert "agree on the training data" in first[form]
        assert place in first[form]
        assert "rank 1 of 2 has" in first[form]


def start_evaluations(rank: int) -> list[str]:
    form = "a split in setup"
    return [start(rank, [form], phase, 3)[form] for phase in ("valid", "test")]


def test_other_data_of_an_evaluation_is_found_too() -> None:
    for validated, tested in run_ranks(start_evaluations, 3):
        assert "the validation data" in validated
        assert "the testing data" in tested
        assert "indices" in validated
        assert "indices" in tested


def test_what_the_error_advises_lets_processes_start() -> None:
    assert run_ranks(start, 2, [*ALIKE], "train", 2) == [dict.fromkeys(ALIKE, "")] * 2
