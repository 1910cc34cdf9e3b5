"""Loader workers are PyTorch's; here it is seen when some are lost, which is healed by a new pass.

The data of a pass is a position. So if a worker dies, or no batch comes for too long, the pass is
closed and opened again at the next batch that was not handed out, as a resumed run does it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import Process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.utils.data import DataLoader

from helios.core import rng
from helios.core.signal_watch import ignore_signals, noted_signals, signal_name
from helios.distributed.collectives import get_global_rank
from helios.errors import UsageError, WorkerError
from helios.text import size_text

_LOGGER = logging.getLogger(__name__)
_INTERVAL = 1.0
"""Seconds after which PyTorch looks for dead workers; then it is asked again."""
_LOOKS = 15
"""Intervals after which a reader that PyTorch did not let return stands in half a message."""
_GRACE = 5.0
_MOST_FAILURES = 3
_OF_DEATH = (EOFError, ConnectionError, FileNotFoundError)
"""Errors of one who reads the memory of a worker's tensors, if the worker died."""


class WorkersLost(Exception):  # noqa: N818 - it is handled by opening the pass again
    """Workers died, or did not answer; the text says which."""


@runtime_checkable
class _HasWorkers(Protocol):
    """PyTorch's iterator over what workers fetch, or one like it."""

    _workers: list[BaseProcess]
    _worker_result_queue: Any
    _timeout: float

    def _shutdown_workers(self) -> None: ...


@final
class WorkerItems(Iterator[Any]):
    """What PyTorch's iterator returns, until workers are lost.

    Args:
        begin: makes the iterator, and starts its workers.
        loader: whose workers they are.
        timeout: seconds without an item after which they are lost; ``None`` for never.

    Attributes:
        timeout: as given; it may be changed.
        num_waits: how often PyTorch was asked for an item.
        is_waiting: whether it is being asked.
        lost: what was seen of workers that were killed here; empty if none were.

    Raises:
        UsageError: if what workers get cannot be pickled, where they are not forked.
        WorkersLost: if one dies at once.
    """

    def __init__(
        self, begin: Callable[[], Iterator[Any]], loader: DataLoader[Any], timeout: float | None
    ) -> None:
        self.num_waits, self.is_waiting, self.lost = 0, False, ""
        self._loader = loader
        self.timeout = timeout
        self._items: Any = loader._iterator  # noqa: SLF001 - that of persistent workers
        self._interval = min(_INTERVAL, timeout or _INTERVAL)
        if isinstance(self._items, _HasWorkers):
            # What it raises while a pass begins cannot be asked again.
            self._items._timeout = _GRACE  # noqa: SLF001
        try:
            self._items = begin()
        except Exception as error:
            if _is_timeout(error):
                self.kill("The persistent loader workers did not begin a new pass")
            if loss := self._find_loss(error):
                self._end_workers()
                raise WorkersLost(loss) from error
            if "pickle" in str(error):
                raise _refuse_unpicklable(error) from error
            raise
        if isinstance(self._items, _HasWorkers):
            # Not by the loader: an iterator that wraps PyTorch's may not be asked again.
            self._items._timeout = self._interval  # noqa: SLF001
        # PyTorch's handler of SIGCHLD raises wherever the process is, even inside a collective.
        with contextlib.suppress(ValueError):
            torch._C._remove_worker_pids(id(self._items))  # noqa: SLF001
            torch._C._set_worker_pids(id(self._items), ())  # noqa: SLF001
        self._is_over = threading.Event()
        args = (weakref.ref(self), self._is_over, self._interval)
        threading.Thread(target=_watch, args=args, name="helios-workers", daemon=True).start()
        weakref.finalize(self, self._is_over.set)

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            WorkersLost: if it does not come.
        """
        self.is_waiting, waited = True, 0.0
        try:
            while True:
                self.num_waits += 1
                try:
                    return next(self._items)
                except Exception as error:
                    if _is_timeout(error):
                        waited += self._interval
                        if self.timeout is None or waited < self.timeout:
                            continue
                        self.kill(f"No batch came from the loader workers for {waited:g} s")
                    if loss := self._find_loss(error):
                        raise WorkersLost(loss) from error
                    raise
        finally:
            self.is_waiting = False

    def _find_loss(self, error: Exception) -> str:
        """Say how workers were lost; empty if the error has another cause."""
        text = str(error)
        is_of_user = "in DataLoader worker process" in text
        if self.lost or is_of_user:
            return "" if is_of_user else self.lost
        if isinstance(error, _OF_DEATH):
            ended = wait([each.sentinel for each in _workers_of(self._items)], _GRACE)
            for worker in _workers_of(self._items):
                # Its end may not be known to the system yet.
                worker.join(_GRACE if worker.sentinel in ended else 0)
            return _describe_deaths(self._items)
        if "exited unexpectedly" in text:
            return _describe_deaths(self._items) or f"A loader worker died at its start: {text}"
        return ""

    def kill(self, loss: str) -> None:
        """Kill the workers, and free whoever reads half a message of theirs."""
        self.lost = self.lost or _describe_deaths(self._items) or loss
        _kill(self._items)

    def close(self, *, keeps_workers: bool = False) -> None:
        """End the pass.

        Args:
            keeps_workers: whether persistent workers, which fetch nothing now, are left for the
                next one.
        """
        self._is_over.set()
        if not (keeps_workers and self._loader.persistent_workers):
            self._end_workers()

    def _end_workers(self) -> None:
        end_workers(self._items)
        if self._loader._iterator is self._items:  # noqa: SLF001
            self._loader._iterator = None  # noqa: SLF001


def _is_timeout(error: Exception) -> bool:
    return str(error).startswith("DataLoader timed out after")


def _watch(found: weakref.ref[WorkerItems], is_over: threading.Event, interval: float) -> None:
    """Free a reader that PyTorch does not let return: a worker was killed within a message.

    Looks are counted, not seconds, which go on while the whole job is suspended.
    """
    before, looks = 0, 0
    while not is_over.wait(interval):
        items = found()
        if items is None:
            return
        looks = looks + 1 if items.is_waiting and items.num_waits == before else 0
        before = items.num_waits
        if looks == _LOOKS:
            items.kill("A loader worker stopped while it sent a batch")
        del items


def _workers_of(items: object) -> Sequence[BaseProcess]:
    return items._workers if isinstance(items, _HasWorkers) else ()  # noqa: SLF001


def _kill(items: object) -> None:
    for worker in _workers_of(items):
        worker.kill()
    if isinstance(items, _HasWorkers):
        # The last end through which something could come.
        items._worker_result_queue._writer.close()  # noqa: SLF001


def end_workers(items: object) -> None:
    """End the workers of PyTorch's iterator and wait for them; does nothing for other objects.

    Those that hang are killed, and PyTorch's own way to end is left to a thread: it may wait
    forever for what a worker held that was killed.
    """
    if isinstance(items, _HasWorkers):
        thread = threading.Thread(target=items._shutdown_workers, daemon=True)  # noqa: SLF001
        thread.start()
        thread.join(_GRACE)
        if thread.is_alive():
            _kill(items)
            thread.join(_GRACE)
        for worker in _workers_of(items):
            worker.join(_GRACE)


def _describe_deaths(items: object) -> str:
    """Say which workers have ended, and how; empty if none has."""
    codes = {each.pid: each.exitcode for each in _workers_of(items) if each.exitcode is not None}
    # Those of a stream end by themselves, with code 0, when it is over.
    failed = {pid: code for pid, code in codes.items() if code} or codes
    ends = [
        f"process {pid} "
        + (f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}")
        for pid, code in failed.items()
    ]
    who = "A loader worker" if len(ends) == 1 else "Loader workers"
    return f"{who} died: {'; '.join(ends)}{_describe_memory()}" if ends else ""


def _describe_memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return ""
    return f" ({size_text(int(found.split()[1]) * 1024)} of memory are available)"


@final
class Failures:
    """How often workers were lost in a row, without a batch between."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, loss: WorkersLost, then: str, *, remedy: str) -> None:
        """Log that workers were lost, and what happens now.

        Args:
            loss: how.
            then: a sentence on what happens now.
            remedy: what to do if this is the third time.

        Raises:
            WorkerError: then.
        """
        self._texts.append(str(loss))
        if len(self._texts) == _MOST_FAILURES:
            raise WorkerError(
                f"Loader workers were lost {_MOST_FAILURES} times without a batch between: "
                f"{'; '.join(self._texts)}. {remedy}"
            ) from loss
        # Ranks other than 0 show errors only.
        level = logging.ERROR if get_global_rank() else logging.WARNING
        # As text: who keeps the record must not keep the pass that the error leads to.
        _LOGGER.log(level, "%s. %s", str(loss), then)

    def clear(self) -> None:
        """Note that a batch came."""
        self._texts.clear()

    @property
    def is_next_the_last(self) -> bool:
        """Whether the next one is an error."""
        return len(self._texts) == _MOST_FAILURES - 1


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
    method = multiprocessing.get_start_method(allow_none=True) if kind is Process else ""
    # With forkserver, the server starts the worker, and ends with the training process.
    is_served = method == "forkserver" or kind.__name__ == "ForkServerProcess"
    if parent is not None and not is_served and os.getppid() != parent.pid:
        os._exit(1)


def _refuse_unpicklable(error: Exception) -> UsageError:
    return UsageError(
        "What loader workers get must be something that can be pickled, where they are not forked: "
        f"{error}. Define functions and classes at the top level of a module, and open files and "
        "connections in the worker, when the first sample is read; or pass num_workers=0."
    )
