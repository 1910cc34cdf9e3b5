"""A plugin: an object beside the model that receives events, holds state and may map batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from helios.core.registry import Registry
from helios.errors import UsageError
from helios.hooks.context import Context
from helios.hooks.events import silent
from helios.hooks.interface import Hooks
from helios.state import Phase, TrainingState

if TYPE_CHECKING:
    from helios.model.model import Model
    from helios.trainer import Trainer

PLUGIN_REGISTRY = Registry("plugin")


def create_plugin(type_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create a plugin of the registry.

    Raises:
        KeyError: if no plugin of that name is registered.
    """
    return PLUGIN_REGISTRY.get(type_name)(*args, **kwargs)


@dataclass
class UniquePluginOverrides:
    """What a plugin claims for itself alone (API section 15).

    Overriding ``process_training_batch`` and its kin makes the owner; a flag that is set must agree
    with what is overridden. ``should_training_stop`` is accepted and has no effect: any plugin may
    stop a training.
    """

    training_batch: bool = False
    validation_batch: bool = False
    testing_batch: bool = False
    should_training_stop: bool = False


class Plugin(Hooks, ABC):
    """Base of all plugins.

    Override the methods of the events that you need. A plugin is called before the model; with
    ``monitor = True`` it is called after the model at the ends of validations and epochs.

    Attributes:
        monitor: receive the end events after the model.
        sanity_steps: batches of a trial validation before the training; 0 for none (C17).
        batch_limits: the most batches of a pass, by phase, for a quick trial.
        unsaved: names of attributes that training changes and that no checkpoint needs.
        is_distributed: whether several processes train.
        map_loc: location that weights of a checkpoint are mapped to.
        device: device of the training.
        global_rank: number of this process among all, from 0.
        rank: same as ``local_rank``.
        trainer: the trainer, once one runs.

    Args:
        plug_id: the plugin's name, unique in a trainer; its state is saved under it.
    """

    _internals: ClassVar[str] = (
        "_context _plug_id _unique_overrides device global_rank is_distributed map_loc rank trainer"
    )

    monitor: bool = False
    sanity_steps: int = 0
    batch_limits: Mapping[Phase, int] = {}
    unsaved: tuple[str, ...] = ()
    _plug_id: str = ""

    def __init__(self, plug_id: str) -> None:
        self._plug_id = plug_id
        self._unique_overrides = UniquePluginOverrides()
        self.is_distributed = False
        self.map_loc: str | dict[str, str] = ""
        self.device = torch.device("cpu")
        self.global_rank = 0
        self.rank = 0
        self.trainer: Trainer | None = None
        self._context: Context | None = None

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0."""
        return self.rank

    @property
    def context(self) -> Context:
        """What the plugin may see of the run: the model, the counters, the present batch.

        Raises:
            UsageError: before ``setup`` of the model, and after the end of the run.
        """
        if self._context is None:
            raise UsageError(
                f"Plugin {self._plug_id!r} has no context yet: a run sets it after setup(). Use it "
                "in events, such as on_fit_start."
            )
        return self._context

    @context.setter
    def context(self, value: Context | None) -> None:
        self._context = value

    @property
    def plug_id(self) -> str:
        """The plugin's name.

        Raises:
            UsageError: without one.
        """
        if not self._plug_id:
            raise UsageError(
                f"{type(self).__name__} has no plug_id: its __init__ must call "
                "super().__init__(plug_id) with a name that is not empty."
            )
        return self._plug_id

    @property
    def unique_overrides(self) -> UniquePluginOverrides:
        """What the plugin claims for itself alone."""
        return self._unique_overrides

    def configure_trainer(self, trainer: Trainer) -> None:
        """Register in a trainer; called by users. Extend it to add exception types and the like."""
        self._register_in_trainer(trainer)

    def _register_in_trainer(self, trainer: Trainer) -> None:
        trainer.register_plugin(self)

    def _append_train_exceptions(
        self, exc: type[BaseException] | Sequence[type[BaseException]], trainer: Trainer
    ) -> None:
        """Let exceptions of a type, or of several, pass through ``fit`` without being logged.

        Args:
            exc: the type, or a list of types.
            trainer: whose ``train_exceptions`` get them.
        """
        trainer.train_exceptions.extend(_as_types(exc))

    def _append_test_exceptions(
        self, exc: type[BaseException] | Sequence[type[BaseException]], trainer: Trainer
    ) -> None:
        """Do what :meth:`_append_train_exceptions` does for ``test``."""
        trainer.test_exceptions.extend(_as_types(exc))

    def configure_model(self, model: Model) -> None:
        """Change a model before the training; called by users."""

    @abstractmethod
    def setup(self) -> None:
        """Prepare; called once at the start of fit, validate, test or predict, before the data."""

    @silent
    def on_sanity_check_start(self) -> None:
        """Called before the trial validation of a new run; see ``sanity_steps``."""

    @silent
    def on_sanity_check_end(self) -> None:
        """Called when the trial validation is over and everything that it changed is put back."""

    @silent
    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        """Return the training batch that the model gets; only one plugin may override this.

        Args:
            batch: the batch of one replica, on the device.
            state: the counters.
        """
        return batch

    @silent
    def process_validation_batch(self, batch: Any, step: int) -> Any:
        """Return the validation batch that the model gets; only one plugin may override this.

        Args:
            batch: the batch of one replica, on the device.
            step: number of the batch in its loader, from 0. An override may also take
                ``dataloader_idx: int = 0``.
        """
        return batch

    @silent
    def process_testing_batch(self, batch: Any, step: int) -> Any:
        """Return the test batch that the model gets; arguments as in validations."""
        return batch

    @silent
    def process_predicting_batch(self, batch: Any, step: int) -> Any:
        """Return the batch to predict that the model gets; arguments as in validations."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the plugin besides attributes that training changes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""


def _as_types(
    exc: type[BaseException] | Sequence[type[BaseException]],
) -> Sequence[type[BaseException]]:
    return [exc] if isinstance(exc, type) else exc
