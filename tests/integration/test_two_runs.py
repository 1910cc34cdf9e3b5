"""Two runs in one folder: the second is told so, and a killed first one keeps nobody out."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.core.lock import LOCK_NAME
from helios.errors import FolderInUseError
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support import elastic
from tests.support.elastic import Elastic, assert_same, read_bits
from tests.support.ranks import run_ranks
from tests.support.resume import assert_equal
from tests.support.runs import IndexModule, Setting, SmallModel, train

# What lies in the folder at a moment must not depend on a thread.
_SYNC: dict[str, Any] = {"store": helios.CheckpointStore(is_async=False)}
_SETTING = Setting(
    total_steps=9, chkpt_frequency=2, num_workers=2, persistent_workers=True, options=_SYNC
)
_ELASTIC = Elastic(num_replicas=3, total_steps=5)
_FORK = multiprocessing.get_context("fork")


class PauseAt(Plugin):
    """Tells the test that an iteration is reached, and waits there until it may go on."""

    unsaved = ("told", "go_on", "iteration")

    def __init__(self, iteration: int, told: Connection, go_on: Connection) -> None:
        super().__init__("pause-at")
        self.iteration, self.told, self.go_on = iteration, told, go_on

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            self.told.send(os.getpid())
            with contextlib.suppress(EOFError):
                self.go_on.recv()


@contextlib.contextmanager
def first_run(work: Any, iteration: int = 5) -> Iterator[int]:
    """Call ``work(plugin)`` in a child; yields its process's number while it pauses."""
    told, tell = _FORK.Pipe(duplex=False)
    wait, go_on = _FORK.Pipe(duplex=False)

    def target() -> None:
        go_on.close()
        work(PauseAt(iteration, tell, wait))

    child = _FORK.Process(target=target)
    child.start()
    tell.close()
    try:
        yield told.recv()
    finally:
        go_on.close()
        child.join()
        child.close()


def find_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_second_fit_says_who_uses_the_folder_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with first_run(lambda plugin: train(folder, _SETTING, plugin)) as pid:
        before = sorted(path.name for path in folder.rglob("*"))
        for options in ({}, {"resume": "never"}):
            with pytest.raises(FolderInUseError) as caught:
                train(folder, dataclasses.replace(_SETTING, options=_SYNC | options))
            assert str(folder / "small") in str(caught.value)
            assert f"process {pid} on {socket.gethostname()}" in str(caught.value)
        assert sorted(path.name for path in folder.rglob("*")) == before
    assert helios.find_last_checkpoint(folder / "small") == (
        folder / "small" / "small_epoch_2_iter_9.pth"
    ), "the first one went on"
    assert not (folder / "small" / LOCK_NAME).exists()


def test_another_folder_and_an_evaluation_are_not_kept_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with first_run(lambda plugin: train(folder, _SETTING, plugin)):
        assert train(tmp_path / "other", _SETTING).has_ended
        trainer = helios.Trainer(chkpt_root=folder, total_steps=9, use_cpu=True, print_banner=False)
        trainer.test(SmallModel(_SETTING), IndexModule(_SETTING))


def test_a_kill_frees_the_folder_while_the_workers_live_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _SETTING)
    folder = tmp_path / "run"
    with first_run(lambda plugin: train(folder, _SETTING, plugin)) as pid:
        workers = find_children(pid)
        assert len(workers) == 2
        for worker in workers:
            # They end by themselves when they see that their parent is gone: not yet.
            os.kill(worker, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert (folder / "small" / LOCK_NAME).exists()
            resumed = train(folder, _SETTING)
            for worker in workers:
                os.kill(worker, 0)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
    assert_equal(resumed, whole, since=4)


def test_a_fit_in_a_fit_of_the_same_folder_is_refused(tmp_path: Path) -> None:
    class Nested(Plugin):
        def setup(self) -> None:
            train(tmp_path, setting)

    setting = Setting(total_steps=2)
    with pytest.raises(FolderInUseError, match="in this same process"):
        train(tmp_path, setting, Nested("nested"))
    assert train(tmp_path, setting).has_ended


def test_fit_after_fit_and_after_an_error_finds_the_folder_free(tmp_path: Path) -> None:
    class Broken(Plugin):
        def setup(self) -> None:
            raise ValueError("broken")

    setting = Setting(total_steps=2)
    with pytest.raises(ValueError, match="broken"):
        train(tmp_path, setting, Broken("broken"))
    assert train(tmp_path, setting).has_ended
    train(tmp_path, setting)
    assert not (tmp_path / "small" / LOCK_NAME).exists()


def test_a_folder_deleted_in_the_run_is_locked_again_with_the_next_save(tmp_path: Path) -> None:
    held: list[bool] = []

    class Delete(Plugin):
        unsaved = ("gone",)

        def setup(self) -> None:
            self.gone = False

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            if state.global_iteration == 3:
                shutil.rmtree(tmp_path / "small")
            held.append((tmp_path / "small" / LOCK_NAME).exists())

    setting = Setting(total_steps=6, chkpt_frequency=2, options=_SYNC)
    assert train(tmp_path, setting, Delete("delete")).has_ended
    assert held == [True, True, False, False, True, True]


def train_on_rank(rank: int, folder: Path) -> str:
    try:
        elastic.train(folder, _ELASTIC)
    except FolderInUseError as error:
        return str(error)
    return ""


def test_all_ranks_are_told_and_go_on_after_a_kill(tmp_path: Path) -> None:
    run_ranks(train_on_rank, 3, tmp_path / "whole")
    folder = tmp_path / "run"
    with first_run(lambda plugin: elastic.train(folder, _ELASTIC, plugin), 3) as pid:
        texts = run_ranks(train_on_rank, 3, folder)
        assert len(set(texts)) == 1
        assert f"process {pid} on {socket.gethostname()}" in texts[0]
        os.kill(pid, signal.SIGKILL)
    assert run_ranks(train_on_rank, 3, folder) == ["", "", ""]
    assert_same(read_bits(folder), read_bits(tmp_path / "whole"))
