"""Workers that die, or do not answer, in the middle of a pass are replaced, and no bit changes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import helios
from helios.core import rng
from helios.data import Stream, create_dataloader, worker_recovery
from helios.data.phase_sources import open_source
from helios.data.source import Shard
from helios.errors import ArgumentError, WorkerError
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.data.datasets import FETCH, Augmented, Indices
from tests.support import elastic, stuck_workers
from tests.support.elastic import Elastic
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LENGTH = 24
PATIENT = 3.0
"""Longer than any worker needs for a batch on a busy machine."""
LOGGER = worker_recovery.__name__


class Fatal(Augmented):
    """Samples of which some do something to the worker that fetches them.

    Args:
        folder: where these leave their marks.
        acts: what happens at an index, and how often.
    """

    def __init__(self, folder: Path, acts: dict[int, tuple[Callable[[], object], int]]) -> None:
        super().__init__(LENGTH)
        self.folder, self.acts = folder, acts

    def __getitem__(self, index: int) -> Any:
        act, times = self.acts.get(index, (bool, 0))
        for number in range(times):
            mark = self.folder / f"{index}-{number}"
            if not mark.exists():
                mark.touch()
                act()
                break
        return super().__getitem__(index)


def leave() -> None:
    """End as a library does that gives up."""
    os._exit(0)


def make(data: Any, *, num_workers: int, method: Any = "fork", **options: Any) -> Any:
    """Return a source of shuffled batches."""
    options = {"batch_size": 2, "shuffle": True, "pin_memory": False, **options}
    if num_workers:
        options |= {"num_workers": num_workers, "multiprocessing_context": method}
    loader, sampler = create_dataloader(data, **options)
    return open_source(loader, sampler, run_seed=7, purpose=FETCH)


def read(data: Any = None, **options: Any) -> list[bytes]:
    """Return two epochs as bytes, batch by batch."""
    source = make(Augmented(LENGTH) if data is None else data, **options)
    found = []
    with contextlib.closing(source):
        for epoch in (0, 1):
            with contextlib.closing(source.batches(epoch)) as batches:
                found += [batch.numpy().tobytes() for (batch,) in batches]
    return found


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.shows("P141")
@pytest.mark.parametrize(
    ("act", "num_workers", "options"),
    [
        (stuck_workers.die, 2, {}),
        (stuck_workers.die, 4, {"prefetch_factor": 3}),
        (stuck_workers.die, 2, {"persistent_workers": True}),
        (stuck_workers.hang, 1, {"worker_timeout": PATIENT}),
    ],
)
def test_a_worker_that_is_lost_changes_no_bit(
    act: Any, num_workers: int, options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_batch = {name: value for name, value in options.items() if name == "batch_size"}
    expected = read(num_workers=0, **by_batch)
    data = Fatal(tmp_path, {9: (act, 1), 20: (act, 1)})
    # What a process opens once for all workers it ever starts.
    read(num_workers=1)
    before = stuck_workers.count_files_at_rest()
    assert read(data, num_workers=num_workers, **options) == expected
    # Both samples may have been under way when the first worker was lost.
    lines = lines_of(caplog)
    assert 1 <= len(lines) <= 2
    assert all("begins anew." in line for line in lines)
    assert multiprocessing.active_children() == []
    if options.get("method") is None:
        assert stuck_workers.count_files_at_rest() == before


@pytest.mark.shows("P141")
def test_a_batch_that_ends_every_worker_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 9)})
    source = make(data, num_workers=2, shuffle=False)
    batches = source.batches(0)
    with pytest.raises(WorkerError) as caught:
        list(batches)
    # In the second one, batches before it may have been under way.
    first, *others = lines_of(caplog)
    assert "New workers fetch the 4 batches" in first
    assert all("One new worker fetches" in line for line in others)
    assert 1 <= len(others) <= 2
    text = str(caught.value)
    assert "with nothing to fetch but the samples 8, 9. A loader worker died: process " in text
    assert "worker_timeout" not in text
    assert text.count("SIGKILL") == len(others) + 2
    # The remedy works: what it says is what the batch is.
    [key] = [int(part.split(")")[0]) for part in text.split("rng.reseed(")[1:]]
    with rng.stream(0):
        rng.reseed(key)
        alone = torch.stack([Augmented(LENGTH)[index] for index in (8, 9)])
    assert alone.numpy().tobytes() == read(num_workers=0, shuffle=False)[4]
    batches.close()
    assert multiprocessing.active_children() == []


@pytest.mark.shows("P141")
def test_a_batch_that_never_comes_is_named(tmp_path: Path) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.hang, 9)})
    with pytest.raises(
        WorkerError, match=r"samples 8, 9\. No batch came .* for 3 s.*raise worker_timeout\."
    ):
        read(data, num_workers=2, shuffle=False, worker_timeout=PATIENT)


class Part:
    """A part of a stream whose worker dies once in the middle; with a state, if asked for."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder, self.index, self.position = folder, index, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 10:
            self.position += 1
            mark = self.folder / f"{self.index}-{self.position}"
            if self.position in (4, 9) and self.index == 1 and not mark.exists():
                mark.touch()
                stuck_workers.die()
            yield torch.tensor([float(self.position), self.index, *torch.rand(1)])


class StatefulPart(Part):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.shows("P141")
@pytest.mark.parametrize("kind", [Part, StatefulPart])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_workers_of_a_stream_are_replaced(
    kind: Any, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for name, number in (("calm", 0), ("lost", num_workers)):
        folder = tmp_path / name
        folder.mkdir()
        if not number:
            for position in (4, 9):
                (folder / f"1-{position}").touch()

        def open_part(index: int, count: int, folder: Path = folder) -> Any:
            return kind(folder, index)

        loader, sampler = create_dataloader(
            Stream(open_part),
            batch_size=2,
            num_workers=number,
            multiprocessing_context="fork" if number else None,
        )
        share = Shard(num_replicas=2, block=range(2), pads=True)
        source = open_source(loader, sampler, run_seed=7, purpose=FETCH, share=share)
        source.uses_state = kind is StatefulPart
        found.append([torch.cat(batch).numpy().tobytes() for batch in source.batches(0)])
    assert len(found[0]) == 5
    assert found[1] == found[0]
    *_, second = lines_of(caplog)
    how = "go on here" if kind is StatefulPart else "read the epoch again up to here"
    assert second.endswith(f"New workers {how}.")


@pytest.mark.shows("P141")
def test_a_loader_of_the_users_without_a_state_is_an_error(tmp_path: Path) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 1)})
    loader = DataLoader(data, 2, num_workers=2, multiprocessing_context="fork")
    batches = open_source(loader, None, run_seed=7, purpose=FETCH).batches(0)
    with pytest.raises(WorkerError, match=r"SIGKILL.*only the DataLoader, which has no state.*"):
        list(batches)
    batches.close()


@pytest.mark.parametrize("value", [0, "60"])
def test_the_timeout_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"worker_timeout=\.\.\.\) must be a positive number"):
        create_dataloader(Indices(4), num_workers=1, worker_timeout=value)


@dataclasses.dataclass(frozen=True)
class Lossy(Elastic):
    """A training that loses workers.

    Attributes:
        number: the signal that they get; 0 for none.
        method: how they are started.
    """

    number: int = 0
    method: Any = "fork"


class DataOfWorkers(elastic.ElasticData):
    """Fetched by workers in training and validation."""

    def setup(self) -> None:
        setting = self.setting
        assert isinstance(setting, Lossy)
        options: Any = {
            "num_workers": setting.num_workers,
            "multiprocessing_context": setting.method if setting.num_workers else None,
            "worker_timeout": PATIENT if setting.number == signal.SIGSTOP else None,
            "pin_memory": False,
        }
        params = helios.DataLoaderParams(batch_size=setting.batch_size, shuffle=True, **options)
        self._train_dataset = self._create_dataset(elastic.Pictures(setting.length), params)
        params = helios.DataLoaderParams(batch_size=1, **options)
        self._valid_dataset = self._create_dataset(elastic.Pictures(11), params)


class LoseWorkers(Plugin):
    """Sends a signal to a worker of each rank, twice in training and twice in validation."""

    def __init__(self, number: int) -> None:
        super().__init__("lose-workers")
        self.number = number

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        if state.global_iteration in (2, 9):
            self.lose()

    def on_validation_batch_start(self, step: int) -> None:
        if step == 0:
            self.lose()

    def lose(self) -> None:
        child = max(multiprocessing.active_children(), key=lambda each: each.pid or 0)
        os.kill(child.pid or 0, self.number)
        if self.number == signal.SIGKILL:
            # PyTorch's handler would raise here.
            child.join()


def _train_lossy(rank: int, folder: Path, setting: Lossy) -> list[str]:
    # Marks of the test do not hold in a rank; PyTorch counts the cores of this machine.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    lines: list[str] = []
    logging.getLogger(LOGGER).addFilter(lambda record: lines.append(record.getMessage()) or True)
    elastic.train(folder, setting, LoseWorkers(setting.number))
    return lines


@pytest.mark.shows("P141")
@pytest.mark.parametrize(
    ("number", "num_ranks", "num_workers", "method"),
    [
        (signal.SIGKILL, 1, 2, "fork"),
        (signal.SIGKILL, 2, 1, "fork"),
        (signal.SIGSTOP, 2, 2, "fork"),
        pytest.param(signal.SIGKILL, 2, 1, "spawn", marks=pytest.mark.full),
    ],
)
def test_a_run_that_loses_workers_ends_with_the_same_bits(
    number: int, num_ranks: int, num_workers: int, method: str, tmp_path: Path
) -> None:
    setting = Lossy(total_steps=12, chkpt_frequency=12, make_data=DataOfWorkers)
    elastic.train(tmp_path / "calm", setting)
    setting = dataclasses.replace(setting, num_workers=num_workers, number=number, method=method)
    lines = run_ranks(_train_lossy, num_ranks, tmp_path / "lossy", setting)
    assert all(lines)
    elastic.assert_same(elastic.read_bits(tmp_path / "lossy"), elastic.read_bits(tmp_path / "calm"))
