"""The same bits by every way to start: plain python, spawned ranks, a real torchrun.

Each test starts Python many times, so all but one are in the second tier.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic_script
from tests.support.elastic import Bits, assert_same, read_bits
from tests.support.scripts import call
from tests.support.signals import environment


def start(*arguments: Any, torchrun: int = 0, threads: str = "1") -> Any:
    """Run the script to its end; ``threads`` may be empty for no variable."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    own = environment(OMP_NUM_THREADS=threads)
    script = str(elastic_script.__file__)
    command = [sys.executable, *(launcher if torchrun else []), script, *map(str, arguments)]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)


def train_alone(folder: Path, *options: Any) -> Bits:
    done = call(elastic_script.main, folder, *options, "--nproc", 1)
    assert done.returncode == 0, done.stderr
    return read_bits(folder)


def test_what_spawned_ranks_begin_one_process_ends(tmp_path: Path) -> None:
    options = ("--replicas", 3, "--steps", 6)
    alone = train_alone(tmp_path / "alone", *options)
    done = start(tmp_path / "both", *options, "--nproc", 2, "--kill", "on_backward_end", 4, 1)
    assert done.returncode == 1
    assert "RankError: Rank 1 of 2 was ended by SIGKILL" in done.stderr
    # The run knows its replicas, and the number of threads that its processes had.
    done = start(tmp_path / "both", "--steps", 6, threads="")
    assert done.returncode == 0, done.stderr
    assert_same(read_bits(tmp_path / "both"), alone)


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("num_replicas", "processes"), [(4, (4, 3, 2, 1)), (3, (3, 2, 1)), (6, (4, 2, 1))]
)
def test_every_start_may_be_made_in_another_way(
    tmp_path: Path, num_replicas: int, processes: tuple[int, ...], accumulation: int
) -> None:
    options = ("--replicas", num_replicas, "--steps", 12 // accumulation)
    options += ("--accumulation", accumulation)
    alone = train_alone(tmp_path / "alone", *options)
    for number, num_processes in enumerate(processes):
        kill = ("--kill", "on_forward_end", 3 * number + 2, number % num_processes)
        if number % 2:
            done = start(tmp_path / "mixed", *options, *kill, torchrun=num_processes)
        else:
            done = start(tmp_path / "mixed", *options, *kill, "--nproc", num_processes)
        assert done.returncode != 0
    done = start(tmp_path / "mixed", *options, torchrun=processes[0])
    assert done.returncode == 0, done.stderr
    assert_same(read_bits(tmp_path / "mixed"), alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("event", "rank"),
    [("on_backward_start", 2), ("on_validation_batch_start", 0), ("on_save_checkpoint", 1)],
)
def test_a_killed_rank_ends_the_others_within_ten_seconds(
    tmp_path: Path, event: str, rank: int
) -> None:
    options = ("--replicas", 4, "--steps", 12)
    alone = train_alone(tmp_path / "alone", *options)
    done = start(tmp_path / "cut", *options, "--nproc", 3, "--kill", event, 5, rank)
    steps = (tmp_path / "cut").rglob(f"turns-{rank}.jsonl")
    assert time.time() - max(path.stat().st_mtime for path in steps) < 20, "a step, and the end"
    assert f"Rank {rank} of 3 was ended by SIGKILL" in done.stderr
    done = start(tmp_path / "cut", *options, torchrun=2)
    assert done.returncode == 0, done.stderr
    assert_same(read_bits(tmp_path / "cut"), alone)
