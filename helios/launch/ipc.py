"""What travels between a launcher and its ranks: by value, never through shared memory.

``multiprocessing`` would share the memory of tensors, so that an update on one rank would change
the weights of all. Here everything is pickled into bytes of its own, and what cannot be pickled is
named.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import multiprocessing
import os
import pickle
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from helios.errors import UsageError

RANK_NAME = "helios-rank-"
# How a rank says that importing the script has started a training again; unlikely elsewhere.
UNGUARDED_EXIT = 113
_QUEUE = "queue"
_REMEDY = (
    "Define classes and functions at the top level of a module, and make the rest in setup(), "
    "which runs in every process; or start the script by torchrun, which hands nothing over."
)


@dataclasses.dataclass(frozen=True)
class Job:
    """What each rank runs: ``function(rank, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class LaunchQueue:
    """What the ranks of a launch have put, in the launcher; like ``multiprocessing.Queue`` (H65).

    The items of one rank come in the order in which it put them. They are there while the ranks
    run, for another thread, and afterwards. Hand the queue to the ranks among the arguments of
    ``spawn``, and name it there.
    """

    def __init__(self) -> None:
        self._items: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item; never waits."""
        self._items.put((False, item))

    def put_nowait(self, item: Any) -> None:
        """Add an item."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the oldest item.

        Args:
            block: wait for one where there is none.
            timeout: wait that many seconds at most.

        Raises:
            queue.Empty: when there is none, or none comes in time.
        """
        is_packed, item = self._items.get(block, timeout)
        return unpack(item) if is_packed else item

    def get_nowait(self) -> Any:
        """Remove and return the oldest item, or raise ``queue.Empty``."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of items."""
        return self._items.qsize()

    def empty(self) -> bool:
        """Return whether there is no item."""
        return self._items.empty()

    def full(self) -> bool:
        """Return False: there is always room."""
        return False

    def add_packed(self, data: bytes) -> None:
        """Add an item that came from a rank; it is unpickled by who takes it out."""
        self._items.put((True, data))

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A LaunchQueue can be handed to the ranks of its own launch only. Name it, too: "
            "spawn(..., args=(..., queue), queue=queue)."
        )


class LaunchChannel:
    """A rank's connection to its launcher; messages of several threads do not mix.

    Args:
        connection: the end of the pipe that belongs to the rank.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a message; returns when the launcher has taken in all but a rest of it.

        Args:
            kind: one byte that says what it is.
            data: the rest.

        Raises:
            UsageError: in a process that the rank has started, such as a loader worker.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                "The queue of a launch must be used in the process of a rank, not in one that the "
                "rank has started, such as a loader worker. Put the item in a hook or a step."
            )
        with self._lock:
            self._connection.send_bytes(kind + data)

    def receive(self) -> bytes:
        """Wait for a message of the launcher."""
        return self._connection.recv_bytes()


class RankQueue:
    """The side of a :class:`LaunchQueue` in a rank: items can be put, and go to the launcher.

    Args:
        channel: the connection to the launcher.
        kind: how the message of an item begins.
    """

    def __init__(self, channel: LaunchChannel, kind: bytes) -> None:
        self._channel = channel
        self._kind = kind

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send an item to the launcher, by value; waits until it is taken in."""
        self._channel.send(self._kind, pack(item, "queue.put(item)", "item"))

    def put_nowait(self, item: Any) -> None:
        """Do what :meth:`put` does."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> NoReturn:
        """Raise a UsageError: the launcher takes in all items, none is left for the ranks."""
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
        """Return False: there is always room."""
        return False


def _refuse(method: str) -> NoReturn:
    raise UsageError(
        f"queue.{method}() must be called in the process that started the ranks, which takes in "
        "all items at once. Call it after fit has returned, or use a collective between ranks."
    )


class _Packer(pickle.Pickler):
    """Pickles by value; knows what only the script itself can define."""

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


def pack(value: Any, what: str, name: str, own_queue: LaunchQueue | None = None) -> bytes:
    """Pickle a value, tensors by value.

    Args:
        value: what to pickle.
        what: the argument that it is, for messages.
        name: begins the way to what cannot be pickled, such as ``result["loss"]``.
        own_queue: is replaced by the rank's side of it.

    Raises:
        UsageError: if something in it cannot be pickled, or if a rank could not import its class.
    """
    file = io.BytesIO()
    packer = _Packer(file, own_queue)
    try:
        packer.dump(value)
    except Exception as error:
        place, culprit = _find_culprit(value, name, own_queue)
        raise UsageError(
            f"{what} must be something that can be pickled, because each rank is a process of its "
            f"own, but {place.lstrip('.')} is {_describe(culprit)} ({error}). {_REMEDY}"
        ) from error
    _check_main(packer.from_main)
    return file.getvalue()


def unpack(data: bytes, own_queue: RankQueue | None = None) -> Any:
    """Take back what :func:`pack` has made."""
    return _Unpacker(io.BytesIO(data), own_queue).load()


def _describe(value: Any) -> str:
    kind = type(value)
    text = repr(value)
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{short}, of type {kind.__module__}.{kind.__qualname__}"


def _is_fine(value: Any, own_queue: LaunchQueue | None) -> bool:
    try:
        _Packer(io.BytesIO(), own_queue).dump(value)
    except Exception:
        return False
    return True


def _find_culprit(value: Any, place: str, own_queue: LaunchQueue | None) -> tuple[str, Any]:
    """Return the nearest part that cannot be pickled though all of its own parts can.

    Objects may refer to each other in circles, so the search goes level by level.
    """
    first = (place, value)
    waiting = deque([first])
    # By identity; the values are kept, so that no number is given twice.
    seen = {id(value): value}
    while waiting:
        place, value = waiting.popleft()
        broken = [
            (place + name, part) for name, part in _parts(value) if not _is_fine(part, own_queue)
        ]
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
    # A class that says itself how it is pickled need not use its attributes.
    method: Any = type(value).__reduce__
    if method is object.__reduce__ and not isinstance(value, type | FunctionType | ModuleType):
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in attributes.items())


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
            "imports it, but this is a notebook, an interactive session, python -c or a script on "
            f"standard input{found}. Put the code into a file and run that, or import it from "
            "there; in a notebook train in one process (nproc=1)."
        )


def refuse_nested_start() -> None:
    """Stop where a process that is still importing the script starts a training.

    That happens to a script that starts it outside of ``if __name__ == "__main__":``. To be called
    before anything else is done, as each process would do it, too.

    Raises:
        SystemExit: in a rank, so that its launcher tells the user once what is wrong.
        UsageError: in any other process, such as a loader worker (a ``RuntimeError``).
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(RANK_NAME):
        raise SystemExit(UNGUARDED_EXIT)
    raise UsageError(describe_unguarded_script())


def describe_unguarded_script() -> str:
    """Return what to tell the user of a script without a guard."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "The script"
    return (
        f'{script} must start its training below the line `if __name__ == "__main__":`, because '
        "each process that is started imports the script, and would start the training again. "
        "Add the line, and indent what comes after the definitions of classes and functions."
    )
