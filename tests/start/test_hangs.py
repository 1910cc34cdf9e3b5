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

import helios
from helios import DataLoaderParams
from helios.start import hangs
from tests.support.hanging import list_workers, run_forked, survives

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


class Data(helios.DataModule):
    """A few numbers, of which some may be validated."""

    def __init__(self, *, validates: bool = False) -> None:
        super().__init__()
        self.validates = validates

    def setup(self) -> None:
        samples: Any = torch.arange(16.0).reshape(16, 1)
        params = DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(samples, params)
        if self.validates:
            self._valid_dataset = self._create_dataset(samples, params)


class Net(helios.Model):
    def __init__(self, act: Any = None) -> None:
        super().__init__("net")
        self.act = act

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        if self.act is not None and state.global_iteration == 2:
            self.act()
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def valid_step(self, batch: Any, step: int) -> None:
        time.sleep(0.2)


@pytest.mark.shows("P139")
def test_a_long_validation_that_gets_on_is_not_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "WARNING_SECONDS", 1.2)
    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False, valid_frequency=1)
    begin = time.monotonic()
    assert trainer.fit(Net(), Data(validates=True))
    assert time.monotonic() - begin > 1.2
    assert "No progress" not in caplog.text
