"""The same bits by every way to start: plain python, spawned ranks, a real torchrun.

Each test starts Python many times, so all but one are in the second tier.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from helios.errors import RankError
from tests.support import signals
from tests.support.elastic import Bits, assert_same, read_bits
from tests.support.ranks import let_launcher_start_from_server
from tests.support.scripts import call
from tests.support.signals import start

EACH_STEP = ("--frequency", 1, "--workers", 1)


def train_alone(folder: Path, *options: Any) -> Bits:
    folder.mkdir()
    done = call(signals.main, folder, *options, "--nproc", 1)
    assert done.returncode == 0, done.stderr
    return read_bits(folder)


def kill(event: str, iteration: int, rank: int) -> tuple[Any, ...]:
    return "--at", event, "--iteration", iteration, "--rank", rank, "--send", 9


@pytest.mark.long
def test_what_spawned_ranks_begin_one_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*EACH_STEP, "--steps", 6)
    alone, both = train_alone(tmp_path / "alone", *options), tmp_path / "both"
    both.mkdir()
    let_launcher_start_from_server(monkeypatch)
    line = (both, *options, "--nproc", 2, *kill("on_backward_end", 4, 1))
    monkeypatch.setattr(sys, "argv", ["signals.py", *map(str, line)])
    with pytest.raises(RankError, match="Rank 1 of 2 was ended by SIGKILL"):
        signals.main()
    # The run knows its replicas, and the number of threads that its processes had.
    code, log = start(both, *options, "--replicas", 0, OMP_NUM_THREADS="")
    assert code == 0, log
    assert_same(read_bits(both), alone)


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("num_replicas", "processes"), [(4, (4, 3, 2, 1)), (3, (3, 2, 1)), (6, (4, 2, 1))]
)
def test_every_start_may_be_made_in_another_way(
    tmp_path: Path, num_replicas: int, processes: tuple[int, ...], accumulation: int
) -> None:
    options = (*EACH_STEP, "--replicas", num_replicas, "--steps", 12 // accumulation)
    options += ("--accumulation", accumulation)
    alone, mixed = train_alone(tmp_path / "alone", *options), tmp_path / "mixed"
    mixed.mkdir()
    for number, count in enumerate(processes):
        line = (mixed, *options, *kill("on_forward_end", 3 * number + 2, number % count))
        code, _ = start(*line, torchrun=count) if number % 2 else start(*line, "--nproc", count)
        assert code != 0
        next(mixed.glob("sent.*")).unlink()
    code, log = start(mixed, *options, torchrun=processes[0])
    assert code == 0, log
    assert_same(read_bits(mixed), alone)
