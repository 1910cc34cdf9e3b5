"""Runs the job of a rank in the process that the launcher started.

The rank ends with its launcher, even if its main thread is blocked, and its child processes end
with it. It reports its result or error before it closes any connection to other ranks, so that the
first report is the cause of a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch

from helios.core.logger_settings import LoggerSettings
from helios.core.utils import flush_outputs
from helios.distributed.pickling import pack_error
from helios.distributed.process_groups import DistributedInfo, is_lost_peer, join_group, leave_group
from helios.launch.ipc import Job, LaunchChannel, RankQueue, pickle_value, unpickle_value

READY, ITEM, LINE, DONE, FAILED = b"r", b"i", b"l", b"d", b"f"
_POLL_SECONDS = 1.0
_WATCH_NAME = "helios-watch"


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a rank.

    Attributes:
        info: its ranks and the number of processes.
        backend: the backend of the process group.
        meeting: URL of the rendezvous.
        timeout: timeout of collectives.
        device: index of its GPU; None for the CPU.
        num_threads: number of intra-op threads; None for that of the environment.
        start_method: start method of its loader workers, the same as in the launcher.
        loggers: levels and handlers of the launcher.
    """

    info: DistributedInfo
    backend: str
    meeting: str
    timeout: timedelta
    device: int | None
    num_threads: int | None
    start_method: str | None
    loggers: LoggerSettings


@dataclasses.dataclass(frozen=True)
class Failure:
    """The report of a rank's error.

    Attributes:
        rank: the rank.
        moment: when the error was caught, on the monotonic clock of the machine, in nanoseconds.
        is_consequence: whether a collective failed, so that another rank may be the cause.
        name: the type of the error.
        text: the traceback.
        error: the pickled error; None if its class cannot be pickled.
    """

    rank: int
    moment: int
    is_consequence: bool
    name: str
    text: str
    error: bytes | None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the report of an error that was just caught."""
        return cls(
            rank=rank,
            moment=time.monotonic_ns(),
            is_consequence=is_lost_peer(error),
            name=type(error).__qualname__,
            text="".join(traceback.format_exception(error)),
            error=pack_error(error),
        )


def run_rank(connection: Connection, place: WorkerConfig) -> None:
    """Run the job of one rank; the target of its process.

    Args:
        connection: the rank's end of the pipe to the launcher.
        place: the configuration of the rank.
    """
    end_with_launcher()
    if sys.platform != "win32":
        # Otherwise, a loader worker that outlives the rank would keep the pipe open, and the
        # launcher would not detect the end of the rank.
        os.register_at_fork(after_in_child=connection.close)
    multiprocessing.set_start_method(place.start_method, force=True)
    channel = LaunchChannel(connection)
    place.loggers.adopt(partial(_send_line, channel, place.info))
    try:
        channel.send(READY)
        result = _work(place, unpickle_value(channel.receive(), RankQueue(channel, ITEM)))
    except BaseException as error:
        # Before the connections to other ranks are closed, so that their errors follow.
        with contextlib.suppress(OSError):
            channel.send(FAILED, pickle.dumps(Failure.of(error, place.info.rank)))
        leave_group(is_failing=True)
        raise SystemExit(1) from None
    channel.send(DONE, result)
    _end_well()


def _send_line(channel: LaunchChannel, info: DistributedInfo, record: logging.LogRecord) -> None:
    if info.rank != 0:
        record.msg = f"rank {info.rank} of {info.world_size} - {record.msg}"
    channel.send(LINE, pickle.dumps(record))


def _end_well() -> NoReturn:
    """Run the usual exit handlers, but do not finalize the interpreter.

    A thread of a process group may release a tensor late; after the interpreter is finalized, that
    aborts the process.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way that skips finalization
    flush_outputs()
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
    result = pickle_value(
        job.function(place.info.rank, *job.args), "The result of a rank", "result"
    )
    leave_group()
    return result


def end_with_launcher() -> None:
    """End this process and its children when the process that started it ends.

    A thread waits for that, so it also works while the main thread is blocked in a collective. On
    Linux, the kernel does it too, in case the main thread never releases the interpreter lock.
    Call it in a rank of ``spawn``, or of torchrun, whose ranks would otherwise outlive it. A second
    call does nothing.
    """
    if any(thread.name == _WATCH_NAME for thread in threading.enumerate()):
        return
    parent = multiprocessing.parent_process()
    launcher = os.getppid() if parent is None or parent.pid is None else parent.pid
    sentinels = [] if parent is None else [parent.sentinel]
    if sys.platform != "win32" and os.getpgrp() != os.getpid():
        # The rank and its loader workers form a process group, so one signal ends all of them.
        os.setpgid(0, 0)
    if sys.platform == "linux":
        for sentinel in sentinels:
            _ask_kernel(sentinel)
    threading.Thread(
        target=_watch, args=(launcher, sentinels), name=_WATCH_NAME, daemon=True
    ).start()


def _ask_kernel(sentinel: int) -> None:
    """Make the kernel kill the process group when the launcher's end of a pipe is closed."""
    import fcntl

    # If the kernel does not support this, the thread does it alone.
    with contextlib.suppress(OSError):
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _watch(launcher: int, sentinels: list[int]) -> None:
    # The pipe is closed at once, unless a process that the launcher forked keeps it open. In that
    # case the parent's pid changes.
    while sys.platform == "win32" or os.getppid() == launcher:
        if wait(sentinels, _POLL_SECONDS):
            break
    _end_group()


def _end_group() -> NoReturn:
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
