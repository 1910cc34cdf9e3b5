"""Runs a call: in this process, together with processes of a launcher, or in ranks it starts.

The process that starts ranks does not train. It prepares the data, waits, and then sets up the
model with the state of rank 0, so that a script continues as after a training in this process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Queue
from typing import Any

from helios.checkpoint.capture import Trained
from helios.checkpoint.file_names import list_checkpoints
from helios.checkpoint.record import Record
from helios.core.signal_watch import TRY_AGAIN, signal_name
from helios.counters import Phase
from helios.distributed.pickling import loads
from helios.engines.device import as_current
from helios.errors import Interrupted, RankError
from helios.launch.launcher import Launch
from helios.launch.rank import RankQueue, end_with_launcher
from helios.launch.spawning import RankTracebackError, spawn
from helios.replicas.on_all_ranks import on_first
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search import require_present
from helios.startup.evaluation_run import evaluate
from helios.startup.fit_run import fit
from helios.startup.model_in_hand import ModelInHand
from helios.startup.processes import (
    Stored,
    choose_processes,
    choose_replicas,
    device_for,
    joined,
)
from helios.startup.replay_run import replay
from helios.startup.resume_point import find_replicas, find_stored, require_writable
from helios.startup.run_setup import Run
from helios.startup.signal_policy import Listener, find_signal_code, listening, remember
from helios.startup.trainer_call import Call, ReplayRequest, only_call

_LOGGER = logging.getLogger(__name__)


def run_call(call: Call) -> Any:
    """Run a call of the trainer, whatever has started this process.

    Raises:
        BaseException: whatever the call raises, in this process or in a rank.
        SystemExit: after the call that ``helios replay`` waits for.
    """
    request = ReplayRequest.current
    if request is None:
        return _perform(call)
    if request.is_answered:
        # The script has caught the end of the replay: end it again, and keep the answer.
        raise SystemExit(0)
    if not request.takes(call.phase, call.model.save_name):
        return [] if call.phase is Phase.PREDICTION else True
    call.asked = request.options
    try:
        request.result = _perform(call)
        request.rank = call.runtime.info.rank
    except Exception as error:
        request.failure = error
        raise
    # What follows in the script belongs to a training.
    raise SystemExit(0)


def _perform(call: Call) -> Any:
    call.find_replay()
    with call.plugins.used(), _listening(call, call.find_code):
        return _carry_out(call)


@contextmanager
def _listening(call: Call, find_code: Callable[[int], int]) -> Iterator[None]:
    """Record signals during the call; one that does not interrupt it ends the next call."""
    signals, is_fit = call.options.signals, call.phase is Phase.TRAINING
    if not is_fit and signals.on_interrupt == "return":
        yield
        return
    try:
        with listening(signals, find_code, is_fit=is_fit) as call.runtime.listener:
            yield
    finally:
        number = call.runtime.listener.number
        if number is not None:
            reason = f"{signal_name(number)} was received"
            remember(Interrupted(call.find_code(number), reason), signals)
        call.runtime.listener = Listener()


def _carry_out(call: Call) -> Any:
    launch = Launch.read()
    if launch.is_given:
        return _take_part(call, launch)
    if call.phase is Phase.PREDICTION:
        # Every process would predict everything.
        return _run_here(call, launch, 0)
    num_processes, num_replicas = _choose_numbers(call, launch, _find_stored(call))
    if num_processes == 1:
        return _run_here(call, launch, num_replicas)
    if call.phase is not Phase.TRAINING:
        # An error here is raised once, and before any process is started.
        name = call.model.save_name
        require_present(call.choice, call.options, name, call.options.name_for(name))
    run = Run(call, launch, num_replicas, is_shown=False)
    return run.execute(partial(_run_in_ranks, num_processes=num_processes))


def _find_stored(call: Call) -> Stored | None:
    model = call.model
    is_fit = call.phase is Phase.TRAINING
    types = model.types_for_safe_load()
    if call.is_in_hand or call.choice.is_none:
        return None
    if call.choice.path is not None:
        return find_replicas(call.choice.path, types)
    stored = find_stored(call.options, model.save_name, types, is_fit=is_fit)
    if is_fit and stored is None and call.replay is None:
        # A new run will save. An existing one may be finished, on a read-only disk.
        require_writable(call.options, model.save_name)
    return stored


def _choose_numbers(call: Call, launch: Launch, stored: Stored | None) -> tuple[int, int]:
    """Return the numbers of processes and of replicas."""
    if call.is_in_hand and call.in_hand is not None and call.in_hand.record is not None:
        return 1, call.in_hand.record.num_replicas
    num_processes = choose_processes(call.options, launch, stored)
    return num_processes, choose_replicas(call.options, launch, stored, num_processes)


def _take_part(call: Call, launch: Launch) -> Any:
    """Run a call as one of the processes that a launcher has started."""
    if launch.is_external:
        end_with_launcher()
    with joined(launch, device_for(call.options, launch)):
        if call.phase is Phase.PREDICTION:
            return _run_here(call, launch, 0)
        team = Replicas(launch.info.world_size, launch.info)
        stored = on_first(team, lambda: _find_stored(call))
        team.close()
        _, num_replicas = _choose_numbers(call, launch, stored)
        result = _run_here(call, launch, num_replicas)
        if isinstance(result, Interrupted) and launch.is_external:
            call.runtime.listener.ignore_the_rest()
        return result


def _choose_work(call: Call) -> Callable[[Run], Any]:
    if call.phase is not Phase.TRAINING:
        return evaluate
    return fit if call.replay is None else replay


def _run_here(call: Call, launch: Launch, num_replicas: int) -> Any:
    run = Run(call, launch, num_replicas)
    with as_current(run.engine.device):
        return run.execute(_choose_work(call))


@dataclass(frozen=True)
class Outcome:
    """The result of a rank.

    Attributes:
        value: what the call returns, or what has interrupted it.
        state: the packed state of model and plugins; ``None`` from ranks other than 0.
        end: the counters and logs of the end of a training.
    """

    value: Any
    state: bytes | None
    end: Record | None


def run_in_rank(
    rank: int, call: Call, num_replicas: int, queue: RankQueue | None = None
) -> Outcome:
    """Run a call in a process that :func:`run_call` has started."""
    call.runtime.queue = queue
    run = Run(call, Launch.read(), num_replicas)
    run.has_prepared = run.collects = True
    # Not 75, with which a rank ends that stands still: that is a failure, a signal is none.
    with only_call(), call.plugins.used(), _listening(call, find_signal_code):
        value = run.execute(_choose_work(call))
    return Outcome(value, run.collected, None if run.in_hand is None else run.in_hand.record)


def _run_in_ranks(run: Run, *, num_processes: int) -> Any:
    """Let ranks run a call, and set up what rank 0 has made of the model.

    Args:
        run: the call, in the process that starts them.
        num_processes: how many ranks.
    """
    call = run.call
    run.datamodule.prepare_data()
    if call.in_hand is not None:
        run.owners = call.in_hand.owners
        call.handed = _hand_over(run, call.in_hand.record)
    # A rank logs its error and emits on_exception.
    run.is_reported = True
    outcome = _spawn(run, num_processes)
    call.handed = None
    if outcome.state is not None:
        with call.runtime.footprint.taking(call.owners):
            run.restore(loads(outcome.state))
    if call.phase is Phase.TRAINING and call.replay is None:
        obstacle = f"{num_processes} processes trained it"
        if isinstance(outcome.value, Interrupted):
            obstacle = "fit was interrupted"
        run.in_hand = ModelInHand(run.model, obstacle, outcome.end, dict(run.plugins), run.owners)
    return outcome.value


def _hand_over(run: Run, end: Record | None) -> Trained:
    """Return the state of the trained model, for ranks that set it up again.

    Args:
        run: the call.
        end: the counters and logs of the end of training.
    """
    run.session = run.make_inference_session()
    run.collect()
    assert run.collected is not None
    trained: Trained = loads(run.collected)
    return replace(trained, end=end)


def _spawn(run: Run, num_processes: int) -> Outcome:
    call, options = run.call, run.options
    runtime = call.runtime
    # From here on, the ranks supervise themselves.
    runtime.listener.note_safe_point()
    gpus = options.gpu_ids if options.engine is None else []
    before = _find_saved(run)
    for attempt in range(options.max_restarts + 1):
        # A rank that was killed may have left half an item in that of the attempt before.
        runtime.queue = Queue()
        if _find_saved(run) - before and options.resume == "never":
            # It has started the new run, which goes on.
            call.options = replace(options, resume="auto")
        try:
            with runtime.footprint.removed(call.owners):
                outcomes = spawn(
                    run_in_rank,
                    num_processes,
                    (call, run.replicas.num_replicas),
                    devices=gpus[:num_processes] or None,
                    queue=runtime.queue,
                    signals=runtime.listener.receiver,
                )
        except (Exception, Interrupted) as error:
            if isinstance(error, Interrupted) and error.code != TRY_AGAIN:
                # The rank has ended with 128 and the number of the signal.
                raise Interrupted(call.find_code(error.code - 128), error.reason) from None
            if attempt == options.max_restarts or not _is_failure(error, call):
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
            first: Outcome = outcomes[0]
            return first
    raise AssertionError


def _find_saved(run: Run) -> set[tuple[str, int]]:
    """Return the checkpoints in the folder of the run, and when they were written."""
    found = set()
    for path in [] if run.folder is None else list_checkpoints(run.folder):
        # Another run's retention may remove it.
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _is_failure(error: BaseException, call: Call) -> bool:
    """Return whether a rank has failed, instead of being interrupted or not being started."""
    is_of_rank = isinstance(error.__cause__, RankTracebackError)
    is_of_rank |= isinstance(error, RankError | Interrupted)
    return is_of_rank and call.runtime.listener.number is None
