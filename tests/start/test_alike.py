"""Processes that are not alike are told so, instead of waiting for ever."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import helios
from helios.errors import UsageError
from tests.support.models import Fitting
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks


class Numbers(helios.DataModule):
    def __init__(self, length: int, num_workers: int) -> None:
        super().__init__()
        self.length = length
        self.num_workers = num_workers

    def setup(self) -> None:
        dataset = TensorDataset(torch.ones(self.length, 4))
        params = helios.DataLoaderParams(batch_size=2, num_workers=self.num_workers)
        self._train_dataset = self._create_dataset(dataset, params)
        self._valid_dataset = self._create_dataset(dataset, params)


class Linear(Fitting):
    def make_net(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def valid_step(self, batch: Any, step: int) -> None:
        """Nothing to score."""


def train_unlike(rank: int, kind: str, folder: Path) -> tuple[str, str]:
    records: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("helios").addHandler(handler)
    is_first = rank == 0
    options: dict[str, Any] = {"total_steps": 2, "num_replicas": 2, "plugins": []}
    data = Numbers(8 if kind == "data" and is_first else 12, num_workers=0)
    if kind == "plugins" and is_first:
        options["plugins"] = [Quiet("first")]
    elif kind == "order":
        plugins = [Quiet("first"), Quiet("second")]
        options["plugins"] = plugins if is_first else plugins[::-1]
    elif kind == "folder" and is_first:
        options |= {"chkpt_root": folder, "chkpt_frequency": 1}
    trainer = helios.Trainer(train_unit="iteration", use_cpu=True, print_banner=False, **options)
    with pytest.raises(UsageError) as caught:
        trainer.fit(Linear("net"), data)
    logging.getLogger("helios").removeHandler(handler)
    assert len(records) == 1
    return str(caught.value), records[0]


DIFFERENCES = {
    "plugins": ("the plugins", "nothing", "first (Quiet)"),
    "order": ("the plugins", "second (Quiet), first (Quiet)", "first (Quiet), second (Quiet)"),
    "folder": ("a folder for checkpoints", "False", "True"),
}


def train_all_unlike(rank: int, folder: Path) -> dict[str, tuple[str, str]]:
    return {kind: train_unlike(rank, kind, folder) for kind in (*DIFFERENCES, "data")}


def test_what_differs_between_processes_is_named_by_all(tmp_path: Path) -> None:
    firsts, seconds = run_ranks(train_all_unlike, 2, tmp_path)
    for kind, (what, there, here) in DIFFERENCES.items():
        (first, told), (second, hinted) = firsts[kind], seconds[kind]
        assert first == second
        assert first.startswith(
            f"All processes must agree on {what}, but rank 1 of 2 has {there}, and rank 0 has "
            f"{here}. "
        )
        # In full by rank 0, in a line by the other.
        assert told.startswith("Training ended with an error")
        assert hinted.endswith(" ends because another process has ended.")
    assert firsts["data"][0] == seconds["data"][0]
    there, _, here = firsts["data"][0].partition("and rank 0")
    assert "agree on the training data, loader 0, but rank 1 of 2 has {" in there
    assert "'length': 12" in there
    assert "'length': 8" in here
