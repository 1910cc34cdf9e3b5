"""A call of fit, from preparing the data to marking the run as finished; see docs/design.md."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch

from helios.checkpoint.capture import choose_trained
from helios.checkpoint.record import Record
from helios.errors import Interrupted, UsageError
from helios.start import run_log
from helios.start.changes import (
    Declared,
    compare_fresh,
    find_end,
    is_shortened,
    report_finished,
)
from helios.start.origin import Origin, find_origin, require_writable, set_newer_aside
from helios.start.resume import load_checkpoint
from helios.start.run import Run
from helios.start.training import Training, set_up_training
from helios.terminal import root_logger as log

_LOGGER = logging.getLogger(__name__)


def fit(run: Run) -> bool | Interrupted:
    """Train until the run is finished, which returns True, or interrupted."""
    run.prepare_data()
    origin = find_origin(run)
    run.describe_rescue = origin.describe_rescue
    reason = find_end(run.options, origin.loaded)
    declared = Declared.compare(run, origin, is_finished=bool(reason))
    if reason:
        run.replicas.on_first(partial(_refuse_again, run))
        _restore_end(run, origin, declared, reason)
        return True
    run.replicas.on_first(partial(require_writable, run))
    training = set_up_training(run, origin, declared)
    run.describe_rescue = training.describe_rescue
    reason = train(training)
    return _finish(training, reason)


def train(training: Training) -> str:
    """Load the checkpoint if there is one, and train; returns why training has ended."""
    run, origin = training.run, training.origin
    training.begun_at = origin.iteration
    if origin.loaded is not None:
        load_checkpoint(training)
    run.replicas.on_first(partial(set_newer_aside, origin))
    writer = log.get_tensorboard_writer()
    if writer is not None:
        # Nothing can refuse the start any more, so events after the checkpoint are removed.
        writer.cut_back()
    for listener in run.listeners:
        listener.opened()
    if origin.loaded is not None:
        # What was loaded from it is copied by now.
        origin.loaded.payload.clear()
    run.has_begun = True
    run.hooks.emit("on_fit_start")
    begin = time.perf_counter()
    reason: str = run.loop.run()
    training.seconds = time.perf_counter() - begin
    run.signals.note_safe_point()
    run.display.close()
    return reason


def _finish(training: Training, reason: str) -> bool | Interrupted:
    """Wait for the last checkpoint, and say how training has ended; returns True if it has."""
    run, state = training.run, training.parts.run
    interruption = state.asked.interruption if state.is_interrupted else None
    # Counters and logs, without what the objects themselves hold. Other processes have no logs.
    end = Record(
        training_state=state.state.dict(),
        cursor=state.cursor.dict(),
        model={},
        rng={},
        num_threads=torch.get_num_threads(),
        num_replicas=run.replicas.num_replicas,
        options=training.saves.options,
        **(run_log.log_places() if run.replicas.rank == 0 else {}),
    )
    _leave_model(run, end, is_interrupted=interruption is not None)
    training.saves.finish(None if interruption is not None else reason)
    for listener in run.listeners:
        listener.ended(reason, interruption=interruption)
    if interruption is not None:
        rescue, text = training.describe_rescue(), run_log.describe_end(training)
        _LOGGER.warning("The training was interrupted: %s. %s%s", interruption, rescue, text)
        return run.interrupt(interruption)
    run.signals.warn_of_late_signals()
    _LOGGER.info("Training has ended: %s.%s", reason, run_log.describe_end(training))
    return True


def _leave_model(run: Run, end: Record, *, is_interrupted: bool = False) -> None:
    """Describe how a run leaves its model, for evaluations in this process."""
    replicas, obstacle = run.replicas, ""
    if is_interrupted:
        obstacle = "fit was interrupted"
    elif not replicas.has_single_process:
        obstacle = f"{replicas.num_processes} processes trained it"
    elif replicas.is_sharded:
        obstacle = "it is sharded"
    run.leave(obstacle, end)


def _refuse_again(run: Run) -> None:
    if run.is_again:
        raise UsageError(
            f"The run {run.name!r} in {run.folder} was finished by an earlier fit of this script, "
            f"so this one would train nothing. Raise {run.options.limit} to train longer, give "
            'each model its own save_name, such as Net("fold-2"), or pass Trainer(resume="never") '
            "to train from scratch."
        )


def _restore_end(run: Run, origin: Origin, declared: Declared, reason: str) -> None:
    """Set up, restore the end of a finished run, and say that there is nothing to do.

    A script that uses the model after fit finds everything as at the run's end.
    """
    loaded = origin.loaded
    assert loaded is not None
    record = loaded.record
    run.restore(choose_trained(run.detach(record), run.replicas))
    changes = compare_fresh(run, origin, declared)
    _leave_model(run, replace(record, model={}, plugins={}, owners={}, by_rank=[], rng={}))
    is_passed = is_shortened(run.options, record.options)
    report_finished(run.name, loaded, reason, run.options, is_passed=is_passed)
    changes.report()
    run.replicas.on_first(partial(set_newer_aside, origin))
