"""Saving while the training goes on: what the file holds, who waits, what a failure leads to."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from helios.checkpoint import file_names
from helios.checkpoint.checkpoint_writer import PlainWriter
from helios.checkpoint.store import CheckpointStore, PendingCheckpoint, RunFolder
from helios.errors import SaveError
from helios.state import TrainingState
from helios.storage import files
from helios.storage.staging import HostBuffers
from tests.checkpoint.helpers import make_payload, make_sidecar

MakeWriter: TypeAlias = Callable[..., PlainWriter]


class Gate:
    """Holds up every file that is begun, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.has_come = threading.Event()
        create = files.create

        def held(path: Path) -> Any:
            self.has_come.set()
            assert self.is_open.wait(150)
            return create(path)

        monkeypatch.setattr(files, "create", held)


class Disk:
    """Refuses files while it is broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        write = files.write

        def guarded(handle: Any, data: Any) -> int:
            if self.error is not None:
                raise self.error
            return write(handle, data)

        monkeypatch.setattr(files, "write", guarded)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate(monkeypatch)
    yield held
    held.is_open.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeWriter]:
    made: list[PlainWriter] = []

    def build(**options: Any) -> PlainWriter:
        folder = RunFolder(tmp_path / "model", CheckpointStore(**options))
        made.append(PlainWriter(folder, partial(describe, folder)))
        return made[-1]

    yield build
    for writer in made:
        writer.close()


def save(writer: PlainWriter, iteration: int, **model: Any) -> Path:
    return writer.save(make_payload(1, iteration, **model))


def describe(folder: RunFolder, payload: dict[str, Any]) -> PendingCheckpoint:
    """Say how a payload is written, as a run does on rank 0."""
    iteration = payload["training_state"]["global_iteration"]
    path = folder.path_of(file_names.stem("run", 1, iteration))
    return PendingCheckpoint(path, payload, make_sidecar(1, iteration))


def finish(writer: PlainWriter) -> None:
    """End a run."""
    writer.finish(lambda newest: None)


def load_model(path: Path) -> dict[str, Any]:
    model: dict[str, Any] = RunFolder(path.parent).load(path).payload["model"]
    return model


@pytest.mark.shows("S1", "U21")
def test_the_file_holds_what_was_there_at_the_call(make: MakeWriter, gate: Gate) -> None:
    writer = make()
    live, history, array = torch.ones(1000), [1, 2], torch.arange(3).numpy()
    path = save(writer, 1, live=live, history=history, array=array, view=live[10:20])
    live.zero_()
    history.append(3)
    array[:] = 0
    assert not path.exists()
    gate.is_open.set()
    finish(writer)
    model = load_model(path)
    assert model["live"].sum() == 1000
    assert model["history"] == [1, 2]
    assert model["array"].tolist() == [0, 1, 2]
    assert model["view"].untyped_storage().data_ptr() == model["live"].untyped_storage().data_ptr()


@pytest.mark.shows("S2")
def test_a_save_in_flight_counts_as_saved_and_the_next_one_waits_for_it(
    make: MakeWriter, gate: Gate
) -> None:
    def has(iteration: int) -> bool:
        return writer.has(TrainingState(global_epoch=1, global_iteration=iteration))

    writer = make()
    first = save(writer, 1)
    assert has(1)
    assert writer.newest is None
    second = threading.Thread(target=save, args=(writer, 2))
    second.start()
    assert gate.has_come.wait(150)
    assert not has(2)
    gate.is_open.set()
    second.join()
    finish(writer)
    assert writer.newest == first.with_name("run_epoch_1_iter_2.pth")
    assert has(1)
    assert has(2)


@pytest.mark.shows("S6")
@pytest.mark.parametrize("is_async", [True, False])
def test_a_refused_last_save_is_raised_at_the_end(
    is_async: bool, make: MakeWriter, disk: Disk
) -> None:
    writer = make(is_async=is_async)
    disk.error = OSError(errno.EIO, "Input/output error")
    save(writer, 1)
    with pytest.raises(SaveError, match=r"iter_1\.pth, was NOT saved: .*Input/output") as caught:
        finish(writer)
    assert isinstance(caught.value, OSError)
    assert caught.value.__cause__ is disk.error


@pytest.mark.shows("S7")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_save_error": "raise"}, OSError(errno.ENOSPC, "No space left on device")),
        ({}, MemoryError("no memory")),
        ({}, RuntimeError("a fault of the writer")),
    ],
)
def test_other_failures_wait_for_the_next_safe_point_to_be_raised(
    options: dict[str, Any], error: Exception, make: MakeWriter, disk: Disk
) -> None:
    writer = make(**options)
    disk.error = error
    save(writer, 1)
    writer.wait()
    assert writer.failure is error
    for act in (writer.raise_failure, partial(finish, writer), lambda: save(writer, 2)):
        with pytest.raises(type(error), match=str(error.args[-1])):
            act()


@pytest.mark.shows("S3", "S40")
def test_the_memory_of_the_copies_is_one_state_and_given_back(
    make: MakeWriter,
) -> None:
    writer = make()
    for iteration in (1, 2, 3):
        save(writer, iteration, weight=torch.ones(1000))
        assert writer._thread.buffers.num_bytes == 4000 + 16
    writer.close()
    assert writer._thread.buffers.num_bytes == 0


@pytest.mark.shows("S4")
def test_without_memory_for_a_copy_saves_wait_for_the_disk(
    make: MakeWriter,
    caplog: pytest.LogCaptureFixture,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.is_open.set()
    writer = make()
    allocate = HostBuffers._allocate
    monkeypatch.setattr(HostBuffers, "_allocate", lambda own, size: allocate(own, 1 << 60))
    assert save(writer, 1).exists()
    assert "too little memory" in caplog.text
    assert len(caplog.records) == 1
