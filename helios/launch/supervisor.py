"""Starts and supervises ranks from the launching process.

A single loop without threads sends the job, receives items and results while ranks run (so that no
rank blocks on a full pipe), detects how ranks end, and finds the original cause of a failure among
the errors that follow from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from helios.core.logger_settings import hand_in
from helios.core.signal_watch import TRY_AGAIN, SignalReceiver, held_back, signal_name
from helios.errors import Interrupted, RankError, UsageError
from helios.launch.ipc import (
    RANK_NAME,
    UNGUARDED_EXIT,
    LaunchQueue,
    describe_unguarded_script,
    unpickle_value,
)
from helios.launch.worker import DONE, FAILED, ITEM, LINE, READY, Failure, WorkerConfig, run_rank

_LOGGER = logging.getLogger(__name__)
# How long the loop waits for messages, and so the delay after which a signal is passed on.
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.02
# After a failure, ranks have this long to end by themselves, and again after SIGTERM. In total,
# this is well below the ten seconds that a scheduler waits.
GRACE_SECONDS = 3.0


class RankTracebackError(Exception):
    """The traceback of an error in a rank, shown as the cause of the same error in the launcher."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclasses.dataclass
class _Rank:
    """A process and its status."""

    number: int
    process: BaseProcess
    connection: Connection
    is_open: bool = True
    has_begun: bool = False
    result: bytes | None = None
    failure: Failure | None = None
    exit_code: int | None = None
    end: int = 0
    is_stopped: bool = False

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def has_trouble(self) -> bool:
        return self.failure is not None or (not self.is_alive and self.result is None)


class Supervisor:
    """Runs the ranks of one launch.

    Args:
        places: the configuration of each rank.
        job: the packed function and arguments.
        queue: receives the items of the ranks.
        signals: records the signals that are passed on to the ranks; ``None`` for none.
    """

    def __init__(
        self,
        places: Sequence[WorkerConfig],
        job: bytes,
        *,
        queue: LaunchQueue | None,
        signals: SignalReceiver | None,
    ) -> None:
        self._places = places
        self._job = job
        self._queue = queue
        self._receiver = signals
        self._ranks: list[_Rank] = []

    def run(self) -> list[Any]:
        """Start the ranks and wait for them.

        Returns:
            Their results, by rank.

        Raises:
            BaseException: the first error of a rank, of its own type if it can be pickled.
            RankError: if a rank was ended by a signal, or exited unexpectedly.
            UsageError: if the script starts training while it is imported.
            Interrupted: if a rank exited because of a signal, or asked for another start.
        """
        try:
            self._start()
            while self._is_any_alive() and not self._has_trouble():
                self._step()
            if self._has_trouble():
                self._end_all()
        except BaseException as error:
            self._end_all(signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
            raise
        finally:
            self._clear()
        cause = choose_cause(self._ranks)
        if cause is not None:
            numbers = () if self._receiver is None else self._receiver.numbers
            raise_cause(cause, len(self._ranks), numbers)
        self._warn_of_late_ends()
        return [unpickle_value(rank.result or b"") for rank in self._ranks]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for place in self._places:
            ours, theirs = context.Pipe()
            name = f"{RANK_NAME}{place.info.rank}"
            process = context.Process(target=run_rank, args=(theirs, place), name=name)
            self._ranks.append(_Rank(place.info.rank, process, ours))
            try:
                with held_back(() if self._receiver is None else self._receiver.numbers):
                    process.start()
            finally:
                theirs.close()

    def _is_any_alive(self) -> bool:
        return any(rank.is_alive for rank in self._ranks)

    def _has_trouble(self) -> bool:
        return any(rank.has_trouble for rank in self._ranks)

    def _step(self) -> None:
        """Pass on signals, wait briefly for messages, and process them."""
        for number in () if self._receiver is None else self._receiver.take():
            self._send_signal(number)
        is_ending = any(rank.is_alive and not rank.is_open for rank in self._ranks)
        by_connection = {rank.connection: rank for rank in self._ranks if rank.is_open}
        for connection in wait(list(by_connection), _BUSY_SECONDS if is_ending else _IDLE_SECONDS):
            self._read(by_connection[connection])  # type: ignore[index]
        for rank in self._ranks:
            if rank.is_alive and rank.process.exitcode is not None:
                self._note_end(rank, rank.process.exitcode)

    def _note_end(self, rank: _Rank, exit_code: int) -> None:
        while rank.is_open and rank.connection.poll():
            self._read(rank)
        rank.end = time.monotonic_ns()
        rank.exit_code = exit_code
        if exit_code:
            _signal_group(rank, signal.SIGKILL)

    def _read(self, rank: _Rank) -> None:
        try:
            message = rank.connection.recv_bytes()
        except (EOFError, OSError):
            rank.is_open = False
            return
        kind, data = message[:1], message[1:]
        if kind == READY:
            rank.has_begun = True
            # The rank may have ended by now, which the end of the pipe will show.
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(self._job)
        elif kind == ITEM and self._queue is not None:
            self._queue.add_packed(data)
        elif kind == LINE:
            hand_in(pickle.loads(data))
        elif kind == DONE:
            rank.result = data
        elif kind == FAILED:
            rank.failure = pickle.loads(data)

    def _end_all(self, first: signal.Signals | None = None) -> None:
        """Wait for all ranks to end, after a first signal if given, then send SIGTERM."""
        for number in (first, signal.SIGTERM):
            if number is not None:
                self._send_signal(number)
            for rank in self._ranks:
                rank.is_stopped |= number is not None and rank.is_alive
            deadline = time.monotonic() + GRACE_SECONDS
            while self._is_any_alive() and time.monotonic() < deadline:
                self._step()

    def _send_signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.is_alive and rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _clear(self) -> None:
        """Kill the remaining ranks, and release all resources."""
        started = [rank for rank in self._ranks if rank.process.pid is not None]
        for rank in started:
            if rank.is_alive:
                rank.is_stopped = True
                _signal_group(rank, signal.SIGKILL)
        for rank in started:
            rank.process.join()
            if rank.is_alive:
                self._note_end(rank, rank.process.exitcode or 0)
        for rank in self._ranks:
            rank.connection.close()
            rank.process.close()

    def _warn_of_late_ends(self) -> None:
        for rank in self._ranks:
            if rank.exit_code:
                _LOGGER.warning(
                    "Rank %d %s after it had returned its result.", rank.number, describe_exit(rank)
                )


def _signal_group(rank: _Rank, number: signal.Signals) -> None:
    """Send a signal to a rank and its child processes."""
    pid = rank.process.pid
    if pid is None:
        return
    if sys.platform == "win32":
        rank.process.kill()
        return
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # The rank has not created its process group yet, or the group is empty.
        if rank.is_alive and rank.process.exitcode is None:
            os.kill(pid, number)


def choose_cause(ranks: Sequence[_Rank]) -> _Rank | None:
    """Return the rank that failed first; None if none has failed.

    An error of a collective is a consequence of another rank's failure, so it counts only if there
    is no other failure. A rank that the launcher ended has not failed.
    """
    troubled = [
        rank for rank in ranks if rank.failure or (rank.has_trouble and not rank.is_stopped)
    ]

    def key(rank: _Rank) -> tuple[bool, int]:
        if rank.failure is None:
            return False, rank.end
        return rank.failure.is_consequence, rank.failure.moment

    return min(troubled, key=key, default=None)


def describe_exit(rank: _Rank) -> str:
    """Return how a process ended, e.g. ``"was ended by SIGKILL"``."""
    code = rank.exit_code or 0
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal_name(-code)}"


def raise_cause(rank: _Rank, count: int, signals: Sequence[int] = ()) -> NoReturn:
    """Raise the error of a rank.

    Args:
        rank: the rank that failed first.
        count: number of ranks.
        signals: those after which a rank may have exited with 128 and their number.
    """
    failure = rank.failure
    if failure is not None:
        shown = RankTracebackError(f"Raised by rank {rank.number} of {count}:\n{failure.text}")
        try:
            error = pickle.loads(failure.error or b"")
        except Exception:
            raise RankError(
                f"Rank {rank.number} of {count} raised {failure.name}, which cannot be pickled. "
                "Its traceback is shown above."
            ) from shown
        raise error from shown
    if rank.exit_code == UNGUARDED_EXIT and not rank.has_begun:
        raise UsageError(describe_unguarded_script())
    if rank.exit_code in (TRY_AGAIN, *(128 + number for number in signals)):
        # The rank has logged the reason, as a single process does.
        raise Interrupted(rank.exit_code, f"rank {rank.number} {describe_exit(rank)}")
    when = "before it returned its result" if rank.has_begun else "while it was starting"
    hint = ""
    if rank.exit_code == -signal.SIGKILL:
        hint = " Only the system or a user sends it; the system does if memory runs out."
    elif not rank.has_begun:
        hint = " Its output is shown above."
    raise RankError(f"Rank {rank.number} of {count} {describe_exit(rank)} {when}.{hint}")
