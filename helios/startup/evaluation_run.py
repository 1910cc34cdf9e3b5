"""One call of validate, test or predict: load a checkpoint, run one pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from helios.checkpoint.capture import Trained, apply_tables
from helios.checkpoint.loading import Loaded
from helios.core.text import as_numbers
from helios.engines.engine import numerics
from helios.errors import UsageError
from helios.model.model import Model
from helios.plugins.averaging import StoredAverage, WeightAverage
from helios.startup import run_identity
from helios.startup.base_run import Run
from helios.startup.chosen_checkpoint import Chosen, find_chosen
from helios.startup.model_in_hand import ModelInHand
from helios.startup.model_setup import move_networks
from helios.startup.processes import Plan
from helios.startup.run_log import format_scores, open_logs
from helios.startup.state_owners import find_owners
from helios.startup.trainer_call import Call
from helios.state import Cursor, Phase, TrainingState

_LOGGER = logging.getLogger(__name__)


class EvaluationRun(Run):
    """One evaluation; see ``Run`` for the arguments."""

    def __init__(self, call: Call, plan: Plan, device: torch.device) -> None:
        super().__init__(call, plan, device)
        self.verb = call.phase.value.capitalize()

    def _run(self, stack: ExitStack) -> Any:
        self._prepare_data()
        name = self.options.name_for(self.model.save_name)
        in_hand = self.call.in_hand
        chosen = Chosen(None) if self.call.is_in_hand else self._find_chosen(name)
        loaded = chosen.loaded
        record = None if loaded is None else self._detach(loaded.record)
        if loaded is not None:
            self._add_averages(loaded)
        trained = self.call.handed if record is None else Trained.of(record)
        if record is None and trained is not None:
            record = trained.end
        elif trained is None and in_hand is not None:
            record = in_hand.record
        stack.enter_context(
            numerics(
                is_deterministic=self.options.enable_deterministic,
                use_cudnn_benchmark=False,
                num_threads=None if record is None else record.num_threads,
            )
        )
        open_logs(self.options, name, record, is_training=False)
        self._follow_rules(run_identity.find_rules(None if record is None else record.options))
        trained = self._set_up_for(trained, is_handed=loaded is None)
        phase = self.call.phase
        has_data = self._open_source(phase) is not None
        if not has_data:
            _LOGGER.warning("%s has nothing to do: the data module has no data for it.", self.verb)
        self._require_alike_setup()
        session = self._make_inference_session(phase)
        self._take_session(session)
        if record is not None:
            session.state = TrainingState(**record.training_state)
            session.cursor = Cursor(**record.cursor)
        if trained is not None:
            session.plugin_states.restore(trained.plugins)
            self.owners.restore(trained.owners, is_inference=True)
        used = in_hand if loaded is None else None
        left_out = {} if used is None else used.leave_out_averages(self.plugins.values())
        self._log_weights(chosen, left_out)
        result = self.loop.run()
        if used is not None and not left_out:
            # Steps may have changed buffers; what the next evaluation finds changed is the user's.
            used.record_contents()
        if has_data:
            self._show_scores()
        return result

    def _find_chosen(self, run_name: str) -> Chosen:
        return find_chosen(
            self.call.choice,
            self.options,
            self.model.save_name,
            self.model.types_for_safe_load(),
            run_name=run_name,
            team=self.team,
            share=self._share,
        )

    def _add_averages(self, loaded: Loaded) -> None:
        """Add the averages that had the scores of the best checkpoint; warn for any other one."""
        averages = [] if loaded.sidecar is None else loaded.sidecar.averages
        lacking = [name for name in averages if name not in self.plugins]
        if self.call.choice.is_best:
            self.plugins = {**self.plugins, **{name: StoredAverage(name) for name in lacking}}
        elif lacking:
            _LOGGER.warning(
                "The scores of %s are those of the average of plugin %s, which this trainer does "
                "not have: the network's own weights are evaluated, and their scores differ. "
                'Register the plugin, or pass checkpoint="best".',
                loaded.path.name,
                ", ".join(map(repr, lacking)),
            )

    def _set_up_for(self, trained: Trained | None, *, is_handed: bool) -> Trained | None:
        """Set up and load what is evaluated; returns the states of plugins and data, if any."""
        in_hand = self.call.in_hand
        if trained is None and in_hand is not None:
            return self._set_up_around(in_hand)
        self._set_up(is_inference=True)
        if trained is not None:
            self.model.load_state_dict(trained.model, fast_init=True)
            if is_handed:
                apply_tables(trained.tables, self.model)
            return trained
        if type(self.model).load_for_testing is Model.load_for_testing:
            _LOGGER.warning(
                "%s of a model without a checkpoint, with the weights from setup(). Pass "
                "chkpt_root, or override Model.load_for_testing.",
                self.verb,
            )
        self.model.load_for_testing()
        return None

    def _set_up_around(self, in_hand: ModelInHand) -> Trained:
        """Set up all but the model, which stays as it is; returns the states of plugins."""
        if self.replicas.is_sharded_over_processes:
            raise UsageError(
                f"{self.verb} of a sharded model needs a checkpoint, because its processes "
                "have parted after the training, each with its shards. Pass chkpt_root."
            )
        with in_hand.keeping_plugins() as states:
            self._set_up_others()
        move_networks(self.model, self.engine.device)
        self.owners = find_owners(self.plugins, self.model, self.datamodule, engine=self.engine)
        self.hooks = self._make_bus()
        return Trained({}, {}, states, {})

    def _log_weights(self, chosen: Chosen, left_out: Mapping[str, list[str]]) -> None:
        """Log which weights are evaluated, and why.

        Args:
            chosen: the checkpoint, if there is one.
            left_out: networks whose average is not used, by id of the plugin.
        """
        reason = self.call.reason_to_load
        if chosen.loaded is not None:
            texts = [chosen.loaded.path.name, *chosen.reasons]
            texts += [f"the newest checkpoint, because {reason}"] if reason else []
        elif self.call.handed is not None:
            texts = ["the model as the process that started the ranks has it"]
        elif self.call.in_hand is not None:
            why = f"because there is no checkpoint, and {reason}" if reason else "after fit"
            texts = ["the model as it is now", why]
        else:
            return
        for name, plugin in self.plugins.items():
            if isinstance(plugin, WeightAverage) and plugin.is_swapped_in(self.call.phase):
                paths = ", ".join(left_out.get(name, ()))
                average = f"the average of plugin {name!r}"
                texts.append(
                    f"without {average}, because of changes to {paths} since fit"
                    if paths
                    else f"with {average}"
                )
        _LOGGER.info("%s of %s.", self.verb, ", ".join(texts))

    def _show_scores(self) -> None:
        tables = {
            Phase.VALIDATION: self.model.metrics,
            Phase.TESTING: self.model.test_scores,
            Phase.PREDICTION: {},
        }
        scores = as_numbers(tables[self.call.phase])
        if scores:
            _LOGGER.info("%s scores: %s.", self.verb, format_scores(scores))
