"""One call of validate, test or predict: load a checkpoint, run one pass."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from helios.checkpoint.capture import Trained, apply_tables
from helios.core.text import as_numbers
from helios.engines.engine import numerics
from helios.errors import UsageError
from helios.model.model import Model
from helios.startup.building import run_outputs
from helios.startup.checkpoint_search import run_rules
from helios.startup.checkpoint_search.chosen_checkpoint import find_chosen
from helios.startup.launching.process_plan import Plan
from helios.startup.launching.trainer_call import Call
from helios.startup.reporting.score_log import format_scores
from helios.startup.runs.base_run import Run
from helios.state import Cursor, Phase, TrainingState

_LOGGER = logging.getLogger(__name__)


class EvaluationRun(Run):
    """One evaluation; see ``Run`` for the arguments."""

    def __init__(self, call: Call, plan: Plan, device: torch.device) -> None:
        super().__init__(call, plan, device)
        self.verb = call.phase.value.capitalize()

    def _run(self, stack: ExitStack) -> Any:
        self._prepare_data()
        name = self.options.run.name_for(self.model.save_name)
        chosen = find_chosen(
            self.call.choice,
            self.options.checkpoints,
            self.model.save_name,
            self.model.types_for_safe_load(),
            run_name=name,
            team=self.team,
            share=self._share,
        )
        loaded = chosen.loaded
        record = None if loaded is None else self._detach(loaded.record)
        stack.enter_context(
            numerics(
                is_deterministic=self.options.numerics.enable_deterministic,
                use_cudnn_benchmark=False,
                num_threads=None if record is None else record.num_threads,
            )
        )
        run_outputs.open_logs(self.options.logging, name, record, is_training=False)
        self._follow_rules(run_rules.find_rules(None if record is None else record.options))
        trained = self.call.handed if record is None else Trained.of(record)
        self._set_up_for(trained, is_handed=record is None)
        phase = self.call.phase
        has_data = self._open_source(phase) is not None
        if not has_data:
            _LOGGER.warning("%s has nothing to do: the data module has no data for it.", self.verb)
        self._require_alike_setup()
        session = self._make_inference_session(phase)
        self._take_session(session)
        if loaded is not None and record is not None:
            session.state = TrainingState(**record.training_state)
            session.cursor = Cursor(**record.cursor)
            _LOGGER.info("%s.", ", ".join((f"{self.verb} of {loaded.path.name}", *chosen.reasons)))
        if trained is not None:
            session.plugin_states.restore(trained.plugins)
            self.owners.restore(trained.owners, is_inference=True)
        result = self.loop.run()
        if has_data:
            self._show_scores()
        return result

    def _show_scores(self) -> None:
        tables = {
            Phase.VALIDATION: self.model.metrics,
            Phase.TESTING: self.model.test_scores,
            Phase.PREDICTION: {},
        }
        scores = as_numbers(tables[self.call.phase])
        if scores:
            _LOGGER.info("%s scores: %s.", self.verb, format_scores(scores))

    def _set_up_for(self, trained: Trained | None, *, is_handed: bool) -> None:
        if trained is None and self.call.is_trained:
            if self.replicas.is_sharded_over_processes:
                raise UsageError(
                    f"{self.verb} of a sharded model needs a checkpoint, because its processes "
                    "have parted after the training, each with its shards. Pass chkpt_root."
                )
            _LOGGER.info("%s of the model as it was trained in this process.", self.verb)
            self._set_places()
            self.datamodule.setup()
            return
        self._set_up(is_inference=True)
        if trained is not None:
            self.model.load_state_dict(trained.model, fast_init=True)
            if is_handed:
                _LOGGER.info("%s of the model with the weights of the last training.", self.verb)
                apply_tables(trained.tables, self.model)
            return
        if type(self.model).load_for_testing is Model.load_for_testing:
            _LOGGER.warning(
                "%s of a model without a checkpoint, with the weights from setup(). Pass "
                "chkpt_root, or override Model.load_for_testing.",
                self.verb,
            )
        self.model.load_for_testing()
