"""What goes on while a thread writes a checkpoint: training, and the errors that end it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helios.errors import UsageError
from helios.state import TrainingState
from helios.storage import files
from tests.support import faults
from tests.support.faults import Faults, make_store
from tests.support.quiet import Quiet
from tests.support.resume import assert_equal
from tests.support.runs import Outcome, Setting, train

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


class Do(Quiet):
    """Calls something in a named event, from an iteration on, once."""

    unsaved = ("action", "iteration", "now", "is_done")

    def __init__(self, event: str, iteration: int, action: Any) -> None:
        super().__init__(f"do-{event}")
        self.iteration, self.action = iteration, action
        self.now, self.is_done = 0, False
        setattr(self, event, self._act)

    def on_training_step_start(self, state: TrainingState) -> None:
        self.now = state.global_iteration

    def _act(self, *args: Any) -> None:
        if self.now >= self.iteration and not self.is_done:
            self.is_done = True
            self.action()


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


@pytest.mark.shows("S2", "U21")
@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration])
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
