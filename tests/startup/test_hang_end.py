"""A run that stands still for too long ends, with all stacks in a file.

Real processes: forks of this one, whose ranks meet in a store of rank 0, and launchers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.hanging import list_workers, run_forked, survives

slow = pytest.mark.full  # starts Python several times: the second tier of the tests

CLOCK = r"\d\d:\d\d:\d\d"
STUCK = rf"the training is in train_step \(hanging\.py\) since {CLOCK}"
# A commit waits for nothing else, however busy the machine is.
QUICK = {"ledger": "off"}
AGAIN = "Run the same command again to resume from the newest checkpoint."


def read_stacks(folder: Path, rank: int = 0) -> str:
    return (folder / "net" / f"stacks-rank-{rank}.txt").read_text()


@pytest.mark.shows("P142")
def test_a_run_that_stands_still_ends_with_its_stacks_in_a_file(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="wait_in_user_code")
    assert codes == [75]
    path = re.escape(str(tmp_path / "net" / "stacks-rank-0.txt"))
    said = (
        rf"step 2: {STUCK}\. Nothing has moved for 2 s \(hang_timeout\), so this process ends now, "
        rf"with exit code 75\. The stacks of all threads are in {path}\. "
    )
    assert re.search(said + re.escape(AGAIN), log)
    stacks = read_stacks(tmp_path)
    assert re.search(rf"^step 2: {STUCK}$", stacks, re.MULTILINE)
    assert re.search(r"Thread MainThread .*\n(.*\n)*.*hanging\.py.* in wait_in_user_code", stacks)
    assert "Thread helios-signals " in stacks


@pytest.mark.shows("P142")
def test_a_second_hang_in_a_row_is_not_tried_again_unless_a_checkpoint_was_committed(
    tmp_path: Path,
) -> None:
    def start(**options: Any) -> tuple[list[int | None], str]:
        codes, [log] = run_forked(tmp_path, **{"act": "wait_in_user_code", **QUICK, **options})
        return codes, log

    assert start()[0] == [75]
    codes, log = start()
    assert codes == [1]
    assert "The start before this one ended in the same way, and no checkpoint was committed" in log
    assert start()[0] == [1]
    # It stands still in iteration 5, after the checkpoint of iteration 3.
    assert start(at=5)[0] == [75]
    assert start(at=5)[0] == [1]
    # A start in between ends in another way.
    assert start(act="fail", at=5)[0] == [1]
    assert start(at=5)[0] == [75]
    assert start(act="")[0] == [0]
    assert not (tmp_path / "net" / "hang.json").exists()


@pytest.mark.shows("P142")
def test_loader_workers_end_with_their_run(tmp_path: Path) -> None:
    codes, _ = run_forked(tmp_path, num_workers=2)
    assert codes == [75]
    found = list_workers(tmp_path)
    assert len(found) == 2
    assert not any(map(survives, found))


@pytest.mark.shows("P142")
@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_write_their_stacks_and_end_together(late: int, tmp_path: Path) -> None:
    codes, logs = run_forked(tmp_path, 3, act="wait_in_user_code", late=late)
    assert codes == [75, 75, 75]
    others = "ranks 1, 2 wait" if late == 0 else "ranks 0, 2 wait"
    said = (
        rf"step 2: {others} in the exchange of gradients for rank {late}, which is in "
        rf"train_step \(hanging\.py\) since {CLOCK}\. Nothing has moved for 2 s \(hang_timeout\), "
        rf"so all ranks end now, with exit code 75\. .*stacks-rank-\*\.txt\. "
    )
    assert re.search(said, logs[0])
    assert "hang_timeout" not in logs[1] + logs[2]
    for rank in range(3):
        stacks = read_stacks(tmp_path, rank)
        assert (" in wait_in_user_code" in stacks) == (rank == late)
        assert f", rank {rank}, process " in stacks


@pytest.mark.shows("S15")
def test_an_end_without_a_safe_point_says_where_the_run_stood(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="end_softly", grace=1.0, timeout=None)
    assert codes == [143]
    said = rf"ERROR - step 2: {STUCK}\. No safe point was reached within 1 s after SIGTERM, "
    assert re.search(said, log)
