"""A run that stands still for too long ends, with all stacks in a file.

Real processes: forks of this one, whose ranks meet in a store of rank 0, and launchers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helios.startup import hangs
from tests.support import hanging
from tests.support.hanging import list_workers, run_forked, survives
from tests.support.signals import environment

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
        rf"with exit code 75\. The stacks of all threads and loader workers are in {path}\. "
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
def test_a_run_without_checkpoints_is_not_tried_again(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="wait_in_user_code", frequency=None)
    assert codes == [1]
    assert "No checkpoints are written, so there is nothing to resume." in log
    # There is no folder for them.
    assert "in wait_in_user_code" in log
    assert "The stacks are above." in log


def test_stacks_are_beside_the_log_file_where_no_checkpoints_are(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    codes, _ = run_forked(
        tmp_path,
        act="wait_in_user_code",
        frequency=None,
        enable_file_logging=True,
        log_path=logs,
        run_name="mine",
    )
    assert codes == [1]
    assert "in wait_in_user_code" in (logs / "mine-stacks-rank-0.txt").read_text()


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


@pytest.mark.shows("P142")
@pytest.mark.parametrize("stopped", [0, 1])
def test_ranks_end_without_one_that_is_stopped(stopped: int, tmp_path: Path) -> None:
    codes, logs = run_forked(tmp_path, 2, act="be_stopped", late=stopped)
    other = 1 - stopped
    assert codes[other] == 75
    assert codes[stopped] == -signal.SIGKILL
    said = (
        rf"step 2: rank {other} waits in the exchange of gradients since {CLOCK}; rank {stopped} "
        r"does not answer\. Nothing has moved for 2 s \(hang_timeout\), so all ranks end now, with "
        r"exit code 75\."
    )
    assert re.search(said, logs[other])
    assert "in the exchange of gradients" in read_stacks(tmp_path, other)


@pytest.mark.shows("P139")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_on_a_stopped_disk_is_named(is_async: bool, num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    # Nobody reads, so that whoever opens it for writing waits.
    os.mkfifo(tmp_path / "net" / "net_epoch_1_iter_3.pth.tmp")
    codes, logs = run_forked(tmp_path, num_ranks, is_async=is_async, **QUICK)
    assert codes == [75] * num_ranks
    # A thread that writes is waited for at the next save.
    step, what = (7, "waits for the save under way") if is_async else (4, "saves")
    who = "the training" if num_ranks == 1 else "rank 1 waits in an agreement for rank 0, which"
    assert re.search(rf"WARNING - step {step}: {who} {what} since {CLOCK}\.\n", logs[0])
    assert "in write_file" in read_stacks(tmp_path)


@pytest.mark.shows("S15")
def test_an_end_without_a_safe_point_says_where_the_run_stood(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="end_softly", grace=1.0, timeout=None)
    assert codes == [143]
    said = rf"ERROR - step 2: {STUCK}\. No safe point was reached within 1 s after SIGTERM, "
    assert re.search(said, log)


def test_an_end_without_a_safe_point_needs_no_lock_of_the_log(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="hold_lock_of_log", grace=0.5, timeout=None)
    assert codes == [143]
    said = rf"^step 2: {STUCK}\. No safe point was reached within 0\.5 s after SIGTERM, "
    assert re.search(said, log, re.MULTILINE)


def test_ranks_that_got_a_signal_say_who_waits_for_whom(tmp_path: Path) -> None:
    codes, logs = run_forked(
        tmp_path, 2, act="end_all_softly", late=1, grace=1.0, timeout=None, warning=30.0
    )
    assert codes == [143, 143]
    said = (
        r"step 2: rank 0 waits in the exchange of gradients for rank 1, which is in train_step "
        rf"\(hanging\.py\) since {CLOCK}\. No safe point was reached within 1 s after SIGTERM"
    )
    assert re.search(said, "".join(logs))


def _launch(
    folder: Path, *arguments: object, torchrun: bool = False, act: Callable[[Any], object] = bool
) -> tuple[int, str]:
    """Start the script; returns its exit code and what it says."""
    line = [hanging.__file__, folder, "--timeout", 6, *arguments]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    front = ["-m", *launcher] if torchrun else []
    words = [sys.executable, *front, *map(str, line)]
    options: dict[str, Any] = {"env": environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            act(process)
            _, log = process.communicate(timeout=hanging.SECONDS)
        finally:
            process.kill()
    return process.returncode, log


def _quit_when_ranks_train(folder: Path, process: subprocess.Popen[str]) -> None:
    while len(_list_ranks(folder)) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGQUIT)


def _list_ranks(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("rank-*")]


@slow
@pytest.mark.parametrize(
    ("act", "late"), [("wait_in_user_code", 1), ("be_stopped", 0), ("be_stopped", 1)]
)
def test_spawned_ranks_end_with_their_launcher(act: str, late: int, tmp_path: Path) -> None:
    arguments = ("--act", act, "--late", late, "--nproc", 2)
    code, log = _launch(tmp_path, *arguments)
    assert code == 75, log
    assert "so all ranks end now, with exit code 75" in log
    assert "Traceback" not in log
    assert len(_list_ranks(tmp_path)) == 2
    assert not any(map(survives, _list_ranks(tmp_path)))
    # The launcher raises an error of its own.
    code, log = _launch(tmp_path, *arguments)
    assert code == 1, log
    assert "so all ranks end now, with exit code 1" in log


@slow
@pytest.mark.parametrize(("act", "late"), [("wait_in_user_code", 1), ("be_stopped", 0)])
def test_ranks_of_torchrun_end(act: str, late: int, tmp_path: Path) -> None:
    code, log = _launch(tmp_path, "--act", act, "--late", late, torchrun=True)
    assert code == 1, log
    assert "so all ranks end now, with exit code 75" in log
    assert len(_list_ranks(tmp_path)) == 2
    assert not any(map(survives, _list_ranks(tmp_path)))


@slow
def test_torchrun_passes_sigquit_on_and_kills_its_ranks_later(tmp_path: Path) -> None:
    act = partial(_quit_when_ranks_train, tmp_path)
    words = ("--act", "wait_in_user_code", "--timeout", 300)
    code, log = _launch(tmp_path, *words, torchrun=True, act=act)
    assert code == 1, log
    assert log.count("Current thread ") == 2
    assert "forcefully exiting via 9" in log
    assert not any(map(survives, _list_ranks(tmp_path)))


@pytest.mark.shows("P142")
@pytest.mark.parametrize("act", ["evaluate_alone", "compile_alone"])
def test_a_rank_that_is_busy_keeps_those_alive_that_wait_for_it(act: str, tmp_path: Path) -> None:
    codes, [log, _] = run_forked(tmp_path, 2, act=act, at=7, late=1, **QUICK)
    assert codes == [0, 0]
    assert "does not answer" not in log
    if act == "evaluate_alone":
        progress = r"for rank 1, which makes progress: it is in train_step \(hanging\.py\)\."
        assert re.search(progress, log)


def test_a_run_that_hangs_with_the_lock_of_the_log_ends(tmp_path: Path) -> None:
    codes, [log] = run_forked(tmp_path, act="hang_with_lock_of_log")
    assert codes == [75]
    assert re.search(rf"step 2: {STUCK}\. Nothing has moved for 2 s \(hang_timeout\)", log)
    assert "in wait_in_user_code" in read_stacks(tmp_path)


def test_a_run_that_goes_on_while_its_stacks_are_written_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = hangs._write

    def write_slowly(path: Path, text: str) -> bool:
        time.sleep(2.0)
        return write(path, text)

    monkeypatch.setattr(hangs, "_write", write_slowly)
    codes, _ = run_forked(tmp_path, act="stand_for_a_while", at=8, **QUICK)
    assert codes == [0]
    assert not (tmp_path / "net" / "hang.json").exists()
