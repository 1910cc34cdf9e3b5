"""Accumulates metrics over batches: any object with update, compute, reset and a state.

A metric's state is in the checkpoint, so a run that goes on inside an epoch gives the value of an
undisturbed one. torchmetrics is served, and not needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from helios.core import rng
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.context import Context
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.protocols import Stateful
from helios.state import Phase, TrainingState

_LOGGER = logging.getLogger(__name__)
_PREFIXES = {Phase.TRAINING: "train", Phase.VALIDATION: "valid", Phase.TESTING: "test"}
_METHODS = "update, compute, reset, state_dict and load_state_dict"


@runtime_checkable
class Metric(Stateful, Protocol):
    """A measure that is accumulated over batches."""

    def update(self, *args: Any) -> Any:
        """Take in a batch."""
        ...

    def compute(self) -> Any:
        """Return the value over all that was taken in."""
        ...

    def reset(self) -> Any:
        """Forget all that was taken in."""
        ...


@runtime_checkable
class _Persistent(Protocol):
    """What leaves its state out of its ``state_dict`` until it is told otherwise."""

    def persistent(self, mode: bool) -> Any: ...


class _Holder:
    """One metric, and what of it is state.

    A metric that is a module may hold counters beside its state, such as the number of its updates:
    numbers among the attributes that differ from those of a metric without data are saved, too.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        metric.reset()
        for part in self._parts().values():
            if isinstance(part, _Persistent):
                part.persistent(True)
        self._fresh = self._numbers()

    def _parts(self) -> dict[str, nn.Module]:
        return dict(self.metric.named_modules()) if isinstance(self.metric, nn.Module) else {}

    def _numbers(self) -> dict[str, float]:
        return {
            f"{path}.{name}": value
            for path, part in self._parts().items()
            for name, value in vars(part).items()
            if type(value) in (int, float)
        }

    def move(self, device: torch.device) -> None:
        """Move a metric that is a module to the device of its inputs."""
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)

    def capture(self) -> dict[str, Any]:
        """Return the state."""
        numbers = self._numbers()
        return {
            "state": dict(self.metric.state_dict()),
            "numbers": {
                name: value for name, value in numbers.items() if value != self._fresh.get(name)
            },
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take the state back."""
        self.metric.load_state_dict(dict(saved["state"]))
        present, parts = self._numbers(), self._parts()
        for name, value in (self._fresh | saved["numbers"]).items():
            if present.get(name) != value:
                path, _, attribute = name.rpartition(".")
                setattr(parts[path], attribute, value)


@PLUGIN_REGISTRY.register
class Metrics(Plugin):
    """Update metrics after every batch of a phase, and log their values.

    They are logged as ``train/<name>``, ``valid/<name>`` or ``test/<name>``. Values of validations
    and tests also stand in ``model.metrics`` and ``model.test_scores``, as ``<name>``, before the
    model hears that the pass has ended. A value that is a dict or a vector is spread:
    ``<name>/<key>``, ``<name>/<index>``; one of another shape stands in the table only.

    Args:
        metrics: the metrics by name; the plugin resets, updates and saves them. A module dict, such
            as torchmetrics' ``MetricCollection``, is taken apart, each member for itself.
        inputs: takes the context, at the end of a batch, and returns the tuple of arguments for
            ``update``.
        phase: what is measured.
        every: ``"epoch"`` for a value an epoch or pass; in training also a number of optimizer
            steps.
        plug_id: the plugin's name; ``"metrics-<phase>"`` if left out.

    Raises:
        ArgumentError: for a value that breaks a rule.
        ArgumentTypeError: for something that is no metric, or no function.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        inputs: Callable[[Context], tuple[Any, ...]],
        phase: Phase = Phase.VALIDATION,
        every: int | str = "epoch",
        plug_id: str | None = None,
    ) -> None:
        if phase not in _PREFIXES:
            raise ArgumentError(
                f"Metrics(phase=...) must be Phase.TRAINING, VALIDATION or TESTING, got {phase!r}. "
                "Predictions are returned by trainer.predict: measure them there."
            )
        super().__init__(f"metrics-{phase.value}" if plug_id is None else plug_id)
        if not callable(inputs):
            raise ArgumentTypeError(
                f"Metrics(inputs=...) must be a function of the context, got {inputs!r}. Pass e.g. "
                'lambda context: (context.model_outputs["logits"], context.batch[1]).'
            )
        self._holders = {name: _Holder(metric) for name, metric in _take_apart(metrics).items()}
        self._inputs = inputs
        self._phase = phase
        self._every = _check_every(every, phase)
        self._num_updates = 0
        self._written: list[str] = []
        self._warned: set[str] = set()

    def setup(self) -> None:
        """Begin without data, on the device."""
        self._reset()
        for holder in self._holders.values():
            holder.move(self.device)

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Begin an epoch without data, if values are those of epochs."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._reset()

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Take in a training batch."""
        self._update(Phase.TRAINING)

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Log the values every so many steps."""
        if self._every is not None and committed and (state.global_step + 1) % self._every == 0:
            self._conclude_training()

    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Log the values of the epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._conclude_training()

    def on_validation_start(self, validation_cycle: int) -> None:
        """Begin a validation without data."""
        self._begin_pass(Phase.VALIDATION)

    def on_validation_batch_end(self, step: int) -> None:
        """Take in a validation batch."""
        self._update(Phase.VALIDATION)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Put the values into ``model.metrics``; the training logs what stands there."""
        if self._phase is Phase.VALIDATION:
            self._write()

    def on_testing_start(self) -> None:
        """Begin a test without data."""
        self._begin_pass(Phase.TESTING)

    def on_testing_batch_end(self, step: int) -> None:
        """Take in a test batch."""
        self._update(Phase.TESTING)

    def on_testing_end(self) -> None:
        """Put the values into ``model.test_scores``, and log them."""
        if self._phase is Phase.TESTING:
            self._log(self._write())

    def _begin_pass(self, phase: Phase) -> None:
        if phase is self._phase:
            self._reset()
            # A model that keeps its scores from pass to pass finds none of ours.
            for name in self._written:
                self._table.pop(name, None)
            self._written = []

    @property
    def _table(self) -> dict[str, Any]:
        model = self.context.model
        table: dict[str, Any] = model.test_scores if self._phase is Phase.TESTING else model.metrics
        return table

    def _reset(self) -> None:
        for holder in self._holders.values():
            holder.metric.reset()
        self._num_updates = 0

    def _update(self, phase: Phase) -> None:
        if phase is not self._phase:
            return
        with _aside():
            arguments = self._inputs(self.context)
            if not isinstance(arguments, tuple):
                raise UsageError(
                    f"Metrics(inputs=...) must return the tuple of arguments for update, got "
                    f"{type(arguments).__name__}. Return e.g. (predictions, targets)."
                )
            # A metric that keeps its inputs would keep the graph that they hang in.
            plain = [item.detach() if isinstance(item, Tensor) else item for item in arguments]
            for holder in self._holders.values():
                holder.metric.update(*plain)
        self._num_updates += 1

    def _compute(self) -> dict[str, Any]:
        """Return the values over all that was taken in, and forget it."""
        values: dict[str, Any] = {}
        if self._num_updates:
            with _aside():
                for name, holder in self._holders.items():
                    values |= _spread(name, holder.metric.compute())
        self._reset()
        return values

    def _conclude_training(self) -> None:
        values = self._compute()
        for name, value in values.items():
            if not isinstance(value, float):
                self._warn(name, "is no number, and is not logged. Log what you need of it")
            elif name in self.context.model.loss_items:
                self._warn(name, "has the name of a loss, and both are logged. Rename one of them")
        self._log(values)

    def _write(self) -> dict[str, Any]:
        values, table = self._compute(), self._table
        for name in values:
            if name in table:
                self._warn(name, "replaces a score of the model. Rename one of them")
        table.update(values)
        self._written = list(values)
        return values

    def _log(self, values: Mapping[str, Any]) -> None:
        numbers = {
            f"{_PREFIXES[self._phase]}/{name}": value
            for name, value in values.items()
            if isinstance(value, float)
        }
        if numbers:
            self.context.log(numbers)

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _LOGGER.warning("The %s metric %r %s.", self._phase.value, name, text)

    def state_dict(self) -> dict[str, Any]:
        """Return what the metrics have accumulated."""
        return {
            "num_updates": self._num_updates,
            "metrics": {name: holder.capture() for name, holder in self._holders.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; warns of metrics that are new or gone while there is data."""
        saved = state_dict["metrics"]
        self._num_updates = state_dict["num_updates"]
        different = sorted(saved.keys() ^ self._holders.keys())
        if different and self._num_updates:
            _LOGGER.warning(
                "The checkpoint and the plugin %r hold different metrics: %s. What is new covers "
                "only the rest of the present epoch; what is gone is dropped.",
                self.plug_id,
                ", ".join(different),
            )
        for name in saved.keys() & self._holders.keys():
            self._holders[name].restore(saved[name])
            self._holders[name].move(self.device)


@contextmanager
def _aside() -> Iterator[None]:
    """Run a block without gradients, and without a trace in the random numbers."""
    found = rng.get_rng_state_dict()
    try:
        with torch.no_grad():
            yield
    finally:
        rng.load_rng_state_dict(found)


def _spread(name: str, value: Any) -> dict[str, Any]:
    """Return a value as numbers by name, as far as it is made of them."""
    if isinstance(value, Mapping):
        parts = [_spread(f"{name}/{key}", part) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.numel() == 1:
            return {name: float(value)}
        if value.ndim == 1:
            return {
                f"{name}/{index}": number for index, number in enumerate(value.double().tolist())
            }
        return {name: value}
    return {name: float(value) if isinstance(value, int | float) else value}


def _take_apart(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name, members of module dicts each for itself.

    Some collections find out in their first update which members may share a state. A run that goes
    on inside an epoch would find out something else.
    """
    if not isinstance(metrics, Mapping | nn.ModuleDict) or not metrics:
        raise ArgumentError(
            f"Metrics(metrics=...) must be a dict of at least one metric, got {metrics!r}. Pass "
            'e.g. {"accuracy": Accuracy(task="multiclass", num_classes=10)}.'
        )
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            found |= {f"{name}/{key}": part for key, part in metric.items()}
        else:
            found[name] = metric
    for name, metric in found.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            raise ArgumentTypeError(
                f"Metrics(metrics=...) must map names to objects with {_METHODS}, got "
                f"{name!r}: {type(metric).__name__}. Give it the methods that are missing."
            )
    if len({id(metric) for metric in found.values()}) < len(found):
        raise ArgumentError(
            f"Metrics(metrics=...) must hold each metric once, got one twice among {list(found)}. "
            "Pass a copy: it would be updated twice."
        )
    return found


def _check_every(every: object, phase: Phase) -> int | None:
    if every == "epoch":
        return None
    if type(every) is not int or every < 1:
        raise ArgumentError(
            f'Metrics(every=...) must be "epoch" or a positive number of steps, got {every!r}. '
            'Pass e.g. "epoch".'
        )
    if phase is not Phase.TRAINING:
        raise ArgumentError(
            f'Metrics(every=...) must be "epoch" with {phase}, got {every!r}: a pass has one value.'
            " Leave it out."
        )
    return every
