"""Detects lost loader workers of PyTorch, and replaces them by a new pass.

The data of a pass is a position. So if a worker dies, or no batch comes for too long, the pass is
closed and opened again at the next batch, as in a resumed run.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.utils.data import DataLoader

from helios.core import rng
from helios.core.signal_watch import describe_exit, ignore_signals, noted_signals
from helios.errors import WorkerError

_INTERVAL = 0.5
"""Seconds between two looks at the workers of a pass."""
_GRACE, _PAUSE = 5.0, 0.01
_ZEROS = bytes(512)
"""As many as a pipe that has room always takes."""


class WorkersLost(WorkerError):  # noqa: N818 - it is handled by opening the pass again
    """Workers died, or did not answer; the message says which."""


@runtime_checkable
class _HasWorkers(Protocol):
    """PyTorch's iterator over what workers fetch, or one like it."""

    _workers: list[BaseProcess]
    _worker_result_queue: Any

    def _shutdown_workers(self) -> None: ...


@final
class Parcel:
    """Sends an item from a worker, or an error if it cannot be pickled.

    A Python queue only prints that error, and the training process would wait for the item.
    """

    def __init__(self, item: Any) -> None:
        self._item = item

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        try:
            return pickle.loads, (bytes(ForkingPickler.dumps(self._item)),)
        except Exception as error:
            return WorkerError, (
                f"Workers send batches by pickle, but for this one it failed: {error}. Return "
                "something else from the data set or collate_fn, or pass num_workers=0.",
            )


@final
class WorkerItems(Iterator[Any]):
    """The items of PyTorch's iterator, until workers are lost.

    PyTorch looks for dead workers every five seconds. A thread looks more often, and ends workers
    that do not answer.

    Args:
        begin: makes the iterator, and starts its workers.
        loader: whose workers they are.
        timeout: seconds without an item after which they are lost; ``None`` for never.

    Attributes:
        timeout: as given; it may be changed.

    Raises:
        WorkersLost: if persistent workers were lost before.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        loader: DataLoader[Any],
        timeout: float | None,
    ) -> None:
        self.timeout = timeout
        self._loader = loader
        # Counts the looks while workers are waited for, anew each time.
        self._looks: Iterator[int] | None = None
        self._lost = ""
        self._items: Any = _kept_by(loader)
        self._is_over = threading.Event()
        args = (weakref.ref(self), self._is_over)
        watch = threading.Thread(target=_watch, args=args, name="helios-workers", daemon=True)
        if _workers_of(self._items):
            watch.start()
        try:
            self._items = self._wait(lambda: _begin(begin))
        except WorkersLost:
            # Persistent ones, before this pass.
            self.close()
            raise
        # Not before: Python warns of a fork beside threads.
        if not watch.is_alive() and _workers_of(self._items):
            watch.start()

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            WorkersLost: if it does not come.
            WorkerError: if it cannot be pickled.
        """
        item = self._wait(self._items.__next__)
        if isinstance(item, WorkerError):
            raise item
        return item

    def _wait(self, call: Callable[[], Any]) -> Any:
        self._looks = count()
        try:
            return call()
        except Exception as error:
            self._lost = self._find_loss(error)
            if not self._lost:
                raise
        finally:
            self._looks = None
        # Not from PyTorch's error, whose frames would keep the iterator.
        raise WorkersLost(self._lost)

    def _find_loss(self, error: Exception) -> str:
        """Say how workers were lost; empty if the error has another cause."""
        text = str(error)
        if isinstance(error, StopIteration) or "in DataLoader worker process" in text:
            return ""
        if self._lost:
            return self._lost
        is_loss, workers = text.startswith("DataLoader "), _workers_of(self._items)
        # The memory of a worker's tensors cannot be opened any more if it died.
        if is_loss or isinstance(error, EOFError | ConnectionError | FileNotFoundError):
            # Its end may not be known to the system yet.
            for _ in range(int(_GRACE / _PAUSE)):
                if deaths := _describe_deaths(workers):
                    return deaths
                time.sleep(_PAUSE)
        return text if is_loss else ""

    def look(self) -> None:
        """Kill the workers if training waits for them, and one died or no batch comes in time."""
        if (looks := self._looks) is None:
            return
        # Looks are counted, not seconds, which go on while the whole job is suspended.
        seconds = next(looks) * _INTERVAL
        workers = _workers_of(self._items)
        # Those of a stream end with code 0 when it is over.
        if seconds and any(each.exitcode for each in workers):
            self._lost = _describe_deaths(workers)
        elif self.timeout is not None and seconds >= self.timeout:
            self._lost = f"No batch came from the loader workers for {seconds:g} s"
        if self._lost:
            # A thread that pins receives what they send; then PyTorch wakes this one.
            pins = self._loader.pin_memory
            _kill(self._items, lambda: pins or self._looks is not looks)

    def close(self) -> None:
        """End the pass; persistent workers that were not lost stay for the next one."""
        self._is_over.set()
        if self._lost or not self._loader.persistent_workers:
            end_workers(self._loader, self._items)


def _begin(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start PyTorch's iterator, and keep its handler of SIGCHLD out.

    It raises wherever the process is, even while a queue starts its thread, or in a collective.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return begin()
    before = signal.getsignal(signal.SIGCHLD)
    found = begin()
    if _is_of_pytorch(signal.getsignal(signal.SIGCHLD)):
        is_kept = before is not None and not _is_of_pytorch(before)
        signal.signal(signal.SIGCHLD, before if is_kept else signal.SIG_DFL)
    return found


def _is_of_pytorch(handler: object) -> bool:
    return getattr(handler, "__module__", "").startswith("torch.utils.data")


def _watch(found: weakref.ref[WorkerItems], is_over: threading.Event) -> None:
    while not is_over.wait(_INTERVAL) and (items := found()):
        items.look()
        del items


def _workers_of(items: object) -> Sequence[BaseProcess]:
    return items._workers if isinstance(items, _HasWorkers) else ()  # noqa: SLF001


def _kill(items: _HasWorkers, is_free: Callable[[], bool]) -> None:
    """Kill the workers, and free whoever reads half a message of theirs.

    Args:
        items: PyTorch's iterator.
        is_free: whether nobody does.
    """
    for worker in _workers_of(items):
        worker.kill()
        worker.join(_GRACE)
    # Closing this end would not do if a process that was forked later has it, too. No message ends
    # with zeros, so the one that is completed is an error.
    patience = _GRACE
    writer = items._worker_result_queue._writer  # noqa: SLF001
    # A descriptor of its own: PyTorch may close the pipe meanwhile.
    with contextlib.suppress(OSError), os.fdopen(os.dup(writer.fileno()), "wb", 0) as pipe:
        room = select.poll()
        room.register(pipe, select.POLLOUT)
        while patience > 0 and not is_free():
            if room.poll(_PAUSE * 1000):
                pipe.write(_ZEROS)
            else:
                patience -= _PAUSE


def end_workers(loader: DataLoader[Any], items: object = None) -> None:
    """End the workers of a loader and wait for them.

    Workers that hang are killed, and PyTorch's own shutdown runs in a thread: it may wait forever
    for resources of a killed worker.

    Args:
        loader: PyTorch's loader.
        items: its iterator; ``None`` for the one that has persistent workers.
    """
    items = _kept_by(loader) if items is None else items
    if isinstance(items, _HasWorkers):
        thread = threading.Thread(target=items._shutdown_workers, daemon=True)  # noqa: SLF001
        thread.start()
        thread.join(_GRACE)
        _kill(items, lambda: not thread.is_alive())
    if items is _kept_by(loader):
        loader._iterator = None  # noqa: SLF001


def _kept_by(loader: DataLoader[Any]) -> Any:
    """Return the iterator that has the persistent workers of a loader, if there are any."""
    return loader._iterator  # noqa: SLF001 - PyTorch has no public way


def _describe_deaths(workers: Sequence[BaseProcess]) -> str:
    """Say which workers have ended, and how; empty if none has."""
    dead = [each for each in workers if each.exitcode is not None]
    failed = [each for each in dead if each.exitcode] or dead
    ends = [f"process {each.pid} {describe_exit(each.exitcode or 0)}" for each in failed]
    who = "A loader worker" if len(ends) == 1 else "Loader workers"
    return f"{who} died: {'; '.join(ends)}" if ends else ""


@final
class WorkerInit:
    """Seeds ``random`` and the default NumPy generator in a worker, then calls the user's function.

    A worker ignores the signals that the training process handles: they are often sent to all
    processes of a job, and training needs its workers until it has saved.

    Args:
        user_init: the user's ``worker_init_fn``; called with the worker's number.
    """

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self._user_init = user_init
        self._ignored: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with what a spawned worker does not get from its parent."""
        return vars(self) | {"_ignored": noted_signals()}

    def __call__(self, worker_id: int) -> None:
        """Initialize the current worker."""
        _end_without_parent()
        # What the training process has dropped is not freed here: a tensor on a GPU would end this.
        gc.freeze()
        ignore_signals(self._ignored or noted_signals())
        rng.seed_rngs(torch.initial_seed() % 2**32, skip_torch=True)
        if self._user_init is not None:
            self._user_init(worker_id)


def _end_without_parent() -> None:
    """End this worker if the training process was killed while it was starting.

    PyTorch's own watchdog starts later and would take the process that adopted the worker for the
    training process; the worker would wait forever.
    """
    parent, kind = multiprocessing.parent_process(), type(multiprocessing.current_process())
    method = multiprocessing.get_start_method(allow_none=True) if kind.__name__ == "Process" else ""
    # With forkserver, the server starts the worker, and ends with the training process.
    is_served = method == "forkserver" or kind.__name__ == "ForkServerProcess"
    if parent is not None and not is_served and os.getppid() != parent.pid:
        sys.exit(1)
