"""Two runs in one folder: the second is told so, and a killed first one keeps nobody out."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import CheckpointError, FolderInUseError, UsageError
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import folder_lock
from helios.storage.folder_lock import LOCK_NAME
from tests.support import elastic
from tests.support.elastic import Elastic, assert_same, read_bits
from tests.support.paused import another_process
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
    """Pauses at an iteration."""

    unsaved = ("pause", "iteration")

    def __init__(self, iteration: int, pause: Callable[[], None]) -> None:
        super().__init__("pause-at")
        self.iteration, self.pause = iteration, pause

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            self.pause()


def first_run(work: Any, iteration: int = 5) -> contextlib.AbstractContextManager[int]:
    """Call ``work(plugin)`` in a child; yields its process's number while it pauses."""
    return another_process(lambda pause: work(PauseAt(iteration, pause)))


def find_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.shows("S16")
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


@pytest.mark.shows("S16")
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


class CallAt(Plugin):
    """Calls something of its own at an iteration, and keeps the error that it raises."""

    unsaved = ("call", "error")

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__("call-at")
        self.call, self.error = call, ""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == 3:
            with pytest.raises(UsageError) as caught:
                self.call()
            self.error = str(caught.value)


def call_other_trainer(method: str, folder: Path, setting: Setting) -> Any:
    """Call a method of a trainer that knows nothing of others."""
    trainer = helios.Trainer(chkpt_root=folder, total_steps=9, use_cpu=True, print_banner=False)
    return getattr(trainer, method)(SmallModel(setting), IndexModule(setting))


@pytest.mark.shows("S16")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("place", ["run", "other"])
def test_a_call_of_another_trainer_inside_of_a_fit_leaves_that_fit_as_it_was(
    tmp_path: Path, method: str, place: str
) -> None:
    setting = Setting(total_steps=6, chkpt_frequency=2, options=_SYNC)
    whole = train(tmp_path / "whole", setting)
    plugin = CallAt(lambda: call_other_trainer(method, tmp_path / place, setting))
    called = train(tmp_path / "run", setting, plugin)
    assert "must run one call at a time" in plugin.error
    assert not (tmp_path / "other").exists()
    assert_equal(called, whole, since=0)
    assert train(tmp_path / "run", setting).records == {}, "the next call is free to run"


def test_a_fit_in_another_thread_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    setting = Setting(total_steps=6, chkpt_frequency=2, options=_SYNC)
    whole = train(tmp_path / "whole", setting)

    def call_in_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call_other_trainer, "fit", tmp_path / "other", setting).result()

    plugin = CallAt(call_in_thread)
    called = train(tmp_path / "run", setting, plugin)
    assert "must run one call at a time" in plugin.error
    assert_equal(called, whole, since=0)


def test_a_process_that_is_forked_from_a_fit_may_train(tmp_path: Path) -> None:
    """A second run is kept out by its folder, and by nothing else."""
    setting = Setting(total_steps=4, chkpt_frequency=2, options=_SYNC)
    codes: list[int | None] = []

    class Fork(Plugin):
        """Trains in a child."""

        def setup(self) -> None:
            child = _FORK.Process(target=train, args=(tmp_path / "other", setting))
            child.start()
            child.join()
            codes.append(child.exitcode)
            child.close()

    assert train(tmp_path / "run", setting, Fork("fork")).has_ended
    assert codes == [0]
    assert helios.find_last_checkpoint(tmp_path / "other" / "small") is not None


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


@pytest.mark.shows("S16", "S37")
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


@pytest.mark.shows("S16")
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


def train_where_rank_0_sees_it(rank: int, folder: Path) -> str:
    """The path is the same on all ranks, and on one of them another disk."""
    place = folder / ("elsewhere" if rank == 1 else "here")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    folder_lock._PATIENCE = 0.0
    try:
        elastic.train(Path("run"), _ELASTIC)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.shows("S16")
def test_a_folder_that_one_rank_does_not_see_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    texts = run_ranks(train_where_rank_0_sees_it, 3, tmp_path)
    (text,) = set(texts)
    assert "rank 1 does not see the same folder" in text
    assert "All processes must see the folder chkpt_root" in text
    assert helios.find_last_checkpoint(tmp_path / "here" / "run" / "elastic") is None
