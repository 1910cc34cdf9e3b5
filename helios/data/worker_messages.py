"""What workers get when they start, and how their results get to the training process.

Workers that are spawned or started by a server, as by default on macOS, on Windows and since Python
3.14, get the data set by ``pickle``, whose errors name a type. Here they name the path to it.

PyTorch's workers share a queue and an event, whose locks a worker may hold when it is killed, and
then everybody waits forever. Here each worker has a pipe of its own, and nothing is shared but a
byte. Messages are read as they come, so nobody waits for the rest of one whose sender is gone.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import queue
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import register_after_fork
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from helios.data.params import DataLoaderParams
from helios.errors import UsageError

_LENGTH = struct.Struct("!Q")
_MOST_BYTES = 1 << 20
_END_SECONDS = 1.0
_SHORT_SECONDS = 0.05
OF_DEATH = (EOFError, ConnectionError, FileNotFoundError)
"""Errors of one who reads the memory of a worker's tensors, if the worker died."""


@final
class Results:
    """The results of all workers; PyTorch uses it as its queue in the training process.

    With pinned memory a thread of PyTorch's calls :meth:`get`, otherwise the main thread does.
    """

    def __init__(self) -> None:
        self._incoming: dict[Connection, _Incoming] = {}
        self._ready: deque[bytes] = deque()
        self._is_ending = self._has_lost = False
        self._wakeup, self._waker = Pipe(duplex=False)
        for pipe in (self._wakeup, self._waker):
            close_in_children(pipe)

    def listen(self, pipe: Connection, sentinel: int) -> None:
        """Receive what a worker sends.

        Args:
            pipe: no other process sends through it.
            sentinel: becomes ready when the worker ends.
        """
        self._incoming[pipe] = _Incoming(pipe, sentinel)
        self._waker.send_bytes(b"")

    def get(self, timeout: float | None = None) -> Any:
        """Return the next result.

        Raises:
            queue.Empty: after the timeout, and as soon as a worker has ended: PyTorch looks then
                whether all workers live.
        """
        if self._has_lost and timeout is not None:
            # Its end may not be known to the system yet.
            timeout = min(timeout, _SHORT_SECONDS)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            rest = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            pipes = wait([self._wakeup, *self._incoming], rest)
            for pipe in pipes:
                if pipe is self._wakeup:
                    self._wakeup.recv_bytes()
                elif isinstance(pipe, Connection):
                    self._read(self._incoming[pipe])
            if not self._ready and (not pipes or self._is_ending or self._has_lost):
                raise queue.Empty
        try:
            return ForkingPickler.loads(self._ready.popleft())
        except OF_DEATH:
            ended = wait([each.sentinel for each in self._incoming.values()], _END_SECONDS)
            if not ended:
                raise
            self._has_lost = True
            raise queue.Empty from None

    def _read(self, incoming: _Incoming) -> None:
        try:
            self._ready += incoming.read()
        except (EOFError, OSError):
            wait([incoming.sentinel], _END_SECONDS)
            del self._incoming[incoming.pipe]
            incoming.pipe.close()
            self._has_lost = True

    def put(self, item: object) -> None:
        """Let a thread return from :meth:`get`; PyTorch puts something when a pass ends."""
        self._is_ending = True
        self._waker.send_bytes(b"")

    def cancel_join_thread(self) -> None:
        """Do nothing: no thread sends what is put."""

    def close(self) -> None:
        """Close all pipes."""
        for pipe in (self._wakeup, self._waker, *self._incoming):
            pipe.close()
        self._incoming.clear()


def close_in_children(pipe: Connection) -> None:
    """Let processes that are forked later not keep a pipe open."""
    register_after_fork(pipe, Connection.close)


@final
class _Incoming:
    """What has come through the pipe of a worker.

    Args:
        pipe: leads from the worker.
        sentinel: becomes ready when it ends.
    """

    def __init__(self, pipe: Connection, sentinel: int) -> None:
        self.pipe, self.sentinel = pipe, sentinel
        self._bytes = bytearray()

    def read(self) -> list[bytes]:
        """Return the messages that are complete by now; never waits if something has come.

        Raises:
            EOFError: if nothing will come any more.
        """
        if sys.platform == "win32":
            return [self.pipe.recv_bytes()]
        chunk = os.read(self.pipe.fileno(), _MOST_BYTES)
        if not chunk:
            raise EOFError
        self._bytes += chunk
        found = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return found


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
        """Send a result, or an error if it cannot be pickled."""
        try:
            message = ForkingPickler.dumps(item)
        except Exception as error:
            number, result = item
            message = ForkingPickler.dumps((number, _make_sendable(result, error)))
        if self._messages is None:
            self._messages = queue.SimpleQueue()
            threading.Thread(target=self._send, args=(self._messages,), daemon=True).start()
        self._messages.put(message)

    def _send(self, messages: queue.SimpleQueue[Any]) -> None:
        try:
            while True:
                _write(self._pipe, messages.get())
        except OSError:
            # The training process is gone, or needs nothing more.
            return

    def cancel_join_thread(self) -> None:
        """Do nothing: what is not sent when a worker ends is needed by nobody."""

    def close(self) -> None:
        """Do nothing; the pipe is closed when the worker ends."""


def _write(pipe: Connection, message: bytes) -> None:
    if sys.platform == "win32":
        pipe.send_bytes(message)
        return
    for part in (_LENGTH.pack(len(message)), message):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe.fileno(), rest) :]


def _make_sendable(result: Any, cause: Exception) -> ExceptionWrapper:
    """Return what is sent instead of a result that cannot be pickled."""
    if isinstance(result, ExceptionWrapper):
        # Its text has the name of the class.
        result.exc_type = RuntimeError
        return result
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


@contextmanager
def naming_culprits(dataset: object, options: DataLoaderParams | DataLoader[Any]) -> Iterator[None]:
    """Start the workers of a loader.

    Args:
        dataset: the user's data set.
        options: the options of its loader.

    Raises:
        UsageError: if something that workers get cannot be pickled.
    """
    try:
        yield
    except Exception as error:
        if options.num_workers and not _are_forked(options.multiprocessing_context):
            parts = {
                type(dataset).__name__: dataset,
                "collate_fn": options.collate_fn,
                "worker_init_fn": options.worker_init_fn,
            }
            for name, part in parts.items():
                if not _is_fine(part):
                    raise _refuse(*find_culprit(part, name, _is_fine), error) from error
        raise


def _are_forked(context: str | BaseContext | None) -> bool:
    if isinstance(context, str):
        return context == "fork"
    # A context without a method of its own has the default one.
    return (context or multiprocessing).get_start_method() == "fork"


def _refuse(place: str, culprit: object, error: Exception) -> UsageError:
    return UsageError(
        f"What loader workers get must be something that can be pickled, but {place} is "
        f"{describe_value(culprit)} ({error}). Define functions and classes at the top level of a "
        "module, and open files and connections in the worker, when the first sample is read; or "
        "pass num_workers=0."
    )


class _Probe(ForkingPickler):
    """Pickles as for a worker, and writes nothing; arrays of numbers are not read."""

    def reducer_override(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject
        return (int, ()) if is_array or isinstance(value, Tensor) else NotImplemented


def _is_fine(value: object) -> bool:
    try:
        _Probe(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        # Locks and queues of multiprocessing can be sent only while a process is started.
        return "through inheritance" in str(error)
    return True


def find_culprit(value: Any, place: str, is_fine: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the nearest part that cannot be pickled although all of its own parts can.

    The search is breadth-first, because objects may have reference cycles.

    Args:
        value: what cannot be pickled.
        place: its name, with which the path to the part begins.
        is_fine: whether a part can be pickled.

    Returns:
        The path to the part, such as ``data.images["handle"]``, and the part.
    """
    first = (place, value)
    waiting = deque([first])
    # By id; the values are kept alive, so that no id is reused.
    seen = {id(value): value}
    while waiting:
        place, value = waiting.popleft()
        broken = [(place + name, part) for name, part in _parts(value) if not is_fine(part)]
        if not broken:
            return place, value
        for found, part in broken:
            if id(part) not in seen:
                seen[id(part)] = part
                waiting.append((found, part))
    return first


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    # A class that defines its own pickling need not pickle its attributes.
    method: Any = type(value).__reduce__
    if method is object.__reduce__ and not isinstance(value, type | FunctionType | ModuleType):
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in attributes.items())


def describe_value(value: Any) -> str:
    """Return a value and its type for a message."""
    kind = type(value)
    text = repr(value)
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{short}, of type {kind.__module__}.{kind.__qualname__}"
