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
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import Process
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from helios.core import rng
from helios.core.signal_watch import ignore_signals, noted_signals, signal_name
from helios.distributed.collectives import get_global_rank
from helios.errors import WorkerError
from helios.storage.content_hash import Content
from helios.text import size_text

_LOGGER = logging.getLogger(__name__)
_INTERVAL = 0.5
"""Seconds between two looks at the workers of a pass."""
_GRACE = 5.0
_PAUSE = 0.01
_ZEROS = bytes(512)
"""As many as a pipe that has room always takes."""
_MOST_FAILURES = 3
REMEDY = (
    "Pass num_workers=0 to see why, under python -X faulthandler. If it just takes long, raise "
    "the timeout."
)
_OF_DEATH = (EOFError, ConnectionError, FileNotFoundError)
"""Errors of one who reads the memory of a worker's tensors, if the worker died."""


class WorkersLost(Exception):  # noqa: N818 - it is handled by opening the pass again
    """Workers died, or did not answer; the text says which."""


@runtime_checkable
class _HasWorkers(Protocol):
    """PyTorch's iterator over what workers fetch, or one like it."""

    _workers: list[BaseProcess]
    _worker_result_queue: Any

    def _shutdown_workers(self) -> None: ...


def as_parcel(item: Any) -> Any:
    """Return what a worker sends: the item, in a parcel unless it surely can be pickled."""
    return item if _is_plain(item) else Parcel(item)


_PLAIN = frozenset((type(None), bool, int, float, str, bytes, Tensor))


def _is_plain(item: Any) -> bool:
    kind = type(item)
    if kind is dict:
        return _PLAIN.issuperset(map(type, item)) and all(map(_is_plain, item.values()))
    if kind is np.ndarray:
        return not item.dtype.hasobject
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, item)))


@final
class Parcel:
    """Sends an item from a worker, or the reason why it cannot be pickled.

    A queue of Python only prints that reason, and the training process would wait for the item.
    """

    def __init__(self, item: Any) -> None:
        self._item = item

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        try:
            return pickle.loads, (bytes(ForkingPickler.dumps(self._item)),)
        except Exception as error:
            return _Unsent, (str(error),)


@final
class _Unsent(NamedTuple):
    """What arrives in place of an item that cannot be pickled."""

    reason: str


class ReadBatch(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: the batch.
        content: what was read of it.
    """

    batch: Any
    content: Content


@final
class WorkerItems(Iterator[Any]):
    """What PyTorch's iterator returns, until workers are lost.

    PyTorch looks for dead workers every five seconds. A thread looks more often, and ends workers
    that do not answer.

    Args:
        begin: makes the iterator, and starts its workers.
        loader: whose workers they are.
        timeout: seconds without an item after which they are lost; ``None`` for never.
        failures: those of the pass; persistent workers may have been lost before it.

    Attributes:
        timeout: as given; it may be changed.
        current_wait: an object of its own for each time that workers are waited for, if they are.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        loader: DataLoader[Any],
        timeout: float | None,
        failures: Failures,
    ) -> None:
        self.timeout = timeout
        self._loader = loader
        self.current_wait: object = None
        self._lost = ""
        self._items: Any = loader._iterator  # noqa: SLF001 - that of persistent workers
        self._is_over = threading.Event()
        weakref.finalize(self, self._is_over.set)
        args = (weakref.ref(self), self._is_over)
        watch = threading.Thread(target=_watch, args=args, name="helios-workers", daemon=True)
        if _workers_of(self._items):
            watch.start()
        _leave_watch()
        try:
            self._items = self._wait(begin)
        except WorkersLost as loss:
            self._end_workers()
            failures.add(loss, "New workers take their place.", remedy=REMEDY)
            self._lost, self._items = "", begin()
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
        sent = item.batch if isinstance(item, ReadBatch) else item
        if isinstance(sent, _Unsent):
            raise WorkerError(
                f"Workers send batches by pickle, but for this one it failed: {sent.reason}. "
                "Return something else from the data set or collate_fn, or pass num_workers=0."
            )
        return item

    def _wait(self, call: Callable[[], Any]) -> Any:
        self.current_wait = object()
        try:
            return call()
        except Exception as error:
            loss = self._find_loss(error)
            if not loss:
                raise
        finally:
            self.current_wait = None
        # Not from PyTorch's error, whose frames would keep the iterator.
        raise WorkersLost(loss)

    def _find_loss(self, error: Exception) -> str:
        """Say how workers were lost; empty if the error has another cause."""
        text = str(error)
        if isinstance(error, StopIteration) or "in DataLoader worker process" in text:
            return ""
        if self._lost or text.startswith("DataLoader timed out"):
            return self._lost or text
        if isinstance(error, _OF_DEATH) or "exited unexpectedly" in text:
            # Its end may not be known to the system yet.
            for _ in range(int(_GRACE / _PAUSE)):
                if deaths := _describe_deaths(self._items):
                    return deaths
                time.sleep(_PAUSE)
        return ""

    def check(self, seconds: float) -> None:
        """Kill the workers if one has died, or if they did not answer for too long.

        Args:
            seconds: how long they have been waited for.
        """
        loss = _describe_deaths(self._items, failed_only=True)
        if not loss and self.timeout is not None and seconds >= self.timeout:
            loss = f"No batch came from the loader workers for {seconds:g} s"
        if loss and isinstance(self._items, _HasWorkers):
            self._lost, here = loss, self.current_wait
            # A thread that pins receives what they send; this one is woken by PyTorch.
            delay = 2 * _GRACE if self._loader.pin_memory else 0
            _kill(self._items, lambda: self.current_wait is not here, delay)

    def close(self, *, keeps_workers: bool = False) -> None:
        """End the pass.

        Args:
            keeps_workers: whether persistent workers are left for the next one.
        """
        self._is_over.set()
        if not (keeps_workers and self._loader.persistent_workers):
            self._end_workers()

    def _end_workers(self) -> None:
        end_workers(self._items)
        if self._loader._iterator is self._items:  # noqa: SLF001
            self._loader._iterator = None  # noqa: SLF001


def _leave_watch() -> None:
    """Keep PyTorch's handler of SIGCHLD out.

    It raises wherever the process is, even while a queue starts its thread, or in a collective.
    """
    if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
        signal_handling._SIGCHLD_handler_set = True  # noqa: SLF001
        found = signal.getsignal(signal.SIGCHLD)
        if getattr(found, "__module__", "") == signal_handling.__name__:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _watch(found: weakref.ref[WorkerItems], is_over: threading.Event) -> None:
    # Looks are counted, not seconds, which go on while the whole job is suspended.
    before, looks = None, 0
    while not is_over.wait(_INTERVAL):
        items = found()
        if items is None:
            return
        now = items.current_wait
        looks = looks + 1 if now is not None and now is before else 0
        before = now
        if looks:
            items.check(looks * _INTERVAL)
        del items


def _workers_of(items: object) -> Sequence[BaseProcess]:
    return items._workers if isinstance(items, _HasWorkers) else ()  # noqa: SLF001


def _kill(items: _HasWorkers, is_free: Callable[[], bool], delay: float = 0) -> None:
    """Kill the workers, and free whoever reads half a message of theirs.

    Args:
        items: PyTorch's iterator.
        is_free: whether nobody does.
        delay: seconds to wait for that before.
    """
    for worker in items._workers:  # noqa: SLF001
        worker.kill()
    for worker in items._workers:  # noqa: SLF001
        worker.join(_GRACE)
    while delay > 0 and not is_free():
        delay -= _PAUSE
        time.sleep(_PAUSE)
    # Closing this end would not do if a process that was forked later has it, too. No message ends
    # with zeros, so the one that is completed is an error.
    patience = _GRACE
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        # A descriptor of its own: PyTorch may close the pipe meanwhile.
        pipe = os.dup(items._worker_result_queue._writer.fileno())  # noqa: SLF001
        stack.callback(os.close, pipe)
        room = select.poll()
        room.register(pipe, select.POLLOUT)
        while patience > 0 and not is_free():
            if room.poll(_PAUSE * 1000):
                os.write(pipe, _ZEROS)
            else:
                patience -= _PAUSE


def end_workers(items: object) -> None:
    """End the workers of PyTorch's iterator and wait for them; does nothing for other objects.

    Those that hang are killed, and PyTorch's own way to end is left to a thread: it may wait
    forever for what a worker held that was killed.
    """
    if isinstance(items, _HasWorkers):
        thread = threading.Thread(target=items._shutdown_workers, daemon=True)  # noqa: SLF001
        thread.start()
        thread.join(_GRACE)
        _kill(items, lambda: not thread.is_alive())


def _describe_deaths(items: object, *, failed_only: bool = False) -> str:
    """Say which workers have ended, and how; empty if none has.

    Args:
        items: PyTorch's iterator.
        failed_only: whether those do not count that ended with code 0, as those of a stream do when
            it is over.
    """
    codes = {each.pid: each.exitcode for each in _workers_of(items) if each.exitcode is not None}
    ends = [
        f"process {pid} "
        + (f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}")
        for pid, code in codes.items()
        if code or not failed_only
    ]
    who = "A loader worker" if len(ends) == 1 else "Loader workers"
    return f"{who} died: {'; '.join(ends)}{_describe_memory()}" if ends else ""


def _describe_memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return ""
    return f" ({size_text(int(found.split()[1]) * 1024)} of memory is available)"


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
        sys.exit(1)
