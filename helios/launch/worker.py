"""A rank that was started by a launcher: what runs in its process.

It ends with its launcher, whatever its main thread waits for; it reports how its work went before
it closes a connection, so that the first report names the cause; and it ends with all that it has
started itself.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from helios.distributed.process_groups import DistributedInfo, is_lost_peer, join_group, leave_group
from helios.launch.ipc import Job, LaunchChannel, RankQueue, pack, unpack

READY, ITEM, DONE, FAILED = b"r", b"i", b"d", b"f"
_POLL_SECONDS = 1.0
_WATCH_NAME = "helios-watch"


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Where a rank stands and meets the others.

    Attributes:
        info: its number among all.
        backend: that of the process group.
        meeting: where the group is made.
        timeout: of its collectives.
        device: number of its GPU; None for the CPU.
        num_threads: that it computes with; None for what its environment says.
        start_method: how its loader workers are started: as the launcher would.
    """

    info: DistributedInfo
    backend: str
    meeting: str
    timeout: timedelta
    device: int | None
    num_threads: int | None
    start_method: str | None


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank tells about its error.

    Attributes:
        rank: its number.
        moment: when it was caught, by the clock that all processes of a machine share.
        is_consequence: whether a collective failed, so that the cause may be another rank's.
        name: the type of the error.
        text: the traceback.
        error: the error itself, pickled; None where its class cannot be.
    """

    rank: int
    moment: int
    is_consequence: bool
    name: str
    text: str
    error: bytes | None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describe an error that was just caught."""
        return cls(
            rank=rank,
            moment=time.monotonic_ns(),
            is_consequence=is_lost_peer(error),
            name=type(error).__qualname__,
            text="".join(traceback.format_exception(error)),
            error=pack_error(error),
        )


class _Parts:
    """An error that its own way of being pickled would not bring back, taken apart.

    ``pickle`` calls the class with ``args``, which are often not what its constructor takes.

    Args:
        error: the error.
    """

    def __init__(self, error: BaseException) -> None:
        kind = type(error)
        args = error.args if _can_travel(error.args) else (str(error),)
        attributes = {name: part for name, part in vars(error).items() if _can_travel(part)}
        self._parts = (kind, args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._parts


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def _can_travel(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an error, which ``pickle.loads`` takes back; one of an odd class part by part.

    Returns:
        The bytes; None where the class itself cannot be pickled. What else cannot is left out.
    """
    for make in (lambda: error, lambda: _Parts(error)):
        try:
            data = pickle.dumps(make())
            again = pickle.loads(data)
            if type(again) is type(error) and str(again) == str(error):
                return data
        except Exception:
            continue
    return None


def run_rank(connection: Connection, place: WorkerConfig) -> None:
    """Do the work of one rank; the target of its process.

    Args:
        connection: its end of the pipe to the launcher.
        place: where it stands.
    """
    end_with_launcher()
    if sys.platform != "win32":
        # Else a worker that outlives the rank would keep the pipe open, and the launcher would not
        # see the end of the rank.
        os.register_at_fork(after_in_child=connection.close)
    multiprocessing.set_start_method(place.start_method, force=True)
    channel = LaunchChannel(connection)
    try:
        channel.send(READY)
        result = _work(place, unpack(channel.receive(), RankQueue(channel, ITEM)))
    except BaseException as error:
        # Before the connections to the other ranks are closed: their errors must come later.
        with contextlib.suppress(OSError):
            channel.send(FAILED, pickle.dumps(Failure.of(error, place.info.rank)))
        leave_group(is_failing=True)
        raise SystemExit(1) from None
    channel.send(DONE, result)
    _end_well()


def _end_well() -> NoReturn:
    """Do what is done at the end of a process, but do not take the interpreter apart.

    A thread of a process group may be late to let go of a tensor; where there is no interpreter
    any more, that aborts the process.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - Python itself does so, but only to end altogether
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _work(place: WorkerConfig, job: Job) -> bytes:
    device = None
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    if place.device is not None:
        device = torch.device("cuda", place.device)
        torch.cuda.set_device(device)
    join_group(
        place.info,
        backend=place.backend,
        meeting=place.meeting,
        timeout=place.timeout,
        device=device,
    )
    result = pack(job.function(place.info.rank, *job.args), "The result of a rank", "result")
    leave_group()
    return result


def end_with_launcher() -> None:
    """End this process, and all that it starts, when the process that started it is gone.

    A thread waits for that, so that it also works while the main thread waits in a collective. On
    Linux the kernel is asked, too, for a main thread that never lets go of the interpreter's lock.
    To be called in a rank: of ``spawn``, or of torchrun, whose ranks live on without it. A second
    call does nothing.
    """
    if any(thread.name == _WATCH_NAME for thread in threading.enumerate()):
        return
    parent = multiprocessing.parent_process()
    launcher = os.getppid() if parent is None or parent.pid is None else parent.pid
    sentinels = [] if parent is None else [parent.sentinel]
    if sys.platform != "win32" and os.getpgrp() != os.getpid():
        # A group of its own holds the rank and its loader workers: one signal ends them together.
        os.setpgid(0, 0)
    if sys.platform == "linux":
        for sentinel in sentinels:
            _ask_kernel(sentinel)
    threading.Thread(
        target=_watch, args=(launcher, sentinels), name=_WATCH_NAME, daemon=True
    ).start()


def _ask_kernel(sentinel: int) -> None:
    """Have the kernel kill the group when the launcher's end of a pipe is closed."""
    import fcntl

    # A kernel without this feature leaves it to the thread.
    with contextlib.suppress(OSError):
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _watch(launcher: int, sentinels: list[int]) -> None:
    # The pipe tells at once. Its other end may live on in a process that the launcher has forked;
    # the parent's number tells then.
    while sys.platform == "win32" or os.getppid() == launcher:
        if wait(sentinels, _POLL_SECONDS):
            break
    _end_group()


def _end_group() -> NoReturn:
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
