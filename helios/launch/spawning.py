"""Starts ranks as PyTorch's processes, and ends all of them when one of them fails.

PyTorch's library starts them, takes their results, and writes the traceback of one that fails to a
file. This module watches them, forwards signals of the launcher, and ends them in time.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Queue
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from helios.core.logger_settings import LoggerSettings
from helios.core.signal_watch import TRY_AGAIN, SignalReceiver, describe_exit, held_back
from helios.distributed.pickling import loads, pack_by_value
from helios.distributed.process_groups import DistributedInfo
from helios.errors import Interrupted, RankError, UsageError
from helios.launch import rank as ranks

_LOGGER = logging.getLogger(__name__)
# How long the loop waits for an end, and so the delay after which a signal is passed on.
_IDLE_SECONDS = 0.1
# PyTorch's library installs handlers for these.
_TAKEN = tuple(
    number
    for name, number in signal.Signals.__members__.items()
    if name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
)


class RankTracebackError(Exception):
    """The traceback of an error in a rank, shown as the cause of the same error in the launcher."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def spawn(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    devices: Sequence[int] | None = None,
    queue: Queue[Any] | None = None,
    signals: SignalReceiver | None = None,
) -> list[Any]:
    """Run ``function(rank, *args)`` in several processes that form a process group.

    Each process is a new interpreter that imports the script and gets copies of all arguments,
    tensors by value. It joins the groups before the function is called and leaves them afterwards.
    The processes share the number of threads of this process, unless ``OMP_NUM_THREADS`` is set. If
    one fails, the others end within ten seconds. When this process ends, for whatever reason, all
    of them end, including their child processes.

    Args:
        function: the function to run; defined at the top level of a module.
        num_processes: the number of processes.
        args: further arguments of the function, after the rank.
        devices: the indices of their GPUs; None for the CPU.
        queue: receives the items of a ``RankQueue``, which is then the last argument of the
            function.
        signals: records signals in this process, which are forwarded to the ranks. Any other
            signal, or a second Ctrl-C, ends all of them.

    Returns:
        The results by rank, which must be picklable.

    Raises:
        BaseException: the error of the rank that failed first, of the same type if it can be
            pickled; its cause shows the rank and the traceback.
        RankError: if a rank was ended by a signal, or exited unexpectedly (a ``RuntimeError``).
        Interrupted: if a rank exited because of a signal, or asked for another start.
        UsageError: if something cannot be pickled, or if the script cannot be imported or starts
            training while it is imported (a ``RuntimeError``).
    """
    ranks.refuse_nested_start()
    job = pack_by_value((function, tuple(args), queue is not None), "spawn(function=..., args=...)")
    # Not in a file, which heartbeats would make grow.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="helios-") as name:
        folder = Path(name)
        (folder / ranks.JOB).write_bytes(job)
        seats = [
            ranks.Seat(
                info=DistributedInfo(rank, rank, num_processes, num_processes),
                folder=folder,
                port=store.port,
                device=None if devices is None else devices[rank],
                num_threads=_share_threads(num_processes),
                start_method=multiprocessing.get_start_method(allow_none=True),
                loggers=LoggerSettings.read(),
            )
            for rank in range(num_processes)
        ]
        return _Launch(seats, queue, SignalReceiver(()) if signals is None else signals).run()


def _share_threads(num_processes: int) -> int | None:
    """Return the number of threads of each rank; together, as many as this process has."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, torch.get_num_threads() // num_processes)


class _Launch:
    """The ranks of one launch.

    Args:
        seats: what each of them has to know.
        queue: receives their items.
        signals: records the signals that are passed on to them.
    """

    def __init__(
        self, seats: Sequence[ranks.Seat], queue: Queue[Any] | None, signals: SignalReceiver
    ) -> None:
        self._seats = seats
        self._queue = queue
        self._signals = signals
        self._processes: list[BaseProcess] = []

    def run(self) -> list[Any]:
        """Start the ranks and wait for them; returns their results, or raises the first error."""
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        listener = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        try:
            with writer:
                self._start(ranks.RankQueue(writer, context.Lock()))
            listener.start()
            found = self._wait()
        except BaseException as error:
            first = [signal.SIGINT] if isinstance(error, KeyboardInterrupt) else []
            self._end(*first, signal.SIGTERM)
            raise
        finally:
            self._end()
            if listener.ident is not None:
                listener.join(ranks.GRACE_SECONDS)
        if found is not None:
            self._raise(found)
        files = (seat.folder / ranks.RESULT.format(seat.info.rank) for seat in self._seats)
        return [loads(file.read_bytes()) for file in files]

    def _start(self, queue: ranks.RankQueue) -> None:
        from torch.distributed.elastic import multiprocessing as elastic

        before = set(multiprocessing.active_children())
        with held_back(self._signals.numbers), _starting():
            self._context = elastic.start_processes(
                name="helios",
                entrypoint=ranks.run_rank,
                args={seat.info.rank: (seat, queue) for seat in self._seats},
                envs={seat.info.rank: {} for seat in self._seats},
                logs_specs=elastic.DefaultLogsSpecs(str(self._seats[0].folder / "errors")),
            )
        pids = {pid: rank for rank, pid in self._context.pids().items()}
        started = set(multiprocessing.active_children()) - before
        self._processes = sorted(started, key=lambda process: pids[process.pid or 0])

    def _wait(self) -> int | None:
        """Wait for the results of all ranks; returns the rank that has failed first."""
        while True:
            ready = wait([process.sentinel for process in self._processes], _IDLE_SECONDS)
            for rank, process in enumerate(self._processes):
                # Its loader workers may keep the sentinel open. A rank that has a result waits
                # until all have one, so none may end before.
                if process.sentinel in ready or process.exitcode is not None:
                    (self._seats[0].folder / ranks.CAUSE_IS_KNOWN).touch()
                    self._end(None, signal.SIGTERM)
                    return rank
            if (result := self._context.wait(0)) is not None:
                return min(result.failures, default=None)
            for number in self._signals.take():
                self._send(number)

    def _listen(self, reader: Connection) -> None:
        """Receive items and lines in a thread until all ranks have ended."""
        with reader, contextlib.suppress(EOFError, OSError):
            while True:
                data = reader.recv_bytes()
                # Ranks would fail if nobody read what they send.
                try:
                    self._take(*pickle.loads(data))
                except Exception:
                    _LOGGER.exception("What a rank has sent cannot be read; it is left out.")

    def _take(self, item: bytes, record: logging.LogRecord | None) -> None:
        if record is not None:
            logging.getLogger(record.name).handle(record)
        elif self._queue is not None:
            self._queue.put(loads(item))

    def _end(self, *numbers: int | None) -> None:
        """Wait for all ranks to end, after each of these signals; then kill them."""
        for number in numbers:
            if number is not None:
                self._send(number)
            deadline = time.monotonic() + ranks.GRACE_SECONDS
            while alive := [each for each in self._processes if each.exitcode is None]:
                if time.monotonic() > deadline:
                    break
                wait([each.sentinel for each in alive], _IDLE_SECONDS)
        for process in self._processes:
            if process.exitcode == 0:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # With its loader workers.
                if process.pid is not None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.join()

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _raise(self, rank: int) -> NoReturn:
        """Raise the error of a rank that has failed."""
        process, count = self._processes[rank], len(self._seats)
        code = process.exitcode or 0
        file = self._seats[0].folder / ranks.ERROR.format(rank)
        if file.exists():
            packed, text = pickle.loads(file.read_bytes())
            shown = RankTracebackError(f"Raised by rank {rank} of {count}:\n{text}")
            raise pickle.loads(packed) from shown
        if code == ranks.UNGUARDED_EXIT:
            raise UsageError(ranks.describe_unguarded_script())
        ended = describe_exit(code)
        if code in (TRY_AGAIN, *(128 + number for number in self._signals.numbers)):
            # The rank has logged the reason, as a single process does.
            raise Interrupted(code, f"rank {rank} {ended}")
        hint = " The system sends it if memory runs out." if code == -signal.SIGKILL else ""
        raise RankError(f"Rank {rank} of {count} {ended} before it returned its result.{hint}")


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Let processes know that they are ranks, and restore the handlers that PyTorch replaces."""
    found = {number: signal.getsignal(number) for number in _TAKEN}
    os.environ[ranks.STARTING] = "1"
    try:
        yield
    finally:
        del os.environ[ranks.STARTING]
        if threading.current_thread() is threading.main_thread():
            for number, handler in found.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
