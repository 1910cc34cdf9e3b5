"""``Metrics``: accumulate metrics over batches, and log their values.

Any object with update, compute, reset and a state is a metric, as those of torchmetrics are. Its
state is in the checkpoint, so a run that resumes inside an epoch gives the same value.

With several replicas, what has ``merge_state`` is measured in each replica, and merged in their
order. What cannot be merged is one object, which gets the batches of all replicas in their order.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from helios.core import rng
from helios.core.memory import same
from helios.counters import Phase, TrainingState
from helios.engines.device import move_to_device
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.context import Context
from helios.hooks.events import asks_nothing
from helios.hooks.per_replica import PerReplica
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.protocols import Stateful

__all__ = ["Metric", "Metrics"]

_LOGGER = logging.getLogger(__name__)
_PREFIXES = {Phase.TRAINING: "train", Phase.VALIDATION: "valid", Phase.TESTING: "test"}

_CPU = torch.device("cpu")


@runtime_checkable
class Metric(Stateful, Protocol):
    """A metric that accumulates over batches."""

    def update(self, *args: Any) -> Any:
        """Add a batch."""
        ...

    def compute(self) -> Any:
        """Return the value over all data since the last reset."""
        ...

    def reset(self) -> Any:
        """Discard all data."""
        ...


@PLUGIN_REGISTRY.register
class Metrics(Plugin):
    """Update metrics after every batch of a phase, and log their values.

    They are logged as ``train/<name>``, ``valid/<name>`` or ``test/<name>``. Values of validations
    and tests are also in ``model.metrics`` and ``model.test_scores``, as ``<name>``, before the
    model's end event. A value that is a dict or a vector is split into ``<name>/<key>`` or
    ``<name>/<index>``; one of another shape is only in the table.

    Args:
        metrics: the metrics by name; the plugin resets, updates and saves them. A module dict, such
            as torchmetrics' ``MetricCollection``, is split into its members. With several replicas
            each has copies of those with ``merge_state``; any other one gets the batches of all
            replicas, in their order.
        inputs: takes the context, at the end of each forward, and returns the tuple of arguments
            for ``update``. If a batch has several forwards, the last one counts.
        phase: the phase to measure.
        every: ``"epoch"`` for one value per epoch or pass; in training also a number of optimizer
            steps.
        plug_id: unique id of the plugin; ``"metrics-<phase>"`` by default.

    Raises:
        ArgumentError: if a value is invalid.
        ArgumentTypeError: for something that is not a metric, or not a function.
    """

    _internals: ClassVar[str] = "_arguments _every _inputs _metrics _parts _phase _waiting _whole"

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
                f"Metrics(inputs=...) must be a function of the context, got {inputs!r}. Let it "
                'return e.g. (context.model_outputs["logits"], context.batch[1]).'
            )
        self._metrics = _take_apart(metrics)
        self._inputs = inputs
        self._phase = phase
        self._every = _check_every(every, phase)
        self.setup()

    def setup(self) -> None:
        """Forget an earlier run."""
        self._whole = _MetricSet({}, self.device)
        self._parts: PerReplica[_MetricSet] | None = None

    def on_fit_start(self) -> None:
        """Find out before training which metrics several replicas can measure."""
        self._get_ready()

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Reset the metrics, if values are per epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._reset()

    def on_forward_end(self, context: Context) -> None:
        """Keep what the metrics need of a replica."""
        if context.phase is self._phase:
            with torch.no_grad():
                self._arguments[context.replica] = self._find_arguments()

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Update with a training batch."""
        self._end_batch(Phase.TRAINING, state.global_iteration)

    @asks_nothing
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Log the values every ``every`` steps."""
        if self._every is not None and committed and (state.global_step + 1) % self._every == 0:
            self._log(self._compute())

    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Log the values of the epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._log(self._compute())

    def on_validation_start(self, validation_cycle: int) -> None:
        """Reset the metrics for a validation."""
        self._begin_pass(Phase.VALIDATION)

    def on_validation_batch_end(self, step: int, dataloader_idx: int = 0) -> None:
        """Update with a validation batch."""
        self._end_batch(Phase.VALIDATION, dataloader_idx, step)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Put the values into ``model.metrics``; training logs what is there."""
        if self._phase is Phase.VALIDATION:
            values = self._compute()
            self.context.model.metrics.update(values)
            self.context.declare_summed(values)

    def on_testing_start(self) -> None:
        """Reset the metrics for a test."""
        self._begin_pass(Phase.TESTING)

    def on_testing_batch_end(self, step: int, dataloader_idx: int = 0) -> None:
        """Update with a test batch."""
        self._end_batch(Phase.TESTING, dataloader_idx, step)

    def on_testing_end(self) -> None:
        """Put the values into ``model.test_scores``, and log them."""
        if self._phase is Phase.TESTING:
            values = self._compute()
            self.context.model.test_scores.update(values)
            self._log(values)

    def on_fit_end(self) -> None:
        """Release what no checkpoint needs any more."""
        self.setup()

    def teardown(self) -> None:
        """Release the copies of the replicas."""
        self.setup()

    def _begin_pass(self, phase: Phase) -> None:
        if phase is self._phase:
            self._get_ready()
            self._reset()

    def _get_ready(self) -> PerReplica[_MetricSet]:
        """Start without data; with several replicas, each has copies of what can be merged."""
        if self._parts is not None:
            return self._parts
        is_shared = self.context.choose(False, True)
        with _apart():
            merged = {n: x for n, x in self._metrics.items() if is_shared and _can_merge(x)}
            lone = {n: x for n, x in self._metrics.items() if n not in merged}
            self._whole = _MetricSet(lone, self.device)
            self._parts = self.context.per_replica(
                lambda: _MetricSet(copy.deepcopy(merged), self.device),
                lambda earlier, later: later.merge_before(earlier),
            )
        self._reset()
        return self._parts

    def _reset(self) -> None:
        for part in (self._whole, *self._get_ready().local.values()):
            part.reset()
        self._arguments: dict[int, list[Any] | None] = {}
        self._waiting: list[tuple[tuple[int, ...], list[Any]]] = []

    def _end_batch(self, phase: Phase, *place: int) -> None:
        """Update with the batches of the replicas of this process, in their order.

        Args:
            phase: the phase of the batch.
            place: the numbers of the batch.
        """
        if phase is not self._phase:
            return
        found, self._arguments = self._arguments, {}
        is_alone = self.context.num_processes == 1
        for replica, arguments in found.items():
            if arguments is not None:
                with _apart(*place, replica):
                    self._get_ready().local[replica].update(arguments)
                if self._whole.metrics:
                    sent = arguments if is_alone else move_to_device(arguments, _CPU)
                    self._waiting.append(((*place, replica), sent))
        # In an evaluation, processes with fewer batches have no end of the last ones.
        if is_alone or phase is Phase.TRAINING:
            self._catch_up()

    def _catch_up(self) -> None:
        """Update what cannot be merged with the batches of all replicas, in their order.

        All processes call this together.
        """
        if not self._whole.metrics:
            return
        found = chain.from_iterable(self.context.gather(self._waiting))
        self._waiting = []
        for place, arguments in sorted(found, key=itemgetter(0)):
            with _apart(*place):
                self._whole.update(move_to_device(arguments, self.device))

    def _find_arguments(self) -> list[Any] | None:
        """Return the arguments without samples that pad the epoch; ``None`` if none is left."""
        arguments = self._inputs(self.context)
        if not isinstance(arguments, tuple):
            raise UsageError(
                f"Metrics(inputs=...) must return the tuple of arguments for update, got "
                f"{type(arguments).__name__}. Return e.g. (predictions, targets)."
            )
        num_repeated, size = self.context.padding if self._phase is Phase.TRAINING else (0, 0)
        if size and num_repeated == size:
            return None
        found = []
        for item in arguments:
            if isinstance(item, Tensor):
                # A metric that keeps its inputs would keep their graph.
                item = item.detach()
                if num_repeated and item.ndim and len(item) == size:
                    item = item[: size - num_repeated]
            found.append(item)
        return found

    def _compute(self) -> dict[str, Any]:
        """Return the values over all data by name, and reset."""
        self._catch_up()
        found: dict[str, Any] = {}
        with _apart(self.context.state.global_iteration):
            for part in (self._whole, self._get_ready().merged()):
                if part.num_updates:
                    found |= {name: metric.compute() for name, metric in part.metrics.items()}
        self._reset()
        return _spread({name: found[name] for name in self._metrics if name in found})

    def _log(self, values: Mapping[str, Any]) -> None:
        prefix = _PREFIXES[self._phase]
        numbers = {f"{prefix}/{n}": x for n, x in values.items() if isinstance(x, float)}
        if numbers:
            self.context.log(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the data of the metrics, for each of several replicas."""
        state = {"names": [*self._metrics], **self._whole.state_dict()}
        # There is none between passes of an evaluation.
        if self._parts is not None and self._phase is Phase.TRAINING:
            state |= self._parts.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the data; with other metrics than before, all of them start anew."""
        parts = self._get_ready()
        if self._metrics.keys() != {*state_dict["names"]}:
            _LOGGER.warning(
                "Plugin %r has the metrics %s, but the checkpoint has %s: all start without data.",
                self.plug_id,
                ", ".join(self._metrics),
                ", ".join(state_dict["names"]),
            )
            return
        self._whole.load_state_dict(state_dict)
        parts.load_state_dict(state_dict)


def _spread(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return values as numbers by name, as far as possible."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            if value.numel() == 1:
                value = value.item()
            elif value.ndim == 1:
                value = dict(enumerate(value.tolist()))
        if isinstance(value, Mapping):
            found |= _spread(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = float(value) if isinstance(value, int | float) else value
    return found


def _check_every(every: object, phase: Phase) -> int | None:
    if every == "epoch":
        return None
    if type(every) is not int or every < 1 or phase is not Phase.TRAINING:
        raise ArgumentError(
            f'Metrics(every=...) must be "epoch", or in training a positive number of steps, got '
            f"{every!r} with {phase}. A pass of an evaluation has one value: omit it there."
        )
    return every


@contextmanager
def _apart(*place: int) -> Iterator[None]:
    """Run a block without gradients, with random numbers of its own for each place."""
    with torch.no_grad(), rng.stream(rng.key("metrics", *place)):
        yield


@runtime_checkable
class _Mergeable(Protocol):
    """A metric that several replicas can measure."""

    def merge_state(self, other: Any, /) -> Any:
        """Add the data of another metric of the same kind, as if it came before this one's."""
        ...


@runtime_checkable
class _OfTorchmetrics(Protocol):
    """A metric that omits its state from its ``state_dict``, and merges over a process group."""

    distributed_available_fn: Any

    def persistent(self, mode: bool) -> Any: ...


@final
class _MetricSet:
    """Metrics by name, and their number of updates.

    A metric that is a module may hold counters beside its state, such as its number of updates:
    numeric attributes that differ from those of a metric without data are saved, too.

    Args:
        metrics: the metrics; they are reset.
        device: where those are moved that are modules.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics = metrics
        self._device = device
        self.reset()
        for metric in metrics.values():
            for part in _modules_in(metric).values():
                if isinstance(part, _OfTorchmetrics):
                    part.persistent(True)
                    # Else data would count twice. A call of bool returns False.
                    part.distributed_available_fn = bool
        self._fresh = {name: _numbers_in(metric) for name, metric in metrics.items()}
        self._move()

    def _move(self) -> None:
        for metric in self.metrics.values():
            if isinstance(metric, nn.Module):
                metric.to(self._device)

    def reset(self) -> None:
        """Discard all data."""
        for metric in self.metrics.values():
            metric.reset()
        self.num_updates = 0

    def update(self, arguments: Sequence[Any]) -> None:
        """Add a batch."""
        for metric in self.metrics.values():
            metric.update(*arguments)
        self.num_updates += 1

    def merge_before(self, earlier: _MetricSet) -> _MetricSet:
        """Return a set with this data after that of an earlier one.

        One without data is left out, because an empty state need not be neutral.
        """
        if not (earlier.num_updates and self.num_updates):
            return earlier if earlier.num_updates else self
        for name, metric in self.metrics.items():
            assert isinstance(metric, _Mergeable)
            metric.merge_state(earlier.metrics[name])
        self.num_updates += earlier.num_updates
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by reference."""
        metrics = {}
        for name, metric in self.metrics.items():
            numbers, fresh = _numbers_in(metric), self._fresh[name]
            metrics[name] = {
                "state": dict(metric.state_dict()),
                "numbers": {key: n for key, n in numbers.items() if n != fresh.get(key)},
            }
        return {"num_updates": self.num_updates, "metrics": metrics}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` has returned."""
        self.num_updates = state_dict["num_updates"]
        for name, saved in state_dict["metrics"].items():
            metric = self.metrics[name]
            metric.load_state_dict(dict(saved["state"]))
            modules = _modules_in(metric)
            for key, number in (self._fresh[name] | saved["numbers"]).items():
                path, _, attribute = key.rpartition(".")
                setattr(modules[path], attribute, number)
        self._move()


def _modules_in(metric: object) -> dict[str, nn.Module]:
    return dict(metric.named_modules()) if isinstance(metric, nn.Module) else {}


def _numbers_in(metric: object) -> dict[str, float]:
    return {
        f"{path}.{name}": value
        for path, part in _modules_in(metric).items()
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }


def _can_merge(metric: Metric) -> bool:
    """Return whether a metric without data can be merged with its like, and stays without data."""
    if not isinstance(metric, _Mergeable):
        return False
    # What wraps a metric may not merge it.
    if any(path and isinstance(part, _Mergeable) for path, part in _modules_in(metric).items()):
        return False
    try:
        one, other = copy.deepcopy(metric), copy.deepcopy(metric)
        one.merge_state(other)
        return same(dict(one.state_dict()), dict(other.state_dict()))
    except Exception:
        return False


def _take_apart(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name, with module dicts split into their members.

    Some collections decide in their first update which members share a state. A run that resumes
    inside an epoch could decide differently.

    Raises:
        ArgumentTypeError: for something that is not a metric, or if there is none.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items() if isinstance(metrics, Mapping | nn.ModuleDict) else ():
        if isinstance(metric, nn.ModuleDict):
            found |= {f"{name}/{key}": part for key, part in metric.items()}
        else:
            found[name] = metric
    odd = [name for name, metric in found.items() if not isinstance(metric, Metric)]
    if odd or not found:
        raise ArgumentTypeError(
            "Metrics(metrics=...) must be a dict of names to at least one object with update, "
            "compute, reset, state_dict and load_state_dict, got "
            f"{', '.join(f'{name!r}: {found[name]!r}' for name in odd) or repr(metrics)}."
        )
    return found
