"""Workers that do not start are replaced; nothing is waited for forever, and no bit changes."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import _utils

from helios.data import create_dataloader, workers
from helios.data.phase_sources import open_source
from helios.errors import WorkerError
from helios.ledger.book import FILE_NAME
from tests.data.datasets import FETCH, Augmented
from tests.support import elastic, stuck_workers
from tests.support.elastic import Elastic
from tests.support.ranks import FORKSERVER, run_ranks
from tests.support.stuck_workers import (
    HangsWhenSent,
    count_files_at_rest,
    forks,
)

# Machines with few processors would have fewer workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LENGTH = 24
LOGGER = "helios.data.workers"


class Sent(Augmented):
    """Samples with something that hangs where it is sent."""

    def __init__(self, part: HangsWhenSent) -> None:
        super().__init__(LENGTH)
        self.part = part


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FORKED_PATIENCE", 0.3)
    monkeypatch.setattr(workers, "FRESH_PATIENCE", 2.0)


def read(data: Any = None, *, num_workers: int = 2, method: Any = "fork", **options: Any) -> Any:
    """Return two epochs of a loader as bytes."""
    loader, sampler = create_dataloader(
        Augmented(LENGTH) if data is None else data,
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=False,
        multiprocessing_context=method if num_workers else None,
        **options,
    )
    source = open_source(loader, sampler, run_seed=7, purpose=FETCH)
    try:
        return [
            torch.cat(found).numpy().tobytes()
            for epoch in (0, 1)
            for found in source.batches(epoch)
        ]
    finally:
        source.close()


def replaced(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert all(line.endswith("It is replaced.") for line in lines)
    return lines


@pytest.mark.shows("P140")
@pytest.mark.parametrize(
    ("acts", "num_workers", "options"),
    [
        ({2: stuck_workers.hang}, 2, {}),
        ({2: stuck_workers.stop, 5: stuck_workers.die}, 4, {}),
        ({2: stuck_workers.hang}, 2, {"persistent_workers": True}),
    ],
)
def test_a_worker_that_hangs_in_its_fork_is_replaced(
    acts: Any, num_workers: int, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read(num_workers=0)
    assert read(num_workers=num_workers, **options) == expected
    assert replaced(caplog) == []
    before = count_files_at_rest()
    with forks(acts):
        assert read(num_workers=num_workers, **options) == expected
    lines = replaced(caplog)
    assert len(lines) == len(acts)
    assert all(line.startswith("A loader worker did not start: process ") for line in lines)
    assert count_files_at_rest() == before


@pytest.mark.shows("P140")
@pytest.mark.parametrize("method", [FORKSERVER, pytest.param("spawn", marks=pytest.mark.full)])
def test_a_worker_that_hangs_where_it_gets_its_data_is_replaced(
    method: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with forks({}):
        found = read(Sent(HangsWhenSent(tmp_path, stuck_workers.hang)), method=method)
    assert found == read(num_workers=0)
    assert len(replaced(caplog)) == 1


@pytest.mark.shows("P140")
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_workers_that_never_start_are_an_error(
    *, persistent_workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FORKED_PATIENCE", 0.1)
    before = count_files_at_rest()
    # The first worker begins, the second one never does.
    with (
        forks(dict.fromkeys(range(2, 20), stuck_workers.hang)),
        pytest.raises(WorkerError, match=r"4 processes in a row did not.*\"forkserver\"") as caught,
    ):
        read(num_workers=2, persistent_workers=persistent_workers)
    del caught
    assert count_files_at_rest() == before


@pytest.mark.shows("P140")
def test_ctrl_c_ends_the_wait() -> None:
    before = count_files_at_rest()
    # A command in the background ignores it.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with forks({2: stuck_workers.interrupt_parent}), pytest.raises(KeyboardInterrupt) as caught:
            read(num_workers=2)
    finally:
        signal.signal(signal.SIGINT, found)
    del caught
    assert count_files_at_rest() == before


@pytest.mark.shows("P140")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_workers_that_hang_ends_with_the_same_bits(
    num_ranks: int, tmp_path: Path
) -> None:
    setting = Elastic(num_replicas=2, total_steps=20, chkpt_frequency=20)
    elastic.train(tmp_path / "calm", setting)
    setting = dataclasses.replace(setting, num_workers=1)
    lines = run_ranks(_train_disturbed, num_ranks, tmp_path / "disturbed", setting)
    assert all(len(found) == 2 for found in lines)
    calm, disturbed = (tmp_path / name / "elastic" / FILE_NAME for name in ("calm", "disturbed"))
    assert disturbed.read_bytes() == calm.read_bytes()


def _train_disturbed(rank: int, folder: Path, setting: Elastic) -> list[str]:
    workers.FORKED_PATIENCE = 0.5
    lines: list[str] = []
    logging.getLogger(LOGGER).addFilter(lambda record: lines.append(record.getMessage()) or True)
    with forks({1 + rank: stuck_workers.hang, 3: stuck_workers.die}):
        elastic.train(folder, setting)
    return lines


def test_a_worker_that_ends_only_by_a_kill_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    loader, sampler = create_dataloader(
        Augmented(LENGTH), num_workers=2, pin_memory=False, multiprocessing_context="fork"
    )
    source, before = open_source(loader, sampler, run_seed=7, purpose=FETCH), list_children()
    batches = source.batches(0)
    next(batches)
    pids = list_children() - before
    assert len(pids) == 2
    os.kill(max(pids), signal.SIGSTOP)
    batches.close()
    source.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def list_children() -> set[int]:
    return {each.pid for each in multiprocessing.active_children() if each.pid is not None}
