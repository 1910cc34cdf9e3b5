"""One call of validate, test or predict: load a checkpoint, run one pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from helios.checkpoint.capture import Trained, apply_trained, choose_trained
from helios.checkpoint.loading import Loaded
from helios.core.loss_means import as_numbers
from helios.counters import Cursor, Phase, TrainingState
from helios.engines.numerics import numerics
from helios.errors import Interrupted, StateError, UsageError
from helios.model.model import Model
from helios.plugins.averaging import EMA, WeightAverage
from helios.session import Session
from helios.startup.checkpoint_search import find_chosen
from helios.startup.model_in_hand import ModelInHand
from helios.startup.model_setup import move_networks
from helios.startup.run_log import format_scores, open_logs
from helios.startup.run_setup import Run
from helios.state.restoring import NOT_BUILT

_LOGGER = logging.getLogger(__name__)


def evaluate(run: Run) -> Any:
    """Load a checkpoint, or take the model in hand, and run one pass."""
    run.prepare_data()
    name = run.options.name_for(run.model.save_name)
    in_hand = run.call.in_hand
    loaded, reasons = (None, []) if run.call.is_in_hand else _find_chosen(run, name)
    record = None if loaded is None else run.detach(loaded.record)
    if loaded is not None:
        _add_averages(run, loaded)
    trained = run.call.handed if record is None else choose_trained(record, run.replicas)
    if record is None and trained is not None:
        record = trained.end
    elif trained is None and in_hand is not None:
        record = in_hand.record
    run.settings.enter_context(
        numerics(
            is_deterministic=run.options.enable_deterministic,
            use_cudnn_benchmark=False,
            num_threads=None if record is None else record.num_threads,
        )
    )
    open_logs(run.options, name, record, is_training=False)
    states = _set_up_for(run, trained)
    phase = run.call.phase
    has_data = run.open_source(phase) is not None
    if not has_data:
        _LOGGER.warning("%s has nothing to do: the data module has no data for it.", run.call.verb)
    run.require_alike_setup()
    session = run.make_inference_session(phase)
    run.take_session(session)
    if record is not None:
        session.state = TrainingState(**record.training_state)
        session.cursor = Cursor(**record.cursor)
    if trained is not None:
        apply_trained(trained, session, is_inference=True)
        _remove_unrestored(run)
    else:
        session.plugin_states.restore(states)
    used = in_hand if loaded is None else None
    left_out = {} if used is None else used.leave_out_averages(run.plugins.values())
    _log_weights(run, loaded, reasons, left_out)
    with _naming_unrestored(run.model):
        result, reason = _run_pass(run, session)
    if used is not None and not left_out:
        # Steps may have changed buffers; what the next evaluation finds changed is the user's.
        used.record_contents()
    if reason:
        _LOGGER.warning("%s was interrupted: %s.", run.call.verb, reason)
        return run.interrupt(reason)
    if has_data:
        _show_scores(run)
    return result


def _run_pass(run: Run, session: Session) -> tuple[Any, str]:
    """Return the result of the pass, and what has interrupted it, if anything.

    Several processes complete it first: they may be at different batches.
    """
    listener, is_alone = run.call.runtime.listener, run.team.has_single_process
    when = "after this batch" if is_alone else "when it is complete"
    ask = partial(listener.ask, f"{run.call.verb} ends {when}")
    if is_alone:
        session.outside = ask
    try:
        result = run.loop.run()
    except Interrupted as error:
        return None, error.reason
    finally:
        listener.note_safe_point()
    reasons = [] if is_alone else run.team.gather_objects(ask())
    return result, next(filter(None, reasons), "")


def _find_chosen(run: Run, run_name: str) -> tuple[Loaded | None, list[str]]:
    return find_chosen(
        run.call.choice,
        run.options,
        run.model.save_name,
        run.model.types_for_safe_load(),
        run_name=run_name,
        team=run.team,
        share=run.share,
    )


def _add_averages(run: Run, loaded: Loaded) -> None:
    """Add the averages that had the scores of the best checkpoint; warn for any other one."""
    averages = [] if loaded.sidecar is None else loaded.sidecar.averages
    lacking = [name for name in averages if name not in run.plugins]
    if run.call.choice.is_best:
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


def _set_up_for(run: Run, trained: Trained | None) -> dict[str, Any]:
    """Set up what is evaluated; returns the states of plugins of a model in hand."""
    in_hand = run.call.in_hand
    if trained is None and in_hand is not None:
        return _set_up_around(run, in_hand)
    run.set_up(is_inference=True)
    run.find_owners(run.open_saved_source(trained))
    if trained is None:
        run.model.load_for_testing()
    return {}


def _set_up_around(run: Run, in_hand: ModelInHand) -> dict[str, Any]:
    """Set up all but the model, which stays as it is; returns the states of plugins."""
    if run.replicas.is_sharded_over_processes:
        raise UsageError(
            f"{run.call.verb} of a sharded model needs a checkpoint, because its processes "
            "have parted after the training, each with its shards. Pass chkpt_root."
        )
    data = in_hand.owners.capture_one("data")
    with in_hand.keeping_plugins() as states:
        run.set_up_others()
    move_networks(run.model, run.engine.device)
    run.find_owners()
    run.owners.restore(data, is_inference=True)
    in_hand.owners = run.owners
    run.renew_hooks()
    return states


def _remove_unrestored(run: Run) -> None:
    """Remove what does not have its saved state, so that it is an error to use it."""
    attributes = vars(run.model)
    for path, reason in (run.model.discovery.unrestored | run.owners.unrestored).items():
        if reason is not NOT_BUILT and path in attributes:
            del attributes[path]
        elif reason is not NOT_BUILT:
            _LOGGER.warning("%s is not as it was when the checkpoint was saved: %s", path, reason)


@contextmanager
def _naming_unrestored(model: Model) -> Iterator[None]:
    """Say of an error why what it lacks could not be restored."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        lacking = model.discovery.unrestored
        # A container may lack it, too.
        name = error.name if isinstance(error, AttributeError) else next(iter(error.args), None)
        is_none = name is not None and getattr(error, "obj", error) is None
        asked = [
            path
            for path in lacking
            if name in path.split(".") or (is_none and vars(model).get(path, path) is None)
        ]
        if not asked:
            raise
        raise StateError(
            f"The evaluation needs {' or '.join(asked)} as at the checkpoint, but cannot have it. "
            f"{' '.join(dict.fromkeys(lacking[path] for path in asked))}"
        ) from error


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
    reason = run.call.reason_to_load
    if loaded is not None:
        texts = [loaded.path.name, *reasons]
        texts += [f"the newest checkpoint, because {reason}"] if reason else []
    elif run.call.handed is not None:
        texts = ["the model as the process that started the ranks has it"]
    elif run.call.in_hand is not None:
        is_asked = run.call.choice.is_none or not reason
        why = "after fit" if is_asked else f"because there is no checkpoint, and {reason}"
        texts = ["the model as it is now", why]
    else:
        texts = ["the model as setup() and load_for_testing() make it, without a checkpoint"]
    for name, plugin in run.plugins.items():
        if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(run.call.phase):
            paths = ", ".join(left_out.get(name, ()))
            average = f"the average of plugin {name!r}"
            texts.append(
                f"without {average}, because of changes to {paths} since fit"
                if paths
                else f"with {average}"
            )
    _LOGGER.info("%s of %s.", run.call.verb, ", ".join(texts))


def _show_scores(run: Run) -> None:
    tables = {
        Phase.VALIDATION: run.model.metrics,
        Phase.TESTING: run.model.test_scores,
        Phase.PREDICTION: {},
    }
    scores = as_numbers(tables[run.call.phase])
    if scores:
        _LOGGER.info("%s scores: %s.", run.call.verb, format_scores(scores))
