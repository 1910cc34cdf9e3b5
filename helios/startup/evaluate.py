"""One call of validate, test or predict: load the newest checkpoint, run one pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from helios.data.datamodule import DataModule
from helios.engines.engine import numerics
from helios.loops.evaluation import EvaluationLoop
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.session import Session
from helios.startup import outputs, resume
from helios.startup.arguments import Arguments
from helios.startup.run import Run
from helios.state import Cursor, TrainingState

_LOGGER = logging.getLogger(__name__)


class EvaluationRun(Run):
    """One evaluation; see ``Run`` for the arguments.

    Args:
        arguments: the options of the trainer.
        plugins: by id.
        model: the user's model.
        datamodule: the user's data.
        show: is told the session while it exists.
        loop: the evaluation loop.
        is_trained: whether this trainer has just trained the model, in this process.
    """

    def __init__(
        self,
        arguments: Arguments,
        plugins: Mapping[str, Plugin],
        model: Model,
        datamodule: DataModule,
        show: Callable[[Session | None], None],
        *,
        loop: EvaluationLoop,
        is_trained: bool,
    ) -> None:
        super().__init__(arguments, plugins, model, datamodule, show)
        self._loop = loop
        self._is_trained = is_trained
        self.verb = loop.phase.value.capitalize()

    @property
    def loop(self) -> EvaluationLoop:
        """The evaluation loop."""
        return self._loop

    def _run(self, stack: ExitStack) -> Any:
        self.datamodule.prepare_data()
        folder = resume.open_folder(self.arguments, self.model.save_name)
        types = self.model.types_for_safe_load()
        loaded = None if folder is None else folder.load_newest(types, renames_damaged=False)
        payload = None if loaded is None else loaded.payload
        stack.enter_context(
            numerics(
                is_deterministic=self.arguments.enable_deterministic,
                use_cudnn_benchmark=False,
                num_threads=None if payload is None else payload["num_threads"],
            )
        )
        name = self.arguments.run_name or self.model.save_name
        outputs.open_logs(self.arguments, name, payload, is_training=False)
        self._set_up_for(payload)
        if self._open_source(self.loop.phase) is None:
            _LOGGER.warning("%s has nothing to do: the data module has no data for it.", self.verb)
        session = self._make_inference_session(self.loop.phase)
        self._take_session(session)
        if loaded is not None:
            session.state = TrainingState(**loaded.payload["training_state"])
            session.cursor = Cursor(**loaded.payload["cursor"])
            self._load_known_plugins(loaded.payload["plugins"])
            _LOGGER.info("%s of %s.", self.verb, loaded.path.name)
        return self.loop.run()

    def _set_up_for(self, payload: dict[str, Any] | None) -> None:
        if payload is None and self._is_trained:
            _LOGGER.info("%s of the model as it was trained in this process.", self.verb)
            self.datamodule.setup()
            return
        self._set_up(is_inference=True)
        if payload is not None:
            self.model.load_state_dict(payload["model"], fast_init=True)
            return
        if type(self.model).load_for_testing is Model.load_for_testing:
            _LOGGER.warning(
                "%s of a model without a checkpoint, with the weights that setup() made. Pass "
                "chkpt_root, or override Model.load_for_testing.",
                self.verb,
            )
        self.model.load_for_testing()
