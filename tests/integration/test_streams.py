"""Runs over streams: resumed anywhere, from states of the parts or by reading an epoch again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.data import Stream
from helios.errors import RunMismatchError
from tests.data.streams import NUM_SHARDS, PER_SHARD, Shards, read_rows
from tests.support.quiet import Quiet
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexData, IndexModule, Outcome, Setting, noisy_collate, train

NUM_SAMPLES = NUM_SHARDS * PER_SHARD


def make_rows() -> Stream:
    return Stream(partial(read_rows, make=IndexData().__getitem__))


def make_shards(buffer_size: int = 0) -> Stream:
    shards = Shards(buffer_size=buffer_size, make=IndexData().__getitem__)
    return Stream(shards)


class StreamModule(IndexModule):
    """Training data that is a stream, and validation data that is one, too."""

    def __init__(self, setting: Setting, make: Callable[[], Stream]) -> None:
        super().__init__(setting)
        self.make = make

    def setup(self) -> None:
        super().setup()
        params = helios.DataLoaderParams(
            batch_size=self.setting.batch_size,
            collate_fn=noisy_collate,
            num_workers=self.setting.num_workers,
        )
        self._train_dataset = self._create_dataset(self.make(), params)
        if self.setting.validates:
            self._valid_dataset = self._create_dataset(make_rows(), params)


def make_setting(make: Callable[[], Stream], **more: Any) -> Setting:
    options = {"total_steps": 12, "batch_size": 7, "valid_frequency": 5, **more}
    return Setting(make_data=partial(StreamModule, make=make), **options)


def sidecars(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("small/*_iter_*.json"))]


class Disturb(Quiet):
    """Draws in hooks between batches, and changes weights by that."""

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self._act()

    def on_validation_end(self, validation_cycle: int) -> None:
        self._act()

    def _act(self) -> None:
        with torch.no_grad():
            self.trainer.model.net[-1].bias += 0.1 * torch.rand(1)  # type: ignore[union-attr]


@pytest.mark.shows("P82")
@pytest.mark.parametrize("make", [make_rows, make_shards, partial(make_shards, 4)])
def test_a_run_on_a_stream_resumes_everywhere(tmp_path: Path, make: Callable[[], Stream]) -> None:
    setting = make_setting(make, total_steps=8, accumulation=2)
    # The end of an epoch is one of the places where a stream differs from other data.
    whole = resume_everywhere(
        lambda folder: train(folder, setting, Disturb()), tmp_path, is_whole=True
    )
    ids = [i for batch, _ in whole.records.values() for i in batch]
    assert sorted(ids[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert len(whole.records) == 16
    has_state = make is make_shards
    for sidecar in sidecars(tmp_path / "whole"):
        assert sidecar["level"] == "restart"
        assert sidecar["claims"] == (
            ["claimed by Shards, tried at the first start"] if has_state else []
        )
        assert not sidecar["missing"]


@pytest.mark.shows("P82")
def test_epochs_of_a_stream_resume_everywhere_also_inside(tmp_path: Path) -> None:
    setting = make_setting(make_rows, unit="epoch", total_steps=3, accumulation=4, requests=True)
    with_workers = dataclasses.replace(setting, num_workers=1)

    def resume(folder: Path) -> Outcome:
        return train(folder, with_workers)

    resume_everywhere(lambda folder: train(folder, setting), tmp_path, make_resumed=resume)


def test_another_source_is_refused(tmp_path: Path) -> None:
    train(tmp_path, make_setting(make_shards, total_steps=3))
    with pytest.raises(RunMismatchError, match=r"dataset: .*Shards.* -> .*Stream\(partial\)"):
        train(tmp_path, make_setting(make_rows))
