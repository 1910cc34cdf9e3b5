"""What goes on while a thread writes a checkpoint: training, forks, and every way out of fit."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.checkpoint.writer_thread import WriterThread
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from tests.support import faults
from tests.support.faults import Fault, Faults, make_store
from tests.support.resume import assert_equal
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel, train

_PER_EPOCH = 6
_SETTING = Setting(
    total_steps=14, chkpt_frequency=_PER_EPOCH, valid_frequency=None, options=make_store("async")
)


class Gate:
    """Holds up the writer of one checkpoint in the middle of its file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
        self.has_come = threading.Event()
        self.is_open = threading.Event()
        write = files.write

        def held(handle: Any, data: Any) -> int:
            if f"_iter_{iteration}.pth" not in str(handle.name):
                return write(handle, data)
            half = memoryview(data).cast("B").nbytes // 2
            count = write(handle, memoryview(data).cast("B")[:half])
            self.has_come.set()
            assert self.is_open.wait(150), "nobody has opened the gate"
            return count + write(handle, memoryview(data).cast("B")[half:])

        monkeypatch.setattr(files, "write", held)

    def open(self) -> None:
        """Let the writer go on, once it was held up."""
        assert self.has_come.wait(150)
        assert [thread.name for thread in threading.enumerate()].count(faults.WRITER) == 1
        self.is_open.set()


class Do(Plugin):
    """Calls something in a named event, from an iteration on, once."""

    unsaved = ("action", "iteration", "now", "is_done")

    def __init__(self, event: str, iteration: int, action: Any) -> None:
        super().__init__(f"do-{event}")
        self.iteration, self.action = iteration, action
        self.now, self.is_done = 0, False
        setattr(self, event, self._act)

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_step_start(self, state: TrainingState) -> None:
        self.now = state.global_iteration

    def _act(self, *args: Any) -> None:
        if self.now >= self.iteration and not self.is_done:
            self.is_done = True
            self.action()


def waits_for_writer(thread: int) -> bool:
    """Return whether a thread waits until nothing is written."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code is WriterThread.wait.__code__ for frame, _ in frames)


def throw(error: type[BaseException]) -> Any:
    """Return a function that raises an error."""

    def act() -> None:
        raise error("broken")

    return act


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the undisturbed run."""
    return train(tmp_path_factory.mktemp("whole"), _SETTING, Faults())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return a gate for the save at the end of the first epoch."""
    made = Gate(monkeypatch, _PER_EPOCH)
    yield made
    made.is_open.set()


@pytest.mark.shows("S1")
def test_the_training_goes_on_up_to_the_next_save(
    whole: Outcome, gate: Gate, tmp_path: Path
) -> None:
    """The gate opens in the last batch before that."""
    opening = Do("on_training_batch_end", 2 * _PER_EPOCH, gate.open)
    assert_equal(train(tmp_path, _SETTING, Faults(), opening), whole, since=0)
    assert faults.committed(tmp_path / "small") == [6, 12, 14]
    for path in tmp_path.glob("small/*_iter_14.*"):
        path.unlink()
    for path in tmp_path.glob("small/*_iter_12.*"):
        path.unlink()
    resumed = train(tmp_path, _SETTING, Faults())
    assert_equal(resumed, whole, since=_PER_EPOCH)


@pytest.mark.shows("S2")
def test_the_next_save_waits_for_the_one_in_flight(
    whole: Outcome, gate: Gate, tmp_path: Path
) -> None:
    begun: list[int] = []
    create = files.create

    def listen(path: Path) -> Any:
        if path.name.endswith(".pth.tmp"):
            begun.append(int(path.name.split("_iter_")[1].split(".")[0]))
            assert len(list(path.parent.glob("*.tmp"))) == 0
        return create(path)

    def open_from_another_thread() -> None:
        # Behind this event the main thread comes to the save, and waits.
        threading.Thread(target=open_late, args=(threading.get_ident(),)).start()

    def open_late(main: int) -> None:
        while not waits_for_writer(main) and begun[-1:] != [12]:
            time.sleep(0)
        gate.open()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "create", listen)
        opening = Do("on_save_checkpoint", 2 * _PER_EPOCH, open_from_another_thread)
        assert_equal(train(tmp_path, _SETTING, Faults(), opening), whole, since=0)
    assert begun == [6, 12, 14]


@pytest.mark.shows("S1", "U21")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_that_are_forked_during_a_save_corrupt_nothing(
    is_persistent: bool, whole: Outcome, gate: Gate, tmp_path: Path
) -> None:
    """Each epoch forks two, while the save of its predecessor's end is held in mid-file."""
    setting = dataclasses.replace(
        _SETTING, num_workers=2, persistent_workers=is_persistent, chkpt_frequency=1
    )
    opening = Do("on_training_batch_start", _PER_EPOCH + 1, gate.open)
    outcome = train(tmp_path, setting, Faults(), opening)
    assert outcome.records == whole.records
    assert faults.committed(tmp_path / "small") == list(range(1, 15))
    for path in tmp_path.glob("small/*.pth"):
        assert helios.load_checkpoint(path)["plugins"]["faults"]["ballast"].sum() > 0


@pytest.mark.shows("S2", "U21")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration, SystemExit])
def test_a_save_in_flight_is_committed_when_an_error_ends_the_training(
    error: type[BaseException], whole: Outcome, gate: Gate, tmp_path: Path
) -> None:
    breaking = Do("on_training_batch_end", _PER_EPOCH + 2, throw(error))
    opening = Do("on_exception", 0, gate.open)
    plugin = Faults()
    expected = UsageError if error is StopIteration else error
    with faults.nothing_left_open(), pytest.raises(expected):
        train(tmp_path, _SETTING, plugin, breaking, opening)
    assert faults.names(tmp_path / "small") == [
        "small_epoch_1_iter_6.json",
        "small_epoch_1_iter_6.pth",
    ]
    assert any("to resume from small_epoch_1_iter_6.pth" in text for text in plugin.told) or (
        error is KeyboardInterrupt
    )
    assert_equal(train(tmp_path, _SETTING, Faults()), whole, since=_PER_EPOCH)


@pytest.mark.shows("S2")
def test_an_error_that_passes_through_unlogged_waits_for_the_save_too(
    gate: Gate, tmp_path: Path
) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=14,
        chkpt_frequency=_PER_EPOCH,
        chkpt_root=tmp_path,
        use_cpu=True,
        print_banner=False,
        plugins=[
            Do("on_training_batch_end", _PER_EPOCH + 2, throw(ValueError)),
            # Late enough that a fit which does not wait has returned before.
            Do("on_exception", 0, threading.Timer(0.5, gate.open).start),
        ],
    )
    trainer.train_exceptions.append(ValueError)
    with faults.nothing_left_open(), pytest.raises(ValueError, match="broken"):
        trainer.fit(SmallModel(_SETTING), IndexModule(_SETTING))
    assert faults.committed(tmp_path / "small") == [_PER_EPOCH]


@pytest.mark.shows("S2")
def test_a_stop_waits_for_the_save_in_flight(gate: Gate, tmp_path: Path) -> None:
    """A hook ends an epoch, and the run, while the checkpoint before is held."""
    ending = Do(
        "on_training_batch_end", _PER_EPOCH + 1, lambda: ending.trainer.request_stop("enough")
    )
    opening = Do("on_save_checkpoint", _PER_EPOCH + 1, gate.open)
    with faults.nothing_left_open():
        outcome = train(tmp_path, _SETTING, Faults(), ending, opening)
    assert outcome.has_ended
    assert faults.committed(tmp_path / "small") == [6, 7]


def _bytes_of(tensor: torch.Tensor) -> int:
    # Other tests may have left sparse tensors to the garbage collector, which have no storage.
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


@pytest.mark.shows("S3", "U21")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("kind", ["", "EIO", "MemoryError"])
def test_no_way_out_of_fit_leaves_a_thread_a_file_or_the_copy_of_the_state(
    kind: str, mode: str, tmp_path: Path
) -> None:
    """The second operation creates the first file."""
    plugin = Faults(Fault(1, kind) if kind else None)
    setting = dataclasses.replace(_SETTING, options=make_store(mode, on_save_error="raise"))
    with faults.nothing_left_open():
        if kind:
            with pytest.raises(OSError if kind == "EIO" else MemoryError):
                train(tmp_path / "run", setting, plugin)
            assert plugin.is_hit
        else:
            train(tmp_path / "run", setting, plugin)
    del plugin
    gc.collect()
    size = Faults().ballast.nbytes
    left = [
        tensor
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor and _bytes_of(tensor) == size
    ]
    assert not left
