"""Runs a call: in this process, together with processes of a launcher, or in ranks it starts.

The process that starts ranks does not train. It prepares the data, waits, and then sets up the
model with the state of rank 0, so that a script continues as after training in this process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from typing import Any

from helios.checkpoint.file_names import list_checkpoints
from helios.core.signal_watch import TRY_AGAIN, signal_name
from helios.counters import Phase
from helios.distributed.pickling import loads
from helios.engines.device import as_current
from helios.errors import Interrupted, RankError
from helios.launch.launcher import Launch
from helios.launch.rank import RankQueue, end_with_launcher
from helios.launch.spawning import RankTracebackError, spawn
from helios.replicas.replicas import Replicas
from helios.start.evaluate import evaluate
from helios.start.fit import fit
from helios.start.origin import find_replicas, find_stored, require_present, require_writable
from helios.start.processes import Stored, choose_processes, choose_replicas, device_for, joined
from helios.start.replay import ReplayRequest, replay
from helios.start.run import Run, only_call
from helios.start.signals import Listener, find_signal_code, listening, remember

_LOGGER = logging.getLogger(__name__)


def perform(run: Run) -> Any:
    """Run a call of the trainer, whatever has started this process.

    Raises:
        BaseException: whatever the call raises, in this process or in a rank.
        SystemExit: after the call that ``helios replay`` waits for.
    """
    request = ReplayRequest.current
    if request is not None:
        return request.answer(run, _perform)
    result = _perform(run)
    if run.phase is Phase.TRAINING and result is True:
        run.note_finished()
    return result


def _perform(run: Run) -> Any:
    with run.table.used(), _listening(run, run.find_code):
        launch = Launch.read()
        if launch.is_given:
            return _take_part(run, launch)
        if run.phase is Phase.PREDICTION:
            # Every process would predict everything.
            return _run_here(run, launch, 0)
        num_processes, num_replicas = _choose_numbers(run, launch, _find_stored(run))
        if num_processes == 1:
            return _run_here(run, launch, num_replicas)
        if run.phase is not Phase.TRAINING:
            # An error here is raised once, and before any process is started.
            require_present(run)
        run.enter(launch, num_replicas, is_shown=False)
        return run.execute(lambda run: _run_in_ranks(run, num_processes, num_replicas))


@contextmanager
def _listening(run: Run, find_code: Callable[[int], int]) -> Iterator[None]:
    """Record signals during the call; one that does not interrupt it ends the next call."""
    signals, is_fit = run.options.signals, run.phase is Phase.TRAINING
    if not is_fit and signals.on_interrupt == "return":
        yield
        return
    try:
        with listening(signals, find_code, is_fit=is_fit) as run.signals:
            yield
    finally:
        number = run.signals.number
        if number is not None:
            reason = f"{signal_name(number)} was received"
            remember(Interrupted(run.find_code(number), reason), signals)
        run.signals = Listener()


def _find_stored(run: Run) -> Stored | None:
    """Return what the checkpoint that the call begins with says of the run."""
    if run.is_as_it_is or run.choice.is_none:
        return None
    if run.choice.path is not None:
        return find_replicas(run.choice.path, run.model.types_for_safe_load())
    stored = find_stored(run)
    if run.phase is Phase.TRAINING and stored is None and run.replay is None:
        # A new run will save. An existing one may be finished, on a read-only disk.
        require_writable(run)
    return stored


def _choose_numbers(run: Run, launch: Launch, stored: Stored | None) -> tuple[int, int]:
    """Return the numbers of processes and of replicas."""
    if run.trained is not None and stored is None and run.choice.path is None:
        # The model of this process is evaluated.
        return 1, run.trained.end.num_replicas
    num_processes = choose_processes(run.options, launch, stored)
    return num_processes, choose_replicas(run.options, launch, stored, num_processes)


def _take_part(run: Run, launch: Launch) -> Any:
    """Run a call as one of the processes that a launcher has started."""
    if launch.is_external:
        end_with_launcher()
    with joined(launch, device_for(run.options, launch)):
        if run.phase is Phase.PREDICTION:
            return _run_here(run, launch, 0)
        team = Replicas(launch.info.world_size, launch.info)
        stored = team.on_first(lambda: _find_stored(run))
        team.close()
        _, num_replicas = _choose_numbers(run, launch, stored)
        result = _run_here(run, launch, num_replicas)
        if isinstance(result, Interrupted) and launch.is_external:
            run.signals.ignore_the_rest()
        return result


def _choose_work(run: Run) -> Callable[[Run], Any]:
    if run.phase is not Phase.TRAINING:
        return evaluate
    return fit if run.replay is None else replay


def _run_here(run: Run, launch: Launch, num_replicas: int) -> Any:
    run.enter(launch, num_replicas)
    with as_current(run.engine.device):
        return run.execute(_choose_work(run))


def run_in_rank(
    rank: int, run: Run, num_replicas: int, queue: RankQueue | None = None
) -> tuple[Any, bytes | None]:
    """Run a call in a process that :func:`perform` has started.

    Returns:
        What the call returns, and the packed state of model and plugins; of ranks other than 0
        ``None``.
    """
    run.enter(Launch.read(), num_replicas)
    run.queue, run.is_rank = queue, True
    # Not 75, with which a rank ends that stands still: that is a failure, a signal is none.
    with only_call(), run.table.used(), _listening(run, find_signal_code):
        return run.execute(_choose_work(run)), run.collected


def _run_in_ranks(run: Run, num_processes: int, num_replicas: int) -> Any:
    """Let ranks run a call, and set up what rank 0 has made of the model.

    Args:
        run: the call, in the process that starts them.
        num_processes: how many ranks.
        num_replicas: how many replicas they run.
    """
    run.datamodule.prepare_data()
    # A rank logs its error and emits on_exception.
    run.is_reported = True
    value, packed = _spawn(run, num_processes, num_replicas)
    trained, run.horizon, end = loads(packed)
    with _noting_assigned(run):
        run.restore(trained)
    if end is not None:
        is_interrupted = isinstance(value, Interrupted)
        obstacle = f"{num_processes} processes trained it"
        run.leave("fit was interrupted" if is_interrupted else obstacle, end)
    return value


def _spawn(run: Run, num_processes: int, num_replicas: int) -> tuple[Any, bytes]:
    options = run.options
    # From here on, the ranks supervise themselves.
    run.signals.note_safe_point()
    gpus = options.gpu_ids if options.engine is None else []
    before = _find_saved(run)
    for attempt in range(options.max_restarts + 1):
        # A rank that was killed may have left half an item in that of the attempt before.
        run.queue = Queue()
        if _find_saved(run) - before and options.resume == "never":
            # It has started the new run, which goes on.
            run.options = replace(options, resume="auto")
        try:
            with _without_assigned(run):
                results = spawn(
                    run_in_rank,
                    num_processes,
                    (run, num_replicas),
                    devices=gpus[:num_processes] or None,
                    queue=run.queue,
                    signals=run.signals.receiver,
                )
        except (Exception, Interrupted) as error:
            if isinstance(error, Interrupted) and error.code != TRY_AGAIN:
                # The rank has ended with 128 and the number of the signal.
                raise Interrupted(run.find_code(error.code - 128), error.reason) from None
            if attempt == options.max_restarts or not _is_failure(error, run):
                raise
            cause = f"{error.reason}." if isinstance(error, Interrupted) else str(error)
            _LOGGER.warning(
                "%s: %s Starting all ranks again, restart %d of %d.",
                type(error).__name__,
                cause,
                attempt + 1,
                options.max_restarts,
            )
        else:
            value, packed = results[0]
            return value, packed
    raise AssertionError


def _find_saved(run: Run) -> set[tuple[str, int]]:
    """Return the checkpoints in the folder of the run, and when they were written."""
    found = set()
    for path in [] if run.folder is None else list_checkpoints(run.folder):
        # Another run's retention may remove it.
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _is_failure(error: BaseException, run: Run) -> bool:
    """Return whether a rank has failed, instead of being interrupted or not being started."""
    is_of_rank = isinstance(error.__cause__, RankTracebackError)
    is_of_rank |= isinstance(error, RankError | Interrupted)
    return is_of_rank and run.signals.number is None


@contextmanager
def _noting_assigned(run: Run) -> Iterator[None]:
    """Note which attributes of the user's objects a set-up in the launcher assigns.

    Ranks run ``setup`` themselves, so these are not sent to them: they may be large, and often
    cannot be pickled. What is assigned later is kept.
    """
    before = {id(owner): _without_assigned_to(owner, run) for owner in run.objects}
    try:
        yield
    finally:
        for owner in run.objects:
            run.assigned[id(owner)] = before[id(owner)], dict(vars(owner))


@contextmanager
def _without_assigned(run: Run) -> Iterator[None]:
    """Remove the attributes that a set-up in the launcher has assigned, for a block."""
    present = [(owner, dict(vars(owner))) for owner in run.objects]
    try:
        for owner in run.objects:
            _replace_attributes(owner, _without_assigned_to(owner, run))
        yield
    finally:
        for owner, attributes in present:
            _replace_attributes(owner, attributes)


def _without_assigned_to(owner: Any, run: Run) -> dict[str, Any]:
    attributes = dict(vars(owner))
    before, after = run.assigned.get(id(owner), ({}, {}))
    for name, made in after.items():
        if name in attributes and attributes[name] is made:
            del attributes[name]
            if name in before:
                attributes[name] = before[name]
    return attributes


def _replace_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    vars(owner).clear()
    vars(owner).update(attributes)
