"""Runs the work of a rank in a process that :func:`helios.launch.spawning.spawn` has started.

The rank ends with its launcher, even if its main thread is blocked, and its child processes end
with it. If it fails only because another rank has, it waits until the launcher has seen that one.
"""

from __future__ import annotations

import atexit
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
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from helios.core.logger_settings import LoggerSettings
from helios.core.utils import flush_outputs
from helios.distributed.pickling import loads, pack_by_value, pack_error
from helios.distributed.process_groups import DistributedInfo, is_lost_peer, join_group, leave_group
from helios.errors import UsageError

RANK_NAME = "helios-rank-"
# Set while ranks start, so that they know it when they import the script.
STARTING = "HELIOS_RANK_IS_STARTING"
# Exit code of a rank if importing the script starts training again; an unusual number.
UNGUARDED_EXIT = 113
# After a failure, ranks have this long to end by themselves, and again after SIGTERM. In total,
# this is well below the ten seconds that a scheduler waits.
GRACE_SECONDS = 3.0
JOB, CAUSE_IS_KNOWN, ERROR, RESULT = "job", "cause-is-known", "error-{}", "result-{}"
"""The files in the folder of a launch, the last two with the number of a rank."""
_POLL_SECONDS = 1.0
_SHORT_SECONDS = 0.02
_WATCH_NAME = "helios-watch"


class RankQueue:
    """Sends items to the process that started the ranks: ``trainer.queue`` in a rank.

    Args:
        writer: the end of a pipe that all ranks share.
        lock: held while one of them writes.
    """

    def __init__(self, writer: Connection, lock: Lock) -> None:
        self._writer = writer
        self._lock = lock

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send an item by value; blocks while the pipe is full."""
        self.send((pack_by_value(item, "queue.put(item)"), None))

    def send(self, message: tuple[bytes | None, logging.LogRecord | None]) -> None:
        """Send a packed item, or a line of the log."""
        with self._lock:
            self._writer.send(message)


@dataclasses.dataclass(frozen=True)
class Seat:
    """The settings of a rank.

    Attributes:
        info: its ranks and the number of processes.
        folder: the folder of the launch.
        port: where the store of the launch is, on this machine.
        device: index of its GPU; None for the CPU.
        num_threads: number of intra-op threads; None for that of the environment.
        start_method: start method of its loader workers, the same as in the launcher.
        loggers: levels and handlers of the launcher.
    """

    info: DistributedInfo
    folder: Path
    port: int
    device: int | None
    num_threads: int | None
    start_method: str | None
    loggers: LoggerSettings


def run_rank(seat: Seat, queue: RankQueue) -> None:
    """Run the job of one rank, and write its packed result."""
    end_with_launcher()
    os.environ.pop(STARTING, None)
    multiprocessing.current_process().name = f"{RANK_NAME}{seat.info.rank}"
    multiprocessing.set_start_method(seat.start_method, force=True)
    seat.loggers.adopt(partial(_send_line, queue, seat.info))
    done = threading.Event()
    # After all other exit handlers.
    atexit.register(_end, done)
    threading.Thread(target=_end_late, args=(done,), name="helios-end", daemon=True).start()
    try:
        _work(seat, queue)
        done.set()
    except BaseException as error:
        failure = pickle.dumps((pack_error(error), traceback.format_exc()))
        (seat.folder / ERROR.format(seat.info.rank)).write_bytes(failure)
        deadline = time.monotonic() + GRACE_SECONDS
        while is_lost_peer(error) and time.monotonic() < deadline:
            if (seat.folder / CAUSE_IS_KNOWN).exists():
                break
            time.sleep(_SHORT_SECONDS)
        leave_group(is_failing=True)
        if not isinstance(error, Exception):
            # PyTorch takes a KeyboardInterrupt for a regular end.
            raise SystemExit(1) from None
        raise


def _end_late(done: threading.Event) -> None:
    """End this process if a thread of the user's, or an exit handler, keeps it."""
    threading.main_thread().join()
    time.sleep(GRACE_SECONDS)
    _end(done)


def _end(done: threading.Event) -> NoReturn:
    """End this process without finalizing the interpreter.

    A thread of a process group may release a tensor late; after the interpreter is finalized, that
    aborts the process.
    """
    flush_outputs()
    os._exit(0 if done.is_set() else 1)


def _send_line(queue: RankQueue, info: DistributedInfo, record: logging.LogRecord) -> None:
    if info.rank != 0:
        record.msg = f"rank {info.rank} of {info.world_size} - {record.msg}"
    queue.send((None, record))


def _work(seat: Seat, queue: RankQueue) -> None:
    device = None
    if seat.num_threads is not None:
        torch.set_num_threads(seat.num_threads)
    if seat.device is not None:
        device = torch.device("cuda", seat.device)
        torch.cuda.set_device(device)
    function, args, takes_queue = loads((seat.folder / JOB).read_bytes())
    join_group(
        seat.info,
        backend="gloo" if device is None else "nccl",
        store=dist.TCPStore("127.0.0.1", seat.port, wait_for_workers=False),  # type: ignore[attr-defined]
        device=device,
    )
    result = function(seat.info.rank, *args, *((queue,) if takes_queue else ()))
    packed = pack_by_value(result, "The result of a rank")
    leave_group()
    # As a file: a rank that is killed while it sends it would leave the launcher with half of it.
    (seat.folder / RESULT.format(seat.info.rank)).write_bytes(packed)


def refuse_nested_start() -> None:
    """Raise an error if a process starts training while it is still importing the script.

    This happens if a script starts training outside ``if __name__ == "__main__":``. Call this
    function before anything else, because each process would repeat it.

    Raises:
        SystemExit: in a rank, so that its launcher explains the error once.
        UsageError: in any other process, such as a loader worker (a ``RuntimeError``).
    """
    # multiprocessing imports the script under this name, and makes it the main module afterwards.
    script = sys.modules.get("__mp_main__")
    if script is None or script.__name__ == "__main__" or script is sys.modules["__main__"]:
        return
    if STARTING in os.environ:
        raise SystemExit(UNGUARDED_EXIT)
    raise UsageError(describe_unguarded_script())


def describe_unguarded_script() -> str:
    """Return the error message for a script without a main guard."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "The script"
    return (
        f'{script} must start training below the line `if __name__ == "__main__":`, because each '
        "new process imports the script and would start training again. Add the line after the "
        "definitions of classes and functions, and indent everything below it."
    )


def end_with_launcher() -> None:
    """End this process and its children when the process that started it ends.

    A thread waits for that, so it also works while the main thread is blocked in a collective. Call
    it in a rank of ``spawn``, or of torchrun, whose ranks would otherwise outlive it. A second call
    does nothing.
    """
    if any(thread.name == _WATCH_NAME for thread in threading.enumerate()):
        return
    parent = multiprocessing.parent_process()
    launcher = os.getppid() if parent is None else parent.pid
    if os.getpgrp() != os.getpid():
        # The rank and its loader workers form a process group, so one signal ends all of them.
        os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(launcher,), name=_WATCH_NAME, daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
