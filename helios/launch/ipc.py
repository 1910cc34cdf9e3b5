"""Sends values between a launcher and its ranks by value, never through shared memory.

``multiprocessing`` would share the memory of tensors, so an update on one rank would change the
weights of all. Here, all values are pickled by value, and errors name what cannot be pickled.
"""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from helios.distributed.pickling import describe_value, find_culprit
from helios.errors import UsageError

RANK_NAME = "helios-rank-"
# Exit code of a rank if importing the script starts training again; an unusual number.
UNGUARDED_EXIT = 113
_QUEUE = "queue"
_REMEDY = (
    "Define classes and functions at the top level of a module, and create the rest in setup(), "
    "which runs in every process; or start the script with torchrun, which copies nothing."
)


@dataclasses.dataclass(frozen=True)
class Job:
    """The call that each rank runs: ``function(rank, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class LaunchQueue:
    """A queue from the ranks to the launcher, with the interface of ``multiprocessing.Queue``.

    Items of one rank stay in order. They are available to other threads while the ranks run, and
    afterwards. Pass the queue to ``spawn`` both in ``args`` and as ``queue``.
    """

    def __init__(self) -> None:
        self._items: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item; never blocks."""
        self._items.put((False, item))

    def put_nowait(self, item: Any) -> None:
        """Add an item."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the oldest item.

        Args:
            block: whether to wait if the queue is empty.
            timeout: maximum number of seconds to wait; ``None`` for no limit.

        Raises:
            queue.Empty: if there is no item, or none arrives in time.
        """
        is_packed, item = self._items.get(block, timeout)
        return unpickle_value(item) if is_packed else item

    def get_nowait(self) -> Any:
        """Remove and return the oldest item, or raise ``queue.Empty``."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of items."""
        return self._items.qsize()

    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return self._items.empty()

    def full(self) -> bool:
        """Return False, because the queue is unbounded."""
        return False

    def add_packed(self, data: bytes) -> None:
        """Add a pickled item of a rank; :meth:`get` unpickles it."""
        self._items.put((True, data))

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A LaunchQueue can be passed to the ranks of its own launch only. Pass it as queue, "
            "too: spawn(..., args=(..., queue), queue=queue)."
        )


class LaunchChannel:
    """A rank's thread-safe connection to its launcher.

    Args:
        connection: the rank's end of the pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a message; blocks while the pipe is full.

        Args:
            kind: one byte for the type of the message.
            data: the content.

        Raises:
            UsageError: in a child process of the rank, such as a loader worker.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                "The queue of a launch must be used in the process of a rank, not in a child "
                "process such as a loader worker. Put the item in a hook or a step."
            )
        with self._lock:
            self._connection.send_bytes(kind + data)

    def receive(self) -> bytes:
        """Wait for a message from the launcher."""
        return self._connection.recv_bytes()


class RankQueue:
    """A rank's end of a :class:`LaunchQueue`, which sends items to the launcher.

    Args:
        channel: the connection to the launcher.
        kind: the type byte of a message with an item.
    """

    def __init__(self, channel: LaunchChannel, kind: bytes) -> None:
        self._channel = channel
        self._kind = kind

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send an item to the launcher by value; blocks while the pipe is full."""
        self._channel.send(self._kind, pickle_value(item, "queue.put(item)", "item"))

    def put_nowait(self, item: Any) -> None:
        """Send an item, as :meth:`put` does."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> NoReturn:
        """Raise a UsageError, because only the launcher can read items."""
        _refuse("get")

    def get_nowait(self) -> NoReturn:
        """Raise a UsageError, as :meth:`get` does."""
        _refuse("get_nowait")

    def qsize(self) -> NoReturn:
        """Raise a UsageError, as :meth:`get` does."""
        _refuse("qsize")

    def empty(self) -> NoReturn:
        """Raise a UsageError, as :meth:`get` does."""
        _refuse("empty")

    def full(self) -> bool:
        """Return False, because the queue is unbounded."""
        return False


def _refuse(method: str) -> NoReturn:
    raise UsageError(
        f"queue.{method}() must be called in the process that started the ranks, which receives "
        "all items. Call it after fit has returned, or use a collective between ranks."
    )


class _Packer(pickle.Pickler):
    """Pickles by value; collects the names of what the script itself defines."""

    def __init__(self, file: io.BytesIO, own_queue: LaunchQueue | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._own_queue = own_queue
        self.from_main: list[str] = []

    def persistent_id(self, obj: Any) -> str | None:
        return _QUEUE if obj is self._own_queue and obj is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            self.from_main.append(obj.__qualname__)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, own_queue: RankQueue | None) -> None:
        super().__init__(file)
        self._own_queue = own_queue

    def persistent_load(self, pid: str) -> RankQueue | None:
        return self._own_queue


def pickle_value(value: Any, what: str, name: str, own_queue: LaunchQueue | None = None) -> bytes:
    """Pickle a value, tensors by value.

    Args:
        value: the value to pickle.
        what: description of the value in messages.
        name: root of the path to a part that cannot be pickled, such as ``result["loss"]``.
        own_queue: a queue in the value, which is replaced by the rank's end of it.

    Raises:
        UsageError: if a part of it cannot be pickled, or if a rank could not import its class.
    """
    file = io.BytesIO()
    packer = _Packer(file, own_queue)
    try:
        packer.dump(value)
    except Exception as error:
        place, culprit = find_culprit(value, name, partial(_is_fine, own_queue=own_queue))
        raise UsageError(
            f"{what} must be something that can be pickled, because each rank is a separate "
            f"process, but {place.lstrip('.')} is {describe_value(culprit)} ({error}). {_REMEDY}"
        ) from error
    _check_main(packer.from_main)
    return file.getvalue()


def unpickle_value(data: bytes, own_queue: RankQueue | None = None) -> Any:
    """Return the value that :func:`pickle_value` pickled."""
    return _Unpacker(io.BytesIO(data), own_queue).load()


def _is_fine(value: Any, own_queue: LaunchQueue | None) -> bool:
    try:
        _Packer(io.BytesIO(), own_queue).dump(value)
    except Exception:
        return False
    return True


def _check_main(names: list[str]) -> None:
    """Check that ranks can import the script that is run."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file and Path(file).exists()):
        return
    if names or file:
        found = f", and {', '.join(sorted(set(names)))} is defined here" if names else ""
        raise UsageError(
            "Several processes must be started from a script in a file, because each of them "
            "imports it, but this is a notebook, an interactive session, python -c or a script "
            f"from standard input{found}. Move your classes and functions to a file, and import "
            "them here; or train in one process (nproc=1)."
        )


def refuse_nested_start() -> None:
    """Raise an error if a process starts training while it is still importing the script.

    This happens if a script starts training outside ``if __name__ == "__main__":``. Call this
    function before anything else, because each process would repeat it.

    Raises:
        SystemExit: in a rank, so that its launcher explains the error once.
        UsageError: in any other process, such as a loader worker (a ``RuntimeError``).
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(RANK_NAME):
        raise SystemExit(UNGUARDED_EXIT)
    raise UsageError(describe_unguarded_script())


def describe_unguarded_script() -> str:
    """Return the error message for a script without a main guard."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "The script"
    return (
        f'{script} must start its training below the line `if __name__ == "__main__":`, because '
        "each new process imports the script and would start the training again. Add the line "
        "after the definitions of classes and functions, and indent everything below it."
    )
