"""How results get from workers to the training process: each worker has a pipe of its own.

PyTorch's workers share a queue and an event, whose locks a worker may hold when it is killed, and
then everybody waits forever. Here nothing is shared but a byte, and the pipe of a worker that died
just ends, also within a message.
"""

from __future__ import annotations

import queue
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import register_after_fork
from typing import Any, final

from torch._utils import ExceptionWrapper

from helios.errors import UsageError

_REAPING_SECONDS = 10.0
OF_DEATH = (EOFError, ConnectionError, FileNotFoundError)
"""Errors of one who reads what a worker has sent, or the memory of its tensors, if it died."""


@final
class Results:
    """The results of all workers; PyTorch uses it as its queue in the training process."""

    def __init__(self) -> None:
        self._workers: dict[Connection, BaseProcess] = {}
        self._bell, self._button = Pipe(duplex=False)
        _close_in_children(self._bell)
        _close_in_children(self._button)

    def listen(self, pipe: Connection, worker: BaseProcess) -> None:
        """Receive what a worker sends through a pipe, which no other process sends through."""
        _close_in_children(pipe)
        self._workers[pipe] = worker

    def leave(self, worker: BaseProcess) -> None:
        """Receive nothing more from a worker."""
        for pipe, owner in list(self._workers.items()):
            if owner is worker:
                del self._workers[pipe]
                pipe.close()

    def get(self, timeout: float | None = None) -> Any:
        """Return the next result.

        Raises:
            queue.Empty: after the timeout, and as soon as a worker has ended: PyTorch looks then
                whether all workers live.
        """
        for pipe in wait([self._bell, *self._workers], timeout):
            if pipe is self._bell:
                self._bell.recv_bytes()
            elif isinstance(pipe, Connection):
                worker = self._workers[pipe]
                try:
                    return ForkingPickler.loads(_receive(pipe))
                except OF_DEATH:
                    # PyTorch must not find a process alive that has only closed its files yet.
                    worker.join(_REAPING_SECONDS)
                    if worker.is_alive():
                        raise
                    self.leave(worker)
            break
        raise queue.Empty

    def put(self, item: object) -> None:
        """Let a thread return from :meth:`get`; PyTorch puts something when a pass ends."""
        self._button.send_bytes(b"")

    def cancel_join_thread(self) -> None:
        """Do nothing: no thread sends what is put."""

    def close(self) -> None:
        """Close all pipes."""
        for pipe in (self._bell, self._button, *self._workers):
            pipe.close()
        self._workers.clear()


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except OSError as error:
        # The rest of a message is missing; other errors of this class are not those of a pipe.
        raise EOFError from error


def _close_in_children(pipe: Connection) -> None:
    """Let processes that are forked later not keep a pipe open."""
    register_after_fork(pipe, Connection.close)


@final
class ResultSender:
    """What a worker puts its results into; it fetches the next batch while a thread sends them.

    Args:
        pipe: leads to the training process.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[Any] | None = None

    def put(self, item: tuple[Any, Any]) -> None:
        """Send a result, or the error if it cannot be pickled."""
        number, _ = item
        try:
            message = ForkingPickler.dumps(item)
        except Exception as error:
            message = ForkingPickler.dumps((number, _wrap(error)))
        if self._messages is None:
            self._messages = queue.SimpleQueue()
            threading.Thread(target=self._send, args=(self._messages,), daemon=True).start()
        self._messages.put(message)

    def _send(self, messages: queue.SimpleQueue[Any]) -> None:
        try:
            while True:
                self._pipe.send_bytes(messages.get())
        except OSError:
            # The training process is gone, or needs nothing more.
            return

    def cancel_join_thread(self) -> None:
        """Do nothing: what is not sent when a worker ends is needed by nobody."""

    def close(self) -> None:
        """Do nothing; the pipe is closed when the worker ends."""


def _wrap(cause: Exception) -> ExceptionWrapper:
    try:
        raise UsageError(
            f"What a loader worker returns must be something that can be pickled, but: {cause}. "
            "Return tensors, arrays, numbers, strings and containers of them, or pass "
            "num_workers=0."
        ) from cause
    except UsageError:
        return ExceptionWrapper(where="in a loader worker")  # type: ignore[no-untyped-call]


@final
class Flag:
    """An event without a lock, that is set once.

    Args:
        byte: a byte of memory that all processes share.
    """

    def __init__(self, byte: Any) -> None:
        self._byte = byte

    def set(self) -> None:
        """Set it for all processes."""
        self._byte.value = 1

    def is_set(self) -> bool:
        """Whether it was set."""
        return bool(self._byte.value)
