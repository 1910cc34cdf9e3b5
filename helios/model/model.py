"""``Model``, the class that users subclass: networks, optimizers and the steps that use them.

``setup`` builds plain attributes, and Helios discovers which of them are state. Every method is an
event or a step that a loop calls; base methods that do nothing are marked, and cost nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from helios.core.loss_means import RunningSums, WeightedLoss
from helios.core.registry import Registry
from helios.core.step_log import StepLog
from helios.counters import Phase, TrainingState
from helios.engines.device import move_to_device
from helios.engines.engine import Engine
from helios.errors import ArgumentError, StateError, UsageError
from helios.hooks.context import Context
from helios.hooks.events import Hooks, asks_nothing, may_omit
from helios.model.processor import BatchProcessor, Processed
from helios.sharding.units import Unit
from helios.state.discovery import Discovery
from helios.state.owners import internals_of

if TYPE_CHECKING:
    from helios import Trainer

MODEL_REGISTRY = Registry("model")

TABLES = ("_loss_items", "_val_scores", "_running_losses", "_test_scores")


def create_model(type_name: str, *args: Any, **kwargs: Any) -> Model:
    """Create a model of the registry.

    Raises:
        KeyError: if no model of that name is registered.
    """
    model: Model = MODEL_REGISTRY.get(type_name)(*args, **kwargs)
    return model


def find_pretrained_file(root: Path, name: str) -> Path:
    """Return the first ``.pth`` file of a folder whose stem contains ``<folder>_<name>_``.

    Raises:
        UsageError: if there is none (a ``RuntimeError``).
    """
    part = f"{root.stem}_{name}_"
    for path in sorted(root.glob("*.pth")):
        if part in path.stem:
            return path
    raise UsageError(f"No .pth file in {root} has {part!r} in its name. Check the folder.")


def is_own(model: Model, name: str) -> bool:
    """Return whether a method is that of the user's class."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(Model, name)


_AROUND_VALID_STEP = ("on_validation_start", "on_validation_batch_start", "on_validation_end")


def find_test_step(model: Model) -> str:
    """Return the name of the step that tests a model; empty if it has none.

    A test does not call the model's validation events, on which its ``valid_step`` may rely.
    """
    if model.batch_processor is not None or is_own(model, "test_step"):
        return "test_step"
    is_prepared = any(is_own(model, name) for name in _AROUND_VALID_STEP)
    return "valid_step" if is_own(model, "valid_step") and not is_prepared else ""


class Model(Hooks, ABC):
    """Base of all models.

    Attributes:
        unsaved: names of attributes that training changes and that need not be saved.
        unscored: names of validation scores that differ between equal runs, such as measured times;
            comparisons of runs leave them out.
        is_distributed: whether several processes train.
        map_loc: location that weights of a checkpoint are mapped to.
        device: device of the run, which a trainer sets before ``setup``.
        engine: the engine, for manual mode: backward, the update, wrapping; set like ``device``.
        trainer: the trainer that runs the model; set like ``device``.
        global_rank: rank of this process among all, from 0.
        batch_processor: a :class:`BatchProcessor` that replaces the steps; ``None`` for none.
        scheduler_interval: when schedulers step in automatic mode, ``{name: "step" | "epoch" |
            "validation:<metric>"}``; default ``"step"``.
        train_mode: which networks a run puts into training mode when it begins, after ``setup``.
            ``None``: those that an optimizer updates and that are in evaluation mode as a whole,
            with a warning. ``"all"``: every one. ``"keep"``: none. Validations restore the modes.

    Args:
        save_name: name of the run's folder, and of its checkpoints if the trainer has no run name;
            by default that of the class, in lower case.
    """

    _internals: ClassVar[str] = (
        "_loss_items _val_scores _running_sums _test_scores _save_name is_distributed map_loc "
        "device engine trainer _discovery _modes_before_eval _run_context unsaved unscored "
        "global_rank rank scheduler_interval train_mode loads_after_setup _step_log"
    )

    unsaved: tuple[str, ...] = ()
    unscored: tuple[str, ...] = ()
    batch_processor: BatchProcessor | None = None
    scheduler_interval: Mapping[str, str] = {}
    train_mode: Literal["all", "keep"] | None = None
    device: torch.device
    engine: Engine
    _run_context: Context | None = None
    _step_log: StepLog | None = None
    if TYPE_CHECKING:  # Where annotations are evaluated, the trainer is not known.
        trainer: Trainer

    def __init__(self, save_name: str | None = None) -> None:
        if save_name is None:
            save_name = type(self).__name__.lower()
        is_name = isinstance(save_name, str) and save_name not in ("", ".", "..")
        if not is_name or any(mark in save_name for mark in "/\\\0"):
            raise ArgumentError(
                "Model(save_name=...) must be a non-empty string without path separators (it names "
                f"a folder), got {save_name!r}."
            )
        self._save_name = save_name
        self.is_distributed = False
        self.map_loc: str | dict[str, str] = ""
        self.global_rank = self.rank = 0
        self._loss_items: dict[str, Any] = {}
        self._running_losses = {}
        self._val_scores: dict[str, Any] = {}
        self._test_scores: dict[str, Any] = {}
        self.loads_after_setup: list[tuple[str, Callable[..., None]]] | None = None
        self._modes_before_eval: list[tuple[torch.nn.Module, bool]] = []
        self._discovery = Discovery(self, exclude=internals_of(self), unsaved=self.unsaved)

    @property
    def context(self) -> Context:
        """The run as hooks see it, as in plugins: counters, phase, and ``context.log``.

        In ``setup`` it only has ``num_steps`` and ``steps_per_epoch``.

        Raises:
            UsageError: outside a run, and between ``setup`` and the first event.
        """
        if self._run_context is None:
            raise UsageError(
                f"{type(self).__name__} has no context here: it belongs to a run. Use it in steps "
                "and events, such as train_step or on_fit_start; in setup() it only has num_steps "
                "and steps_per_epoch. To call setup() yourself, don't use it there."
            )
        return self._run_context

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self.rank

    @property
    def save_name(self) -> str:
        """Name of the run's folder under ``chkpt_root``."""
        return self._save_name

    @property
    def loss_items(self) -> dict[str, Any]:
        """The losses of the current batch, by name; a step adds those that it wants logged."""
        return self._loss_items

    @property
    def val_scores(self) -> dict[str, Any]:
        """The scores of the current or last validation, by name; steps and hooks add to them."""
        return self._val_scores

    @property
    def _running_losses(self) -> dict[str, Any]:
        """The sums of the losses since the last validation, by name."""
        return self._running_sums.table()

    @_running_losses.setter
    def _running_losses(self, table: dict[str, Any]) -> None:
        self._running_sums = RunningSums(table)

    @property
    def test_scores(self) -> dict[str, Any]:
        """The scores of the last test."""
        return self._test_scores

    @property
    def metrics(self) -> dict[str, Any]:
        """Same as :attr:`val_scores`; plain numbers among them are written to the sidecar."""
        return self._val_scores

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables of losses and scores, by attribute name; the trainer always saves them."""
        return {name: getattr(self, name) for name in TABLES}

    @property
    def discovery(self) -> Discovery:
        """Finds which of the model's attributes are state."""
        return self._discovery

    @abstractmethod
    @may_omit
    def setup(self, fast_init: bool = False) -> None:
        """Build networks, optimizers and schedulers as plain attributes.

        Args:
            fast_init: True for an evaluation: then only what its hooks need must be built. An
                override may leave this argument out.
        """

    def log(self, name: str, value: float | Tensor, weight: float | None = None) -> None:
        """Log a mean, in ``train_step``, ``valid_step`` or ``test_step``.

        In training it is logged under its name, like the losses: as the mean since the last log,
        over batches and replicas. In a validation or a test it is one of the scores. Means are sums
        of values times weights, divided by the sum of the weights, in float64. It affects neither
        gradients nor the ledger, and does not wait for the device.

        Args:
            name: its name, unlike those of losses and of other numbers that the step returns.
            value: a number, or a tensor of one element; the mean over the batch.
            weight: how many items it is the mean of; ``None`` for the samples of the batch.

        Raises:
            UsageError: outside of these steps, where ``self.context.log`` logs a number.
            ArgumentError: without a weight, if the number of samples in the batch is unknown.
            ArgumentTypeError: for a value that is not a number.
        """
        if self._step_log is None:
            raise UsageError(
                f"self.log({name!r}, ...) must be called in train_step, valid_step or test_step. "
                "Elsewhere, self.context.log({name: number}) logs a number at once."
            )
        self._step_log.add(name, value, weight)

    def shard(self) -> Sequence[nn.Module | Unit] | None:
        """Return the units of ``Trainer(sharding="full")``: modules that are gathered one by one.

        The parameters of a unit are gathered only while its forward or backward runs. Everything
        else is in the unit of its network. ``None``, the default, means the children and the
        members of ``ModuleList`` that have at least 2**20 elements. All replicas must call the same
        units in the same order. ``Unit(module, checkpoint=True)`` also recomputes its activations
        in backward, even with ``sharding="none"``.
        """
        return None

    def init_unit(self, module: nn.Module, name: str) -> bool | None:
        """Initialize a module, with ``Trainer(init="keyed")`` only.

        Called for each module after its children, without gradients, with random numbers seeded by
        its name. It must not use other units.

        Args:
            module: the module, whose own parameters and buffers have no values yet.
            name: its path from the model, e.g. ``"net.layers.0.attention"``.

        Returns:
            True if all of the module's own parameters and buffers are written, which is checked;
            otherwise its ``reset_parameters`` or ``_reset_parameters`` is called.
        """
        return None

    def load_for_testing(self) -> None:
        """Load weights for an evaluation when there is no checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; by default everything that Helios discovers.

        Outside a run it holds networks, optimizers and the like, but no plain values: these are
        found by comparing with the results of setup(). A model without any of these has the state
        ``{}``.

        Override both this and :meth:`load_state_dict`, or neither.
        """
        return self._discovery.capture()

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            state_dict: the state, on the CPU; loading copies it to the devices of the parameters.
            fast_init: for an evaluation: state that ``setup`` has not built is not an error.

        Raises:
            StateError: for a state from an overridden ``state_dict``, or one that does not match
                the current attributes.
        """
        if "objects" not in state_dict:
            found = ", ".join(map(repr, state_dict)) or "nothing"
            raise StateError(
                f"{type(self).__name__} does not override load_state_dict, but this state was made "
                f"by a model that overrides state_dict, as in helios-ml: it holds {found}. Define "
                "both methods of that model (helios-ml 2: user_state_dict, load_user_state_dict)."
            )
        self._discovery.restore(state_dict, is_inference=fast_init)

    def trained_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the trained model for later use; never called by the trainer."""
        return {}

    def types_for_safe_load(self) -> list[Any]:
        """Return your own types that a checkpoint may hold."""
        return []

    def append_metadata_to_chkpt_name(self, chkpt_name: str) -> str:
        """Return a suffix for a checkpoint's name, or the whole name with the suffix."""
        return chkpt_name

    def append_to_banner(self, banner: str) -> str:
        """Return the banner that is logged at the start, with additions."""
        return banner

    def _process(
        self, batch: Any, *, is_evaluating: bool, reads_loss: bool = True
    ) -> Processed | None:
        processor = self.batch_processor
        if processor is None:
            return None
        return processor._process(self, batch, is_evaluating=is_evaluating, reads_loss=reads_loss)

    def batch_to_device(self, batch: Any, phase: Phase) -> Any:
        """Return a batch with its tensors on the device.

        Descends into dicts, lists, tuples, named tuples and dataclasses.
        """
        return move_to_device(batch, self.device)

    def train(self) -> None:
        """Restore the mode of every network and its modules that :meth:`eval` has changed."""
        for module, is_training in self._modes_before_eval:
            module.training = is_training
        self._modes_before_eval = []

    def eval(self) -> None:
        """Set every discovered network to evaluation mode."""
        networks = self._discovery.modules().values()
        if not self._modes_before_eval:
            self._modes_before_eval = [
                (part, part.training) for net in networks for part in net.modules()
            ]
        for network in networks:
            network.eval()

    def on_training_batch_start(self, state: TrainingState) -> None:
        """Clear the table of losses."""
        self._loss_items.clear()

    @may_omit
    def train_step(
        self, batch: Any, state: TrainingState
    ) -> Tensor | WeightedLoss | dict[str, Any] | Processed | Iterator[Any] | None:
        """Train on one batch; by default with :attr:`batch_processor`.

        Args:
            batch: the batch, on the device.
            state: the counters of the run. An override may leave this argument out.

        Returns:
            A scalar loss, a :class:`WeightedLoss`, such as a sum over tokens, or a dict with one of
            them under ``"loss"``: Helios runs backward and steps the optimizers and their
            schedulers. Or a generator that yields one loss for each optimizer, or each with its
            optimizer: ``yield loss, self.optimizer``. ``None`` if the model does all that itself.
        """
        return self._process(batch, is_evaluating=False)

    def backward(self, losses: Mapping[str, Tensor]) -> None:
        """Compute the gradients of a micro-batch, in automatic mode; by default those of the loss.

        Override it to combine the gradients of several losses, for example by projection:
        ``train_step`` then returns a dict of losses. When it is called, every ``.grad`` is
        ``None``; the gradients at its end are added to those of earlier micro-batches of the
        window, averaged, and used in one update. In fp16 they are scaled. For each loss call
        ``self.engine.backward_loss(loss, retain_graph=True)``.

        Args:
            losses: the losses that ``train_step`` returned, by name: ``losses["loss"]`` if it was
                not a dict, and of a :class:`WeightedLoss` the sum.
        """
        self.engine.backward_loss(losses["loss"])

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        """Add the losses to the running losses, in float64 and on their device."""
        self._running_sums.add(self._loss_items)

    def on_validation_start(self, validation_cycle: int) -> None:
        """Clear the validation scores; cycles count from 0."""
        self._val_scores.clear()

    @may_omit
    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]] | Processed | None:
        """Validate one batch, without gradients; by default with :attr:`batch_processor`.

        If there are several loaders, a step that also takes ``dataloader_idx`` gets their number.

        Args:
            batch: the batch, on the device.
            step: number of the batch in its loader. An override may leave this argument out.

        Returns:
            ``None``, or ``{name: (sum, weight)}``: the ratio of the totals is in the scores before
            :meth:`on_validation_end`, under ``<name>/<loader>`` with several loaders.
        """
        return self._process(batch, is_evaluating=True)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Clear the running losses."""
        self._running_losses.clear()

    def have_metrics_improved(self) -> bool:
        """Return whether the last validation was better than earlier ones; called after each."""
        return True

    def on_testing_start(self) -> None:
        """Clear the test scores."""
        self._test_scores.clear()

    @may_omit
    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]] | Processed | None:
        """Test one batch, without gradients; returns as :meth:`valid_step` does.

        By default, a model with a ``valid_step`` is tested with that.
        """
        return self._process(batch, is_evaluating=True)

    @may_omit
    def predict_step(self, batch: Any, step: int) -> Any:
        """Return the prediction for one batch, without gradients.

        By default, the outputs of :attr:`batch_processor`.

        Raises:
            UsageError: without a processor.
        """
        processed = self._process(batch, is_evaluating=True, reads_loss=False)
        if processed is not None:
            return processed.outputs
        raise UsageError(
            f"{type(self).__name__}.predict_step(batch, step) must be defined for Trainer.predict."
        )
