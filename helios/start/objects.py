"""The objects that users pass, checked before anything starts: models, plugins, data, loops."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helios.counters import Phase
from helios.data.datamodule import DataModule
from helios.data.datamodule import Dataset as AssignedDataset
from helios.data.source import CannotResume, Source
from helios.errors import ArgumentError, ArgumentTypeError, DuplicateError, UsageError
from helios.hooks.bus import check_call, check_owners, check_receiver, check_state_methods
from helios.hooks.events import EVENTS, Hooks, Receiver, is_silent
from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import EvaluationLoop, PredictionLoop, TestingLoop, ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.optimizer import OptimizerLoop
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.plugins.plugin import Plugin

_LOGGER = logging.getLogger(__name__)

_RECEIVERS: tuple[tuple[type, Receiver, str], ...] = (
    (Plugin, Receiver.PLUGIN, "plugins"),
    (DataModule, Receiver.DATA, "the data module"),
    (Model, Receiver.MODEL, "the model"),
)
_TRANSFER = "batch_to_device of the model, or process_training_batch of a plugin"
_OF_OTHER_TRAINERS = {
    "backward": "backward_loss of an engine, or a train_step that returns None",
    "configure_callbacks": "Trainer(plugins=[...])",
    "configure_gradient_clipping": "Trainer(clip_norm=...), or clip_gradients of an engine",
    "configure_model": "setup()",
    "configure_optimizers": "attributes that setup() builds",
    "lr_scheduler_step": "scheduler_interval, or a train_step that returns None",
    "on_after_backward": "on_backward_end",
    "on_after_batch_transfer": _TRANSFER,
    "on_before_backward": "on_backward_start",
    "on_before_batch_transfer": _TRANSFER,
    "on_before_optimizer_step": "on_optimizer_step_start",
    "on_predict_epoch_end": "on_predicting_end",
    "on_predict_epoch_start": "on_predicting_start",
    "on_test_epoch_end": "on_testing_end",
    "on_test_epoch_start": "on_testing_start",
    "on_validation_epoch_end": "on_validation_end",
    "on_validation_epoch_start": "on_validation_start",
    "optimizer_step": "on_optimizer_step_start, or optimizer_step of an engine",
    "optimizer_zero_grad": "on_before_zero_grad, or zero_grad of an engine",
    "test_epoch_end": "on_testing_end",
    "training_epoch_end": "on_training_epoch_end",
    "transfer_batch_to_device": _TRANSFER,
    "val_dataloader": "valid_dataloader of the data module",
    "validation_epoch_end": "on_validation_end",
}
"""Methods of other trainers, and what does the same here, if the names differ."""


def check_subjects(model: Model, datamodule: DataModule) -> None:
    """Check the model and the data module of a call.

    Raises:
        ArgumentTypeError: for something that is not a model, or not a data module, or whose setup
            takes arguments.
        UsageError: if the model's ``__init__`` does not call that of ``Model``.
    """
    if not isinstance(model, Model):
        raise ArgumentTypeError(
            f"Trainer.fit(model=...) must be a Model, got {model!r}. "
            "Pass an object of a class that derives from helios.Model."
        )
    if not isinstance(datamodule, DataModule):
        raise ArgumentTypeError(
            f"Trainer.fit(datamodule=...) must be a DataModule, got {datamodule!r}. "
            "Pass helios.DataModule.from_datasets(train=..., batch_size=...), or an object of a "
            "class that derives from helios.DataModule, whose setup() assigns self.train_dataset."
        )
    check_made(model)
    check_call(f"{type(datamodule).__name__}.setup", datamodule.setup, ())


def warn_of_unread_datasets(datamodule: DataModule) -> None:
    """Warn of data sets that ``setup`` has assigned to a name that Helios does not read."""
    names = ["train_dataset", "valid_dataset", "test_dataset", "predict_dataset"]
    for name, value in vars(datamodule).items():
        if isinstance(value, AssignedDataset) and not name.startswith("_"):
            (near,) = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            _LOGGER.warning(
                "%s.%s is a data set that Helios does not read; did you mean %s?",
                type(datamodule).__name__,
                name,
                near,
            )


def check_training_source(source: Source, *, can_save: bool, is_by_epoch: bool) -> None:
    """Check that a run can train on this data.

    Raises:
        ArgumentError: if the run saves, but its data cannot resume; or if it counts epochs of data
            that has none.
    """
    if can_save and isinstance(source.resumes_by, CannotResume):
        raise ArgumentError(
            f"The training loader, a {type(source.loader).__name__}, can neither seek nor be "
            f"saved, so a checkpoint could not resume exactly. {source.resumes_by.remedy} Or "
            "pass chkpt_frequency=None."
        )
    if source.is_endless and is_by_epoch:
        raise ArgumentError(
            "Trainer(max_epochs=...) must not be passed with Steps(), whose epoch never ends. Pass "
            "max_steps, or the iterations of an epoch: Steps(n)."
        )


def check_made(model: Model) -> None:
    """Check that the constructor of a model has called that of its base.

    Raises:
        UsageError: if it has not.
    """
    if "_discovery" not in vars(model):
        raise UsageError(
            f"{type(model).__name__}.__init__ must call super().__init__(): without it there is "
            "neither a name nor state. Add the call as its first line."
        )


def warn_of_unknown_hooks(owner: object) -> None:
    """Warn of methods that look like a hook or a step, but are not, and so are never called.

    These are all ``on_*`` and ``process_*``, and names that other trainers call or that are spelled
    almost like one of ours; and events that an object of this kind does not receive. Private names,
    and overrides of other methods, are left alone.
    """
    _warn_of_others_events(owner)
    _warn_of_hidden_hooks(owner)
    reported: set[str] = set()
    for name in own_methods(owner):
        text = _describe_unknown(name)
        if name not in reported and text:
            reported.add(name)
            _LOGGER.warning("%s.%s is never called by Helios%s", type(owner).__name__, name, text)


def _warn_of_others_events(owner: object) -> None:
    own = {receiver for kind, receiver, _ in _RECEIVERS if isinstance(owner, kind)}
    for event in EVENTS.values():
        base = getattr(Hooks, event.name)
        if not own & set(event.receivers) and getattr(type(owner), event.name, base) is not base:
            receivers = [text for _, receiver, text in _RECEIVERS if receiver in event.receivers]
            _LOGGER.warning(
                "%s.%s is never called by Helios: only %s may define it.",
                type(owner).__name__,
                event.name,
                " and ".join(receivers),
            )


def _warn_of_hidden_hooks(owner: object) -> None:
    """Warn of hooks of a mixin that stands behind a class of Helios, whose empty ones hide them."""
    for name in EVENTS:
        kinds = [kind for kind in type(owner).__mro__ if name in vars(kind)]
        hidden = [kind for kind in kinds if not is_silent(vars(kind)[name])]
        if hidden and hidden[0] is not kinds[0] and not hidden[0].__module__.startswith("helios."):
            _LOGGER.warning(
                "%s.%s is never called: write %s first among the bases of %s.",
                hidden[0].__name__,
                name,
                hidden[0].__name__,
                type(owner).__name__,
            )


def own_methods(owner: object) -> Iterator[str]:
    """Yield the methods that a user has written, on the object and in its classes."""
    kinds = [kind for kind in type(owner).__mro__ if kind is not object]
    rooms = {kind: kind.__module__.partition(".")[0] for kind in kinds}
    known = {name for kind in kinds if rooms[kind] in ("helios", "torch") for name in vars(kind)}
    written = [vars(kind) for kind in kinds if rooms[kind] not in ("helios", "torch")]
    for methods in (vars(owner), *written):
        for name, method in methods.items():
            if inspect.isroutine(method) and name not in known:
                yield name


def _describe_unknown(name: str) -> str:
    """Return what to do about a method that is never called; empty if it is intended."""
    if name in EVENTS:
        return ""
    if name in _OF_OTHER_TRAINERS:
        return f"; use {_OF_OTHER_TRAINERS[name]} instead."
    looks_like_hook = name.startswith(("on_", "process_"))
    close = difflib.get_close_matches(name, EVENTS, n=1, cutoff=0.75)
    if close and (looks_like_hook or name.endswith("_step")):
        return f": it is neither a hook nor a step; did you mean {close[0]}?"
    own = ": it is not a hook. If it is your own helper, begin its name with an underscore."
    return own if looks_like_hook else ""


def check_batch_processor(model: Model, *, is_inference: bool = False) -> None:
    """Check, after a model's setup, that its training step is defined once.

    Args:
        model: the model.
        is_inference: whether nothing is trained, so that no step is needed.

    Raises:
        ArgumentError: if it sets a batch processor and overrides ``train_step`` too, or does
            neither.
        UsageError: if the processor's ``__init__`` does not call that of its base.
    """
    kind = type(model)
    if model.batch_processor is None:
        function = getattr(model.train_step, "__func__", None)
        if function is Model.train_step and not is_inference:
            raise ArgumentError(
                f"{kind.__name__} must override train_step, or set batch_processor, to be trained; "
                "got neither, so no weight would ever change. Write train_step(self, batch)."
            )
        return
    if not isinstance(model.batch_processor, BatchProcessor):
        raise ArgumentError(
            f"{kind.__name__}.batch_processor must be None or a BatchProcessor, got "
            f"{model.batch_processor!r}. Wrap a function with BatchProcessor.from_callable."
        )
    model.batch_processor._check()
    if kind.train_step is not Model.train_step:
        raise ArgumentError(
            f"{kind.__name__} must define its training step once, but sets batch_processor and "
            "overrides train_step. Remove one of them."
        )


def note_own_log(model: Model) -> None:
    """Log that a model has something of its own in the place of ``Model.log``, which counts."""
    if "log" in vars(model) or type(model).log is not Model.log:
        _LOGGER.info(
            "%s overrides log, so self.log does not log means of steps. Rename it to use "
            "Model.log.",
            type(model).__name__,
        )


class PluginTable(UserDict[str, Plugin]):
    """Plugins by id, in order of registration; fixed while a run uses them."""

    def __init__(self) -> None:
        self._is_in_use = False
        super().__init__()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the table as used by a run."""
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False

    def __setitem__(self, name: str, plugin: Plugin) -> None:
        """Register a plugin under its id.

        Raises:
            DuplicateError: if the id is taken, or differs from ``plug_id`` (a ``KeyError``).
            ArgumentTypeError: for something that is not a plugin, and for a method whose parameters
                are not those of its event.
            ArgumentError: if another plugin overrides the same ``process_*_batch``, or if it
                overrides only one of ``state_dict`` and ``load_state_dict``.
            UsageError: while a run uses the table: it would not be set up and receive no events.
        """
        self._refuse_in_use(name)
        if not isinstance(plugin, Plugin):
            raise ArgumentTypeError(
                f"Trainer.plugins[{name!r}] must be a Plugin object, got {plugin!r}. Derive it "
                "from helios.plugins.Plugin."
            )
        if name != plugin.plug_id:
            raise DuplicateError(
                f"A plugin must be registered under its own id {plugin.plug_id!r}, got {name!r}."
            )
        if name in self.data:
            raise DuplicateError(
                f"A plugin must have a unique id, but {name!r} is registered already. Pass "
                "another plug_id."
            )
        # Plugins of helios-ml store information for readers of the checkpoint by state_dict alone.
        check_state_methods(
            plugin, Plugin, remedy="Without them nothing of it is saved. Add it.", may_show=True
        )
        check_receiver(plugin)
        check_owners([*self.data.values(), plugin])
        self.data[name] = plugin

    def __delitem__(self, name: str) -> None:
        """Remove a plugin.

        Raises:
            UsageError: while a run uses the table.
        """
        self._refuse_in_use(name)
        super().__delitem__(name)

    def _refuse_in_use(self, name: str) -> None:
        if self._is_in_use:
            raise UsageError(
                f"Trainer.plugins[{name!r}] must be set or removed between runs, but a call of "
                "the trainer is running. Register plugins before fit."
            )

    def __ior__(self, other: Any) -> PluginTable:  # type: ignore[override, misc]
        """Register the plugins of another table: the built-in operator would bypass the checks."""
        self.update(other)
        return self


class Roots:
    """The root loops.

    Attributes:
        fit: the loop over all epochs.
        evaluations: the evaluation loops, by phase.
    """

    def __init__(self) -> None:
        self.fit = FitLoop(EpochLoop(BatchLoop(OptimizerLoop()), ValidationLoop()))
        self.evaluations: dict[Phase, EvaluationLoop] = {
            Phase.VALIDATION: ValidationLoop(),
            Phase.TESTING: TestingLoop(),
            Phase.PREDICTION: PredictionLoop(),
        }

    def replace_fit(self, loop: FitLoop) -> None:
        """Replace the fit loop; the new one adopts the loops below the old one.

        Raises:
            ArgumentTypeError: for something that is not a fit loop.
        """
        if not isinstance(loop, FitLoop):
            raise ArgumentTypeError(
                f"Trainer.fit_loop must be a FitLoop, got {loop!r}. Derive it "
                "from FitLoop; loops below it are replaced by connect(...)."
            )
        loop._adopt(self.fit)
        self.fit = loop


class EvaluationRoot:
    """Descriptor of a trainer's attribute that holds an evaluation loop.

    Args:
        phase: the phase of the loop.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __get__(self, trainer: Any, kind: type | None = None) -> EvaluationLoop:
        found: EvaluationLoop = trainer.roots.evaluations[self._phase]
        return found

    def __set__(self, trainer: Any, loop: EvaluationLoop) -> None:
        """Replace the loop.

        Raises:
            ArgumentTypeError: for something that is not an evaluation loop of the phase.
        """
        if not isinstance(loop, EvaluationLoop) or loop.phase is not self._phase:
            raise ArgumentTypeError(
                f"The loop for {self._phase.value} must be an EvaluationLoop whose phase is "
                f"{self._phase}, got {loop!r}."
            )
        trainer.roots.evaluations[self._phase] = loop
