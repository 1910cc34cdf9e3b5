"""``Plugin``: an object that receives events, may hold state and may process batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch

from helios.core.cuda import requires_cuda_support
from helios.core.registry import Registry
from helios.core.utils import convert_to_list
from helios.errors import ArgumentTypeError, UsageError
from helios.hooks.context import Context, RunModel
from helios.hooks.events import Hooks
from helios.model.model import Model

if TYPE_CHECKING:
    from helios import Trainer


PLUGIN_REGISTRY = Registry("plugin")


def create_plugin(type_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create a plugin of the registry.

    Raises:
        KeyError: if no plugin of that name is registered.
    """
    return PLUGIN_REGISTRY.get(type_name)(*args, **kwargs)


@dataclass
class UniquePluginOverrides:
    """Methods that only one plugin may override.

    Overriding ``process_training_batch`` or its counterparts decides; a flag must agree with it.
    ``should_training_stop`` is accepted and has no effect: any plugin may stop a run.
    """

    training_batch: bool = False
    validation_batch: bool = False
    testing_batch: bool = False
    should_training_stop: bool = False


class Plugin(Hooks, ABC, Generic[RunModel]):
    """Base of all plugins.

    Override the methods of the events that you need. A plugin is called before the model; with
    ``monitor = True`` it is called after the model at the ends of validations and epochs.
    ``class MyPlugin(Plugin[MyModel])`` tells type checkers which model :attr:`context` has.

    Attributes:
        monitor: receive the end events after the model.
        unsaved: names of attributes that training changes and that need not be saved.
        loads_shards: whether ``load_state_dict`` takes tensors of sharded models that are not read
            yet, and cuts them with ``cut_like``; otherwise it gets full tensors.
        is_distributed: whether several processes train.
        map_loc: location that weights of a checkpoint are mapped to.
        device: device of the run.
        global_rank: rank of this process among all, from 0.
        trainer: the trainer of the last call; ``None`` before the first one.
        context: the run as the plugin sees it: the model, the counters, the current batch. A
            ``UsageError`` before ``setup`` of the model, and after the end of the run.

    Args:
        plug_id: unique id of the plugin in a trainer; its state is saved under it.

    Raises:
        ArgumentTypeError: for an id that is not a string.
    """

    _internals: ClassVar[str] = (
        "_plug_id _unique_overrides context device global_rank is_distributed map_loc rank trainer"
    )

    loads_shards: ClassVar[bool] = False

    monitor: bool = False
    unsaved: tuple[str, ...] = ()
    _plug_id: str = ""
    context: Context[RunModel]

    def __init__(self, plug_id: str) -> None:
        if not isinstance(plug_id, str):
            raise ArgumentTypeError(
                f"{type(self).__name__}(plug_id=...) must be a str, got {plug_id!r}. Pass a name "
                "that no other plugin has."
            )
        self._plug_id = plug_id
        self._unique_overrides = UniquePluginOverrides()
        self.is_distributed = False
        self.map_loc: str | dict[str, str] = ""
        self.device = torch.device("cpu")
        self.global_rank = 0
        self.rank = 0
        self.trainer: Trainer | None = None

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self.rank

    @property
    def plug_id(self) -> str:
        """Id of the plugin.

        Raises:
            UsageError: without one.
        """
        if not self._plug_id:
            raise UsageError(
                f"{type(self).__name__} has no plug_id: its __init__ must call "
                "super().__init__(plug_id) with a non-empty name."
            )
        return self._plug_id

    @property
    def unique_overrides(self) -> UniquePluginOverrides:
        """The methods that only one plugin may override, and whether this one does."""
        return self._unique_overrides

    def configure_trainer(self, trainer: Trainer) -> None:
        """Register in a trainer; called by users. Override it to add exception types, say."""
        self._register_in_trainer(trainer)

    def _register_in_trainer(self, trainer: Trainer) -> None:
        trainer.register_plugin(self)

    def _append_train_exceptions(
        self, exc: type[BaseException] | list[type[BaseException]], trainer: Trainer
    ) -> None:
        """Declare exception types that ``fit`` does not log.

        Args:
            exc: the type, or a list of types.
            trainer: the trainer whose ``train_exceptions`` are extended.
        """
        trainer.train_exceptions.extend(convert_to_list(exc))

    def _append_test_exceptions(
        self, exc: type[BaseException] | list[type[BaseException]], trainer: Trainer
    ) -> None:
        """Declare exception types that ``validate``, ``test`` and ``predict`` do not log."""
        trainer.test_exceptions.extend(convert_to_list(exc))

    def configure_model(self, model: Model) -> None:
        """Change a model before training; called by users."""

    @abstractmethod
    def setup(self) -> None:
        """Prepare; called once at the start of fit, validate, test or predict, before the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return state to save besides the attributes that training changes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


@PLUGIN_REGISTRY.register
class CUDAPlugin(Plugin):
    """Accepted for scripts of Helios 1: ``Model.batch_to_device`` moves batches.

    Raises:
        RuntimeError: without CUDA.
    """

    plugin_id = "cuda"

    def __init__(self) -> None:
        requires_cuda_support()
        super().__init__(self.plugin_id)

    def setup(self) -> None:
        """Nothing to prepare."""
