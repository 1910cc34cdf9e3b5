"""Starts the workers of PyTorch's loaders, and replaces those that do not begin; ends them, too.

A forked worker inherits the locks that other threads of the training process hold at that moment,
and may wait for one of them forever (python/cpython#112275, pytorch/pytorch#75147). So each worker
reports before it gets any work. One that does not is killed and started again, which no batch can
notice: the queues of a pass are still empty then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, Process
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, NamedTuple, Protocol, final, runtime_checkable
from weakref import WeakSet

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from helios.core import rng
from helios.core.signal_watch import ignore_signals, noted_signals, signal_name
from helios.data.params import DataLoaderParams
from helios.data.worker_messages import (
    OF_DEATH,
    Flag,
    Results,
    ResultSender,
    close_in_children,
    naming_culprits,
)
from helios.distributed.collectives import get_global_rank
from helios.errors import WorkerError
from helios.text import size_text

_LOGGER = logging.getLogger(__name__)
FORKED_PATIENCE, FRESH_PATIENCE = 20.0, 120.0
"""Seconds without progress after which a worker is replaced. One that is not forked imports the
user's script, perhaps from a slow disk."""
_LONGEST = 10
"""How many times as long a worker may take that makes progress."""
_SLOWER = 4
"""How many times as long as the slowest worker so far each one may take."""
_ATTEMPTS = 4
_PAUSE = 1.0
_REAPING_SECONDS = _PINNING_SECONDS = 10.0
# Hardly anything else uses it, and workers ignore those of schedulers.
_STACKS = signal.Signals.__members__.get("SIGVTALRM")
_LISTENING_SECONDS = 0.1
_RERAISE = ExceptionWrapper.reraise.__code__
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped"}


@runtime_checkable
class _HasWorkers(Protocol):
    """The iterator of a DataLoader with workers, PyTorch's or a similar one."""

    _workers: list[BaseProcess]
    _shutdown: bool

    def _shutdown_workers(self) -> None: ...


@runtime_checkable
class _IsWatched(Protocol):
    """The iterator of a DataLoader, whose workers PyTorch watches."""

    _worker_pids_set: bool


@runtime_checkable
class _Pins(_HasWorkers, Protocol):
    """The iterator of a DataLoader with a thread that pins batches."""

    _pin_memory_thread: threading.Thread
    _pin_memory_thread_done_event: threading.Event
    _worker_result_queue: Any


@contextmanager
def starting_workers(
    loader: DataLoader[Any], dataset: object, options: DataLoaderParams | DataLoader[Any]
) -> Iterator[None]:
    """Start the workers of a loader; after an error, end those that had started.

    Args:
        loader: the loader.
        dataset: the user's data set.
        options: the options of its loader.

    Raises:
        UsageError: if something that workers get cannot be pickled.
        WorkerError: if a worker does not start.
    """
    context = loader.multiprocessing_context
    if isinstance(context, WorkerContext):
        context.begin_pass()
    try:
        with naming_culprits(dataset, options):
            yield
    except BaseException as error:
        for frame, _ in walk_tb(error.__traceback__):
            found = frame.f_locals.get("self")
            # Persistent workers can be used again.
            if found is not loader._iterator:  # noqa: SLF001 - PyTorch has no public way
                _end_begun(found)
        raise


@contextmanager
def reporting(loader: DataLoader[Any]) -> Iterator[None]:
    """Let workers report that a loader starts which Helios did not create.

    One with an iteration of its own is left alone. So is the worker's initialization by the user:
    workers report before it.
    """
    found = loader.multiprocessing_context
    is_plain = type(loader).__iter__ is DataLoader.__iter__ and loader.num_workers > 0
    if not is_plain or isinstance(found, WorkerContext):
        yield
        return
    loader.multiprocessing_context = WorkerContext(found)
    try:
        yield
    finally:
        loader.multiprocessing_context = found


def _end_begun(iterator: object) -> None:
    """End the workers of an iterator in whose making an error was raised."""
    if isinstance(iterator, _HasWorkers):
        for worker in iterator._workers:  # noqa: SLF001 - PyTorch has no public way
            worker.kill()
        # PyTorch's own way reads what it would have set next.
        vars(iterator).setdefault("_workers_status", [False] * len(iterator._workers))  # noqa: SLF001
        end_workers(iterator)


def end_workers(iterator: object) -> None:
    """End the workers of PyTorch's iterator and wait for them; does nothing for other objects.

    Otherwise they end when the iterator is garbage-collected, which a traceback can delay.
    """
    if isinstance(iterator, _HasWorkers):
        _end_pinning(iterator)
        iterator._shutdown_workers()  # noqa: SLF001 - PyTorch has no public way
        for worker in iterator._workers:  # noqa: SLF001
            # A hanging worker may ignore the SIGTERM that it got.
            if worker.is_alive():
                worker.kill()
                worker.join(_REAPING_SECONDS)


def _end_pinning(iterator: _HasWorkers) -> None:
    """End the thread that pins batches, for which PyTorch waits without a limit.

    It may wait for the memory of a tensor of a worker that was stopped.
    """
    if isinstance(iterator, _Pins) and not iterator._shutdown:  # noqa: SLF001
        iterator._pin_memory_thread_done_event.set()  # noqa: SLF001
        iterator._worker_result_queue.put((None, None))  # noqa: SLF001
        iterator._pin_memory_thread.join(_PINNING_SECONDS)  # noqa: SLF001
        if iterator._pin_memory_thread.is_alive():  # noqa: SLF001
            kill_workers(iterator)


def leave_watch(iterator: object) -> None:
    """Take the workers of an iterator out of PyTorch's watch.

    Its handler of SIGCHLD raises an error wherever the training process is, even inside a
    collective. That a worker died is seen while its batch is waited for.
    """
    if isinstance(iterator, _IsWatched) and iterator._worker_pids_set:  # noqa: SLF001
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined] # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001


def kill_workers(iterator: object) -> None:
    """Kill the workers of an iterator, which cannot be used any more then."""
    for worker in _workers_of(iterator):
        worker.kill()


def describe_deaths(
    iterator: object, error: Exception | None = None, *, may_end: bool = False
) -> str:
    """Say which workers of an iterator have ended by themselves, and how; empty if none has.

    Args:
        iterator: an iterator of PyTorch's, or a similar one.
        error: what it has raised; a worker may be about to end.
        may_end: whether a worker ends regularly, with code 0, at the end of its data.
    """
    if not isinstance(iterator, _HasWorkers) or iterator._shutdown:  # noqa: SLF001
        return ""
    if isinstance(error, OF_DEATH) and not is_from_worker(error):
        ready = wait([each.sentinel for each in iterator._workers], _REAPING_SECONDS)  # noqa: SLF001
        for worker in iterator._workers:  # noqa: SLF001
            if worker.sentinel in ready:
                worker.join(_REAPING_SECONDS)
    codes = (None, 0) if may_end else (None,)
    ended = [each for each in iterator._workers if each.exitcode not in codes]  # noqa: SLF001
    if not ended:
        return ""
    texts = "; ".join(_describe_end(_process_of(worker)).text for worker in ended)
    return f"{'A loader worker' if len(ended) == 1 else 'Loader workers'} died: {texts}{_memory()}"


def is_from_worker(error: Exception) -> bool:
    """Whether an error was raised in a worker, by the user's code, and sent as its result."""
    return any(frame.f_code is _RERAISE for frame, _ in walk_tb(error.__traceback__))


def describe_silence(iterator: object, seconds: float) -> str:
    """Say that no worker has answered for so long, and what they do."""
    pids = [_process_of(worker).pid for worker in _workers_of(iterator)]
    texts = "; ".join(f"process {pid}{_glance(pid)}" for pid in pids)
    return f"No batch came from the loader workers for {seconds:g} s: {texts}"


def are_alive(iterator: object) -> bool:
    """Whether no worker of an iterator has ended."""
    return all(worker.is_alive() for worker in _workers_of(iterator))


def _workers_of(iterator: object) -> Sequence[BaseProcess]:
    return iterator._workers if isinstance(iterator, _HasWorkers) else ()  # noqa: SLF001


def _process_of(worker: Any) -> Any:
    return worker.process if isinstance(worker, Worker) else worker


def _memory() -> str:
    """Say how much memory ended processes have used at most, and how much is available."""
    parts = []
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        # Those that a server has started are not children.
        if peak:
            parts.append(f"no child used more than {size_text(peak)} of memory")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        parts.append(f"{size_text(int(found.split()[1]) * 1024)} are available")
    return f" ({', '.join(parts)})" if parts else ""


@final
class WorkerInit:
    """Seeds ``random`` and the default NumPy generator in a worker, then calls the user's function.

    A worker ignores the signals that the training process handles: they are often sent to all
    processes of a job, and training needs its workers until it has saved.

    Args:
        user_init: the user's ``worker_init_fn``; called with the worker's number.
    """

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self._user_init = user_init
        self._ignored: tuple[int, ...] = ()
        self._report: Callable[[], object] = bool

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, with what a spawned worker does not get from its parent."""
        return vars(self) | {"_ignored": noted_signals()}

    def __call__(self, worker_id: int) -> None:
        """Initialize the current worker."""
        _end_without_parent()
        ignore_signals(self._ignored or noted_signals())
        rng.seed_rngs(torch.initial_seed() % 2**32, skip_torch=True)
        # By now PyTorch has set the number of threads and seeded, where locks may be held forever.
        # The user's function may take its time.
        self._report()
        if self._user_init is not None:
            self._user_init(worker_id)

    def report_by(self, report: Callable[[], object]) -> None:
        """Set the function that is called, in this process, when Helios' own part is done."""
        self._report = report


def _end_without_parent() -> None:
    """End this worker if the training process was killed while the worker was starting.

    PyTorch's own watchdog starts later and would take the process that adopted the worker for the
    training process; the worker would wait forever and keep inherited resources open.
    """
    parent, kind = multiprocessing.parent_process(), type(multiprocessing.current_process())
    method = multiprocessing.get_start_method(allow_none=True) if kind is Process else ""
    # With forkserver, the server starts the worker, and ends with the training process.
    is_served = method == "forkserver" or kind.__name__ == "ForkServerProcess"
    if parent is not None and not is_served and os.getppid() != parent.pid:
        os._exit(1)


@final
class WorkerContext(BaseContext):
    """The context of a loader, whose workers report when they have begun.

    Args:
        given: the user's context, which makes the queues and processes: its name, an object, or
            ``None`` for the default.
    """

    def __init__(self, given: str | BaseContext | None = None) -> None:
        self._given = given
        self._slowest = 0.0
        self._needs_results = False

    def begin_pass(self) -> None:
        """Let the next queue be that of the results: PyTorch asks for it first."""
        self._needs_results = True

    @property
    def _inner(self) -> Any:
        # Chosen when a pass starts, as by PyTorch: a script may set the default until then.
        if self._given is None:
            return torch.multiprocessing
        if isinstance(self._given, str):
            return multiprocessing.get_context(self._given)
        return self._given

    @property
    def patience(self) -> float:
        """Seconds without progress after which a worker is replaced."""
        is_forked = self.get_start_method() == "fork"
        least = FORKED_PATIENCE if is_forked else FRESH_PATIENCE
        return max(least, _SLOWER * self._slowest)

    def record_start(self, seconds: float) -> None:
        """Wait longer for workers from now on, if one took long."""
        self._slowest = max(self._slowest, seconds)

    def make_process(self, target: Callable[..., object], *args: Any, **options: Any) -> Any:
        """Return a process of the user's context, which is not started yet."""
        return self._inner.Process(target=target, args=args, **options)

    def get_context(self, method: str | None = None) -> Any:
        """Return the context itself, or that of another method."""
        return self if method is None else multiprocessing.get_context(method)

    def get_start_method(self, allow_none: bool = False) -> Any:
        """Return how processes are started: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
        return self._inner.get_start_method(allow_none)

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - the name in multiprocessing
        """Return a queue of the user's context, but for the results of a pass a safer one."""
        is_for_results, self._needs_results = self._needs_results, False
        return Results() if is_for_results else self._inner.Queue(maxsize)

    def Event(self) -> Any:  # noqa: N802
        """Return what ends the workers of a pass."""
        return Flag(self._inner.RawValue("b", 0))

    def Process(  # noqa: N802
        self,
        *,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        **options: Any,
    ) -> Worker:
        """Return a worker, which is not started yet."""
        return Worker(self, target, args, options)


class _Obstacle(NamedTuple):
    """Why a worker has not begun.

    Attributes:
        text: what was seen of the process, as a clause.
        has_exited: whether it ended by itself, probably after an error, as it will again.
    """

    text: str
    has_exited: bool = False


@final
class Worker:
    """A worker, as PyTorch uses a process; another process takes the place of one that hangs.

    Args:
        context: creates the processes.
        target: what a worker does.
        args: its arguments.
        options: other options of a process.

    Attributes:
        daemon: whether it ends with the training process.
        begun: the workers of this process that have begun to work.
    """

    begun: ClassVar[WeakSet[Worker]] = WeakSet()

    def __init__(
        self,
        context: WorkerContext,
        target: Callable[..., object],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        self._context = context
        self._job: tuple[Any, ...] = (target, args)
        self._options = options
        self._process: Any = None
        self._link: Connection | None = None
        self._results = next((arg for arg in args if isinstance(arg, Results)), None)
        self._reader: Any = None
        self._has_begun = False
        self.daemon = False

    def start(self) -> None:
        """Start a process, without waiting: workers begin at the same time."""
        ours, theirs = multiprocessing.Pipe()
        reader, writer = multiprocessing.Pipe(duplex=False)
        # Workers inherit it.
        for pipe in (ours, reader):
            close_in_children(pipe)
        target, args = self._job
        args = [ResultSender(writer) if isinstance(arg, Results) else arg for arg in args]
        make = self._context.make_process
        process = make(_work, theirs, target, args, daemon=self.daemon, **self._options)
        try:
            process.start()
        except BaseException:
            ours.close()
            reader.close()
            raise
        finally:
            theirs.close()
            writer.close()
        self._process, self._link, self._reader = process, ours, reader

    def finish_start(self) -> None:
        """Wait until the worker has begun; another process takes the place of one that does not.

        Raises:
            WorkerError: after several processes in a row that did not begin.
        """
        patience, seen = self._context.patience, list[_Obstacle]()
        while self._link is not None and not self._has_begun:
            obstacle = self._await(self._link, patience)
            if obstacle is None:
                self._has_begun = True
                self.begun.add(self)
                # Not before: a thread of PyTorch's receives already, and one that has not begun may
                # be replaced.
                if self._results is not None:
                    self._results.listen(self._reader, self.sentinel)
                # The data set must not live as long as the worker's object.
                self._job = ()
                break
            self.kill()
            seen.append(obstacle)
            is_hopeless = len(seen) > 1 and seen[-1].has_exited and seen[-2].has_exited
            if is_hopeless or len(seen) == _ATTEMPTS:
                raise self._make_error(seen)
            # Ranks other than 0 show errors only.
            level = logging.ERROR if get_global_rank() else logging.WARNING
            _LOGGER.log(level, "A loader worker did not start: %s. It is replaced.", obstacle.text)
            patience *= 2
            self.start()

    def _await(self, link: Connection, patience: float) -> _Obstacle | None:
        """Let the worker work as soon as it reports; returns what was seen if it does not."""
        process = self._process
        pause = min(_PAUSE, patience / 10)
        # Not by a clock, which goes on while the whole job is suspended.
        waited = idle = 0.0
        before = _Glance()
        while idle < patience and before.seconds < _LONGEST * patience:
            ready = wait([link, process.sentinel], pause)
            if link in ready and _let_work(link):
                self._context.record_start(waited)
                return None
            if ready or not process.is_alive():
                return _describe_end(process)
            waited += pause
            now = _glance(process.pid)
            idle = 0.0 if now.may_advance(before) else idle + pause
            before = now
        return _Obstacle(f"process {process.pid} did not answer for {waited:.3g} s{before}")

    def _make_error(self, seen: Sequence[_Obstacle]) -> WorkerError:
        texts = "; ".join(obstacle.text for obstacle in seen)
        remedy = "Read its error above"
        if not seen[-1].has_exited:
            remedy = "Look for what it waits for"
            if self._context.get_start_method() == "fork":
                remedy = (
                    'Pass multiprocessing_context="forkserver", whose workers inherit no locks '
                    "of other threads"
                )
        return WorkerError(
            f"A loader worker must start, but {len(seen)} processes in a row did not: {texts}. "
            f"{remedy}, or pass num_workers=0."
        )

    @property
    def pid(self) -> int:
        """Always 0, which is no process's id, when the worker has begun.

        PyTorch asks for it when it has started all workers, before it gives them any work. Nothing
        else would wait for those of a user's own loop. When a process of this id died, PyTorch's
        handler of SIGCHLD would raise an error wherever the training process is, even inside a
        collective.
        """
        self.finish_start()
        return 0

    @property
    def process(self) -> Any:
        """The process; ``None`` before its start."""
        return self._process

    @property
    def exitcode(self) -> int | None:
        """The process's exit code; ``None`` while it runs."""
        return None if self._process is None else self._process.exitcode

    @property
    def name(self) -> str:
        """The process's name; empty before it has begun."""
        return "" if self._process is None else self._process.name

    @property
    def sentinel(self) -> int:
        """What becomes ready when the process ends."""
        sentinel: int = self._process.sentinel
        return sentinel

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            self._process.join(timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the process; one that has not begun leaves nothing behind."""
        if self._process is None:
            return
        self._process.kill()
        if self._link is not None and not self._has_begun:
            self._process.join(_REAPING_SECONDS)
            if self._process.exitcode is not None:
                self._process.close()
            self._link.close()
            self._reader.close()
            self._process = self._link = None

    def request_stacks(self) -> int | None:
        """Let a worker write its stacks; returns its id, ``None`` if it has ended."""
        if _STACKS is None or self._process is None or not self._process.is_alive():
            return None
        pid: int = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACKS)
        return pid

    def read_stacks(self, seconds: float) -> str:
        """Return what the worker has written then; empty if it does not answer in time."""
        parts: list[bytes] = []
        while self._link is not None and wait([self._link], seconds):
            parts.append(os.read(self._link.fileno(), 1 << 16))
            if not parts[-1]:
                break
            seconds = _LISTENING_SECONDS
        return b"".join(parts).decode("utf-8", "replace")


def find_worker_stacks(seconds: float) -> dict[int, str]:
    """Return the stacks of all workers of this process, whatever they are doing, by process id.

    Args:
        seconds: how long to wait for those that do not answer, such as stopped ones.
    """
    asked = [(worker.request_stacks(), worker) for worker in list(Worker.begun)]
    deadline = time.monotonic() + seconds
    return {
        pid: worker.read_stacks(max(deadline - time.monotonic(), 0.0))
        for pid, worker in asked
        if pid is not None
    }


def _work(
    theirs: Connection, target: Callable[..., object], args: Sequence[Any], **kwargs: Any
) -> None:
    """Be a worker: report, and then do its work."""
    # What the training process has dropped is not freed here: a tensor on a GPU would end this one.
    gc.freeze()
    if sys.platform != "win32" and _STACKS is not None:
        # In C, so that a worker shows them that hangs while it holds the interpreter lock.
        faulthandler.register(_STACKS, theirs.fileno())
    report = partial(_report, theirs)
    for arg in args:
        if isinstance(arg, WorkerInit):
            arg.report_by(report)
            break
    else:
        report()
    target(*args, **kwargs)


def _report(theirs: Connection) -> None:
    """Say that this worker has begun, and wait until it may take work from its queue.

    Otherwise a worker that reports too late could be killed while it holds the lock of its queue.
    """
    try:
        theirs.send_bytes(b"begun")
        while not theirs.poll(_PAUSE):
            _end_without_parent()
        theirs.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _let_work(link: Connection) -> bool:
    """Receive a worker's report and answer it; returns False if it has ended."""
    try:
        link.recv_bytes()
        link.send_bytes(b"go")
    except (EOFError, OSError):
        return False
    return True


def _describe_end(process: Any) -> _Obstacle:
    process.join(_REAPING_SECONDS)
    code = process.exitcode
    if code is None or code >= 0:
        return _Obstacle(f"process {process.pid} ended with exit code {code}", has_exited=True)
    return _Obstacle(f"process {process.pid} was ended by {signal_name(-code)}")


class _Glance(NamedTuple):
    """What Linux says of a process; all empty elsewhere.

    Attributes:
        state: the letter of its state.
        seconds: its CPU time.
        place: the function of the kernel in which it waits.
    """

    state: str = ""
    seconds: float = 0.0
    place: str = ""

    def may_advance(self, before: _Glance) -> bool:
        """Whether it computes, or waits for a processor or a disk."""
        return self.state in ("R", "D") or self.seconds != before.seconds

    def __str__(self) -> str:
        if not self.state:
            return ""
        place = f" in {self.place}" if self.place.strip("0") else ""
        state = _STATES.get(self.state, self.state)
        return f" ({state}{place}, {self.seconds:g} s of CPU time)"


def _glance(pid: int) -> _Glance:
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        place = (folder / "wchan").read_text()
    except OSError:
        return _Glance()
    ticks = int(fields[11]) + int(fields[12])
    return _Glance(fields[0], ticks / os.sysconf("SC_CLK_TCK"), place)
