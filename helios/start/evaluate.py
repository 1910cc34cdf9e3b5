"""One call of validate, test or predict: load a checkpoint, run one pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from helios.checkpoint.capture import apply_trained, choose_trained
from helios.checkpoint.frozen import references_of
from helios.checkpoint.loading import Loaded
from helios.checkpoint.record import Record
from helios.core.loss_means import as_numbers
from helios.counters import Cursor, Phase, TrainingState
from helios.engines.numerics import choose_threads, numerics
from helios.errors import Interrupted, UsageError
from helios.model.model import Model, find_test_step, is_own
from helios.plugins.averaging import EMA, WeightAverage
from helios.run_parts import RunParts
from helios.start.changes import refuse_unread_weights
from helios.start.model_setup import move_networks
from helios.start.origin import find_chosen
from helios.start.run import Run
from helios.start.run_log import format_scores, open_logs
from helios.start.trained_model import TrainedModel
from helios.state.restoring import NOT_BUILT

_LOGGER = logging.getLogger(__name__)

_DATASETS = {Phase.VALIDATION: "valid", Phase.TESTING: "test", Phase.PREDICTION: "predict"}
"""What the names of data sets in a data module begin with."""


def evaluate(run: Run) -> Any:
    """Load a checkpoint, or take the model that ``fit`` has trained, and run one pass."""
    run.prepare_data()
    after_fit = run.trained
    loaded, reasons = (None, []) if run.is_as_it_is else find_chosen(run)
    state = None
    if loaded is not None:
        state = choose_trained(run.detach(loaded.record), run.replicas)
        _add_averages(run, loaded)
    record = after_fit.end if state is None and after_fit is not None else state
    run.horizon = {} if record is None else record.options.get("horizon", {})
    stored = None if record is None else record.num_threads
    run.settings.enter_context(
        numerics(
            is_deterministic=run.options.enable_deterministic,
            use_cudnn_benchmark=False,
            num_threads=choose_threads(stored, run.replicas.num_replicas),
        )
    )
    open_logs(run.options, run.name, record, is_training=False)
    restore = _set_up_for(run, state)
    if loaded is not None:
        refuse_unread_weights(run, loaded.record)
    has_data = run.open_source(run.phase) is not None
    if not has_data:
        _LOGGER.warning(
            "%s has nothing to do: the data module has no data for it. Assign self.%s_dataset in "
            "its setup().",
            run.verb,
            _DATASETS[run.phase],
        )
    run.require_alike_setup()
    is_alone = run.team.has_single_process
    when = "after this batch" if is_alone else "when it is complete"
    ask = partial(run.signals.ask, f"{run.verb} ends {when}")
    parts = run.make_inference_parts(run.phase, ask if is_alone else str)
    run.begin(parts)
    if record is not None:
        parts.run.state = TrainingState(**record.training_state)
        parts.run.cursor = Cursor(**record.cursor)
    restore(parts)
    used = after_fit if loaded is None else None
    left_out = {} if used is None else used.leave_out_averages(run.plugins.values())
    _log_weights(run, loaded, reasons, left_out)
    result, reason = _run_pass(run, ask)
    if used is not None and not left_out:
        # Steps may have changed buffers; what the next evaluation finds changed is the user's.
        used.record_contents()
    if reason:
        _LOGGER.warning("%s was interrupted: %s.", run.verb, reason)
        return run.interrupt(reason)
    if has_data:
        _show_scores(run)
    return result


def _run_pass(run: Run, ask: Callable[[], str]) -> tuple[Any, str]:
    """Return the result of the pass, and what has interrupted it, if anything.

    Several processes complete it first: they may be at different batches.
    """
    try:
        result = run.loop.run()
    except Interrupted as error:
        return None, error.reason
    finally:
        run.signals.note_safe_point()
    reasons = [] if run.team.has_single_process else run.team.gather_objects(ask())
    return result, next(filter(None, reasons), "")


def _add_averages(run: Run, loaded: Loaded) -> None:
    """Add the averages that had the scores of the best checkpoint; warn for any other one."""
    averages = [] if loaded.sidecar is None else loaded.sidecar.averages
    lacking = [name for name in averages if name not in run.plugins]
    if run.choice.is_best:
        # Any kind of average does: it is not updated.
        stored = {name: EMA(plug_id=name, averages_buffers=True) for name in lacking}
        run.plugins = {**run.plugins, **stored}
    elif lacking:
        _LOGGER.warning(
            "The scores of %s are those of the average of plugin %s, which this trainer does "
            "not have: the network's own weights are evaluated, and their scores differ. "
            'Register the plugin, or pass checkpoint="best".',
            loaded.path.name,
            ", ".join(map(repr, lacking)),
        )


def _set_up_for(run: Run, state: Record | None) -> Callable[[RunParts], None]:
    """Set up what is evaluated; returns what gives it its state, once its objects are there."""
    if state is None and run.trained is not None:
        return _set_up_around(run, run.trained)
    makes_base = state is not None and references_of(state.model) is not None
    run.set_up(is_inference=True, is_resumed=state is not None, makes_base=makes_base)
    run.find_owners(run.open_saved_source(state))
    if state is None:
        run.model.load_for_testing()
        return lambda parts: None

    def restore(parts: RunParts) -> None:
        apply_trained(state, parts, is_inference=True)
        _remove_unrestored(run)

    return restore


def _set_up_around(run: Run, trained: TrainedModel) -> Callable[[RunParts], None]:
    """Set up all but the model, which stays as it is; returns what restores the others."""
    if run.replicas.is_sharded_over_processes:
        raise UsageError(
            f"{run.verb} of a sharded model needs a checkpoint, because its processes ended after "
            "training, each with its shards. Pass chkpt_root."
        )
    data = trained.owners.capture_one("data")
    with trained.keeping_plugins() as states:
        run.set_up_others()
    move_networks(run.model, run.engine.device)
    run.find_owners()
    run.owners.restore(data, is_inference=True)
    trained.owners = run.owners
    run.renew_hooks()
    return lambda parts: parts.plugin_states.restore(states)


def _remove_unrestored(run: Run) -> None:
    """Remove what does not have its saved state, so that it is an error to use it."""
    attributes = vars(run.model)
    for path, reason in (run.model.discovery.unrestored | run.owners.unrestored).items():
        if reason is not NOT_BUILT:
            attributes.pop(path, None)
            _LOGGER.warning("%s is not as it was when the checkpoint was saved: %s", path, reason)


def _log_weights(
    run: Run, loaded: Loaded | None, reasons: list[str], left_out: Mapping[str, list[str]]
) -> None:
    """Log which weights are evaluated, and why.

    Args:
        run: the evaluation.
        loaded: the checkpoint, if there is one.
        reasons: why it was chosen.
        left_out: networks whose average is not used, by id of the plugin.
    """
    reason = run.reason_to_load
    if loaded is not None:
        texts = [loaded.path.name, *reasons]
        texts += [f"the newest checkpoint, because {reason}"] if reason else []
        now = run.engine.precision.value
        trained = loaded.record.options.get("precision", now)
        texts += [] if trained == now else [f"in {now}, but trained in {trained}"]
    elif run.trained is not None:
        is_asked = run.choice.is_none or not reason
        why = "after fit" if is_asked else f"because there is no checkpoint, and {reason}"
        texts = ["the model as it is now", why]
    else:
        texts = ["the model as setup() and load_for_testing() make it, without a checkpoint"]
    for name, plugin in run.plugins.items():
        if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(run.phase):
            paths = ", ".join(left_out.get(name, ()))
            average = f"the average of plugin {name!r}"
            texts.append(
                f"without {average}, because of changes to {paths} since fit"
                if paths
                else f"with {average}"
            )
    if run.phase is Phase.TESTING:
        texts += _describe_step(run.model)
    _LOGGER.info("%s of %s.", run.verb, ", ".join(texts))


def _describe_step(model: Model) -> list[str]:
    """Return what tests the model if it has no ``test_step``; warn if nothing does."""
    step, kind = find_test_step(model), type(model).__name__
    if not step and is_own(model, "valid_step"):
        _LOGGER.warning(
            "%s has no test_step, and its valid_step needs its on_validation_start, "
            "on_validation_batch_start or on_validation_end, which a test does not call. So no "
            "step is called. Write test_step(self, batch).",
            kind,
        )
    return [f"by valid_step ({kind} has no test_step)"] if step == "valid_step" else []


def _show_scores(run: Run) -> None:
    tables = {
        Phase.VALIDATION: run.model.metrics,
        Phase.TESTING: run.model.test_scores,
        Phase.PREDICTION: {},
    }
    scores = as_numbers(tables[run.phase])
    if scores:
        _LOGGER.info("%s scores: %s.", run.verb, format_scores(scores))
