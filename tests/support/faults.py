"""Faults at every file operation of a training: kills, errors of the disk, and other errors.

A plugin wraps the functions of ``core.files`` from the first event of a training to the last one,
in the process that writes, and lets one numbered call of them go wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import helios
from helios.checkpoint import file_names
from helios.ledger import book, run_file
from helios.state import TrainingState
from helios.storage import files
from helios.storage.folder_lock import LOCK_NAME
from tests.support.quiet import Quiet

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "fsync",
    "replace",
    "unlink",
    "fsync_folder",
    "write_text_durably",
)
KILLS = ("kill before", "kill after")
DISK_ERRORS = ("EIO", "ENOSPC")
KINDS = (*KILLS, *DISK_ERRORS)
OTHERS = {"MemoryError": MemoryError, "RuntimeError": RuntimeError}

WRITER = "helios-checkpoint"
"""How the thread is called that writes."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which operation of the training, counted from 0."""

    number: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call of ``core.files``: its number, its name, and what it was about."""

    number: int
    name: str
    about: str

    def __str__(self) -> str:
        return f"{self.name} {self.about}"


EVIDENCE = frozenset((book.FILE_NAME, run_file.FILE_NAME))
"""What a run records of itself, beside its checkpoints."""


def _path_of(subject: Any) -> Path:
    return subject if isinstance(subject, Path) else Path(subject.name)


def _about(subject: Any) -> str:
    """Return the end of a file's name, which tells its part in a save."""
    path = _path_of(subject)
    if path.name == LOCK_NAME:
        return "lock"
    return "".join(path.suffixes[-2:]) or "folder"


class Faults(Quiet):
    """Wraps the file operations of rank 0, writes them down, and lets one of them go wrong.

    Its state is large enough for writes inside and behind those of ``torch.save``.

    Args:
        settles: whether every batch begins with no save in flight.
    """

    unsaved = ("operations", "told", "is_hit", "found", "handler", "ballast", "fault")

    def __init__(self, fault: Fault | None = None, *, settles: bool = False) -> None:
        super().__init__("faults")
        self.fault = fault
        self.settles = settles
        self.operations: list[Operation] = []
        self.told: list[str] = []
        self.is_hit = False
        self.found: dict[str, Any] = {}
        self.ballast = torch.arange(300_000.0)

    def state_dict(self) -> dict[str, Any]:
        return {"ballast": self.ballast}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert torch.equal(state_dict["ballast"], self.ballast)

    def on_fit_start(self) -> None:
        logging.getLogger("helios").addHandler(_Listener(self.told))
        if self.trainer.rank == 0:
            self.found = {name: getattr(files, name) for name in OPERATIONS}
            for name, call in self.found.items():
                setattr(files, name, self._wrap(name, call))

    def on_training_batch_start(self, state: TrainingState) -> None:
        if self.settles:
            join_writer()

    def teardown(self) -> None:
        for name, call in self.found.items():
            setattr(files, name, call)
        logger = logging.getLogger("helios")
        for handler in [h for h in logger.handlers if isinstance(h, _Listener)]:
            logger.removeHandler(handler)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(subject: Any, *args: Any, **kwargs: Any) -> Any:
            about = _about(subject)
            is_evidence = _path_of(subject).name.removesuffix(files.TEMPORARY_SUFFIX) in EVIDENCE
            if is_evidence:
                # Its own faults are those of tests/ledger.
                return call(subject, *args, **kwargs)
            number = len(self.operations)
            self.operations.append(Operation(number, name, about))
            is_due = self.fault is not None and self.fault.number == number
            if is_due:
                self._go_wrong(name, subject, args)
            result = call(subject, *args, **kwargs)
            if is_due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    def _go_wrong(self, name: str, subject: Any, args: tuple[Any, ...]) -> None:
        """Kill or raise; returns where the process is to be killed behind the operation only."""
        assert self.fault is not None
        self.is_hit = True
        kind = self.fault.kind
        if kind == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "kill after":
            return
        if name == "write":
            # A disk that fills up, or breaks, takes a part first.
            view = memoryview(args[0]).cast("B")
            self.found["write"](subject, view[: view.nbytes // 2])
        if kind in OTHERS:
            raise OTHERS[kind](f"{kind} of the test")
        number = getattr(errno, kind)
        where = subject if isinstance(subject, Path) else subject.name
        raise OSError(number, os.strerror(number), str(where))


class _Listener(logging.Handler):
    """Keeps what is logged from warnings on."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(f"{record.levelname} {record.getMessage()}")


def join_writer() -> None:
    """Return when no thread writes a checkpoint."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


def by_save(operations: list[Operation]) -> list[list[Operation]]:
    """Return the operations of each save; the note of the end belongs to the last one."""
    saves: list[list[Operation]] = []
    for operation in operations:
        if operation.name == "make_folder":
            saves.append([])
        saves[-1].append(operation)
    return saves


def part_of(operation: Operation, save: list[Operation]) -> str:
    """Return which part of a save an operation is: commit, sync, deletion, note, or lock."""
    if operation.about == "lock":
        return "lock"
    kinds = [str(other) for other in save]
    commit = save[kinds.index("replace .pth.tmp")].number
    if operation.number <= commit:
        return "commit"
    if operation.number == commit + 1:
        return "sync"
    notes = [o.number for o in save if o.name == "write_text_durably" and o.number > commit]
    return "note" if notes and operation.number >= notes[0] else "deletion"


def committed(folder: Path) -> list[int]:
    return sorted(
        place[1] for place in map(file_names.parse, file_names.find_checkpoints(folder)) if place
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in EVIDENCE)


def make_store(mode: str, **more: Any) -> dict[str, Any]:
    """Return the options of a training that saves ``"async"`` or ``"sync"``."""
    return {"store": helios.CheckpointStore(is_async=mode == "async", **more)}


def open_descriptors() -> set[tuple[str, str]]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((link.name, str(link.readlink())))
    return found


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fail if a thread or an open file is left when the block is left, in whatever way."""
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    try:
        yield
    finally:
        left = set(threading.enumerate()) - threads
        assert not left, f"threads are left: {left}"
        # The listing itself is open while it is read.
        here = f"/proc/{os.getpid()}/fd"
        opened = {file for file in open_descriptors() - descriptors if file[1] != here}
        assert not opened, f"files are left open: {opened}"


@contextlib.contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """A folder in memory, or the given one: a kill or a planted error needs no disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)
