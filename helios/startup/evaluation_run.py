"""One call of validate, test or predict: load a checkpoint, run one pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from helios.checkpoint.capture import Trained, apply_tables
from helios.checkpoint.loading import Loaded
from helios.core.loss_means import as_numbers
from helios.engines.numerics import numerics
from helios.errors import UsageError
from helios.model.model import Model
from helios.plugins.averaging import StoredAverage, WeightAverage
from helios.startup.checkpoint_search import find_chosen
from helios.startup.model_in_hand import ModelInHand
from helios.startup.model_setup import move_networks
from helios.startup.run_log import format_scores, open_logs
from helios.startup.run_setup import Run
from helios.startup.state_owners import find_owners
from helios.state import Cursor, Phase, TrainingState

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
    trained = run.call.handed if record is None else Trained.of(record)
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
    trained = _set_up_for(run, trained, is_handed=loaded is None)
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
        session.plugin_states.restore(trained.plugins)
        run.owners.restore(trained.owners, is_inference=True)
    used = in_hand if loaded is None else None
    left_out = {} if used is None else used.leave_out_averages(run.plugins.values())
    _log_weights(run, loaded, reasons, left_out)
    result = run.loop.run()
    if used is not None and not left_out:
        # Steps may have changed buffers; what the next evaluation finds changed is the user's.
        used.record_contents()
    if has_data:
        _show_scores(run)
    return result


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
        run.plugins = {**run.plugins, **{name: StoredAverage(name) for name in lacking}}
    elif lacking:
        _LOGGER.warning(
            "The scores of %s are those of the average of plugin %s, which this trainer does "
            "not have: the network's own weights are evaluated, and their scores differ. "
            'Register the plugin, or pass checkpoint="best".',
            loaded.path.name,
            ", ".join(map(repr, lacking)),
        )


def _set_up_for(run: Run, trained: Trained | None, *, is_handed: bool) -> Trained | None:
    """Set up and load what is evaluated; returns the states of plugins and data, if any."""
    in_hand = run.call.in_hand
    if trained is None and in_hand is not None:
        return _set_up_around(run, in_hand)
    run.set_up(is_inference=True)
    if trained is not None:
        run.model.load_state_dict(trained.model, fast_init=True)
        if is_handed:
            apply_tables(trained.tables, run.model)
        return trained
    if type(run.model).load_for_testing is Model.load_for_testing:
        _LOGGER.warning(
            "%s of a model without a checkpoint, with the weights from setup(). Pass "
            "chkpt_root, or override Model.load_for_testing.",
            run.call.verb,
        )
    run.model.load_for_testing()
    return None


def _set_up_around(run: Run, in_hand: ModelInHand) -> Trained:
    """Set up all but the model, which stays as it is; returns the states of plugins."""
    if run.replicas.is_sharded_over_processes:
        raise UsageError(
            f"{run.call.verb} of a sharded model needs a checkpoint, because its processes "
            "have parted after the training, each with its shards. Pass chkpt_root."
        )
    with in_hand.keeping_plugins() as states:
        run.set_up_others()
    move_networks(run.model, run.engine.device)
    run.owners = find_owners(run.plugins, run.model, run.datamodule, engine=run.engine)
    run.renew_hooks()
    return Trained({}, {}, states, {})


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
        why = f"because there is no checkpoint, and {reason}" if reason else "after fit"
        texts = ["the model as it is now", why]
    else:
        return
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
