"""Several processes in one test: a function on n ranks of a gloo group, and its results.

The processes come from multiprocessing's fork server, which has imported torch once: they start
in milliseconds, and inherit neither threads nor settings of the test. They meet in a file, so no
port is taken. Whatever happens, none of them outlives the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic import multiprocessing as elastic

# Imported once in the server; what is not found there is imported by each process.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "helios.trainer",
    "tests.support.runs",
    "tests.support.warm",
]
_LEAVING_SECONDS = 10.0
_DYING_SECONDS = 2.0
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(_PRELOADED)
FORK = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """A rank failed, died or did not end; says which, and where."""


@dataclasses.dataclass(frozen=True)
class _Report:
    """What a rank sends when it is done: its result, or the traceback of its error."""

    when: float
    result: Any = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class _Seat:
    """A rank's place in its group."""

    rank: int
    num_ranks: int
    store: str
    timeout: float
    start_method: str | None


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 240,
    context: Any = FORKSERVER,
) -> list[Any]:
    """Call ``fn(rank, *args)`` on n ranks of a gloo group; return the results by rank.

    Each rank has one thread, warnings are errors in it, and it leaves the group after a barrier.

    Args:
        fn: a function of a module; it and its arguments and results must be picklable.
        context: what starts them; they are forks of the test's process where that has imported what
            takes long.
    """
    deadline = time.monotonic() + timeout
    work = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        method = multiprocessing.get_start_method(allow_none=True)
        seats = [_Seat(rank, n, store, timeout, method) for rank in range(n)]
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in seats]
        ranks = [
            context.Process(target=_serve, args=(seat, work, dict(os.environ), sender))
            for seat, (_, sender) in zip(seats, pipes, strict=True)
        ]
        try:
            for process in ranks:
                process.start()
            for _, sender in pipes:
                sender.close()
            receivers = [receiver for receiver, _ in pipes]
            reports = _collect(dict(zip(receivers, ranks, strict=True)), deadline)
            for process in ranks:
                process.join(_LEAVING_SECONDS)
        finally:
            for process in ranks:
                _end(process)
            for receiver, sender in pipes:
                receiver.close()
                sender.close()
    return [report.result for report in reports]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Leave a group of one rank during the block: a run in one process has none."""
    is_alone = dist.get_world_size() == 1
    if is_alone:
        dist.destroy_process_group()
    yield
    if is_alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def let_launcher_start_from_server(patch: pytest.MonkeyPatch) -> None:
    """Let the ranks of the launcher come from the fork server, and do all else as it does."""
    start = elastic.start_processes
    streams = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]

    def start_forked(*, entrypoint: Any, args: dict[int, Any], **options: Any) -> Any:
        own = {rank: (dict(os.environ), streams, entrypoint, each) for rank, each in args.items()}
        return start(entrypoint=_enter, args=own, start_method="forkserver", **options)

    patch.setattr(elastic, "start_processes", start_forked)


def _enter(
    variables: dict[str, str], streams: list[str], entrypoint: Callable[..., None], args: Any
) -> None:
    """Be what a new process is to its launcher, whose child it is not."""
    from helios.launch import rank

    os.setpgid(0, 0)
    die_with_parent()
    rank.end_with_launcher = lambda: None
    os.environ.clear()
    os.environ.update(variables)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    entrypoint(*args)


def _end(process: Any) -> None:
    if process.pid is not None:
        process.kill()
        process.join()
    process.close()


def _collect(ranks: dict[Connection, Any], deadline: float) -> list[_Report]:
    """Return the reports of all ranks, or raise for those that failed first."""
    reports: dict[Connection, _Report] = {}
    number_of = {receiver: number for number, receiver in enumerate(ranks)}
    while waiting := [receiver for receiver in ranks if receiver not in reports]:
        ready = _wait(waiting, ranks, deadline)
        if not ready:
            numbers = [number_of[receiver] for receiver in waiting]
            raise RankError(f"Not done in time: ranks {numbers}.")
        found = {receiver: _read(receiver, ranks[receiver]) for receiver in ready}
        failed = [(report.when, number_of[r], report) for r, report in found.items()]
        # Where one fails, others fail after it because their partner is gone.
        texts = [
            f"Rank {n} failed: {r.error}"
            for _, n, r in sorted(failed, key=lambda f: f[:2])
            if r.error
        ]
        if texts:
            texts += _read_deaths({r: number_of[r] for r in waiting if r not in found}, ranks)
            raise RankError("\n".join(texts))
        reports.update(found)
    return [reports[receiver] for receiver in ranks]


def _wait(
    waiting: Iterable[Connection], ranks: dict[Connection, Any], deadline: float
) -> list[Connection]:
    """Wait until there is something of at least one rank to read, or it has ended.

    A rank that is killed leaves its end of the pipe to its loader workers, which live on for
    seconds.
    """
    receivers = list(waiting)
    ends = [ranks[receiver].sentinel for receiver in receivers]
    ready = connection.wait([*receivers, *ends], max(0.0, deadline - time.monotonic()))
    return [r for r, end in zip(receivers, ends, strict=True) if r in ready or end in ready]


def _read_deaths(waiting: dict[Connection, int], ranks: dict[Connection, Any]) -> list[str]:
    """Say which of the other ranks died: their partners may notice it before we do.

    They have some time for it, which passes in full only where one of them neither fails nor ends.
    """
    deadline, texts = time.monotonic() + _DYING_SECONDS, []
    while waiting:
        ready = _wait(waiting, ranks, deadline)
        if not ready:
            break
        for receiver in ready:
            error = _read(receiver, ranks[receiver]).error
            texts += [f"Rank {waiting.pop(receiver)} failed: {error}"]
    return texts


def _read(receiver: Connection, process: Any) -> _Report:
    """Return the report of a rank that has sent one, or has ended."""
    try:
        # What was sent before the end is there to be read.
        if receiver.poll():
            report: _Report = pickle.loads(receiver.recv_bytes())
            return report
    except EOFError:
        pass
    process.join()  # Where it has closed its end, it is about to be gone.
    return _Report(time.monotonic(), error=f"it ended with code {process.exitcode}.")


def _serve(seat: _Seat, work: bytes, environment: dict[str, str], sender: Connection) -> None:
    """Run one rank, in its process."""
    die_with_parent()
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # Else its loader workers would come from a fork server of its own, which imports torch again.
    multiprocessing.set_start_method(seat.start_method, force=True)
    warnings.simplefilter("error")
    # Python 3.12 warns of each fork beside threads, which a group of processes has.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    try:
        fn, args = pickle.loads(work)
        payload = pickle.dumps(_Report(time.monotonic(), _take_part(seat, fn, args)))
    except BaseException:
        error = traceback.format_exc()
        sender.send_bytes(pickle.dumps(_Report(time.monotonic(), error=error)))
        os._exit(1)  # Destructors of a broken group may wait for ranks that are gone.
    sender.send_bytes(payload)
    # In PyTorch 2.6 this waits for ever now and then, and holds the interpreter: we are ended then.
    dist.destroy_process_group()


def _take_part(seat: _Seat, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(seat.store, seat.num_ranks),
        rank=seat.rank,
        world_size=seat.num_ranks,
        timeout=datetime.timedelta(seconds=seat.timeout),
    )
    dist.barrier()  # A rank that leaves while another one still connects would fail that one.
    result = fn(seat.rank, *args)
    dist.barrier()
    return result


def die_with_parent() -> None:
    """End this process when the test's process is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
