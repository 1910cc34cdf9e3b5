"""A run that makes no progress says which rank is behind, and ends after ``hang_timeout``.

Real processes: forks of this one, whose ranks meet in a store of rank 0.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import helios
from helios.start import hangs
from tests.support.hanging import list_workers, run_forked, survives
from tests.support.models import Fitting

CLOCK = r"\d\d:\d\d:\d\d"


def read_stacks(folder: Path, rank: int = 0) -> str:
    return (folder / "net" / f"stacks-rank-{rank}.txt").read_text()


@pytest.mark.shows("P142")
def test_a_run_that_makes_no_progress_ends_with_its_stacks_in_a_file(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="hang_with_lock_of_log")
    assert codes == [75]
    path = re.escape(str(tmp_path / "net" / "stacks-rank-0.txt"))
    assert re.search(
        rf"No progress for 2 s \(hang_timeout\) at step 2: in train_step since {CLOCK}\. .* "
        rf"with exit code 75\. The stacks of all threads are in {path}\.",
        log,
    )
    assert " in wait_in_user_code" in read_stacks(tmp_path)
    assert run_forked(tmp_path)[0] == [0]


@pytest.mark.shows("P142")
def test_a_run_whose_worker_hangs_ends_with_all_workers(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, num_workers=2)
    assert codes == [75]
    assert "reading the next batch since" in log
    found = list_workers(tmp_path)
    assert len(found) == 2
    assert not any(map(survives, found))


@pytest.mark.shows("P142", "P139")
def test_all_ranks_write_their_stacks_and_end_together(tmp_path: Path) -> None:
    codes, logs = run_forked(tmp_path, 3, act="wait_in_user_code", late=1)
    assert codes == [75, 75, 75]
    place = (
        rf"at step 2: rank 1 is behind, in train_step since {CLOCK}; "
        rf"ranks 0, 2 exchanging gradients\."
    )
    assert re.search(rf"WARNING - No progress for 0\.9 s {place}", logs[0])
    assert re.search(rf"ERROR - No progress for 2 s \(hang_timeout\) {place}", logs[0])
    assert "No progress" not in logs[1] + logs[2]
    for rank in range(3):
        stacks = read_stacks(tmp_path, rank)
        assert (" in wait_in_user_code" in stacks) == (rank == 1)
        assert f", rank {rank}, process " in stacks


@pytest.mark.long
@pytest.mark.shows("P142", "P139")
def test_a_rank_that_is_stopped_does_not_answer_and_the_others_end(tmp_path: Path) -> None:
    codes, logs = run_forked(tmp_path, 3, act="be_stopped", late=0)
    assert codes == [-9, 75, 75]
    assert re.search(rf"exchanging gradients since {CLOCK}; rank 0 does not", logs[1])


@pytest.mark.shows("P139")
def test_ranks_that_wait_for_a_late_one_go_on(tmp_path: Path) -> None:
    codes, logs = run_forked(tmp_path, 2, act="wait_for_late_rank", late=1, timeout=None)
    assert codes == [0, 0]
    found = re.findall(r"No progress for ([\d.]+) s at step 2: rank 1 is behind", logs[0])
    assert found == ["0.9", "1.8"]
    assert "No progress" not in logs[1]


@pytest.mark.shows("S15")
def test_an_end_without_a_safe_point_says_so(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="end_softly", grace=1.0, timeout=None)
    assert codes == [75]
    assert "ERROR - No safe point was reached within 1 s after " in log


class Slow(Fitting):
    def valid_step(self, batch: Any, step: int) -> None:
        time.sleep(0.2)


@pytest.mark.shows("P139")
def test_a_long_validation_that_gets_on_is_not_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "WARNING_SECONDS", 1.2)
    samples = TensorDataset(torch.ones(8, 5))
    data = helios.DataModule.from_datasets(train=samples, valid=samples, batch_size=1)
    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, valid_frequency=1)
    begin = time.monotonic()
    assert trainer.fit(Slow(), data)
    assert time.monotonic() - begin > 1.2
    assert "No progress" not in caplog.text
