"""``Metrics``: accumulate metrics over batches, and log their values.

Any object with update, compute, reset and a state is a metric, such as those of torchmetrics. Its
state is in the checkpoint, so a run that resumes inside an epoch gives the same value.

With several replicas, a metric with ``merge_state`` has a copy per replica, merged in their order.
Any other metric is one object, which gets the batches of all replicas in their order.
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
from helios.core.utils import Stateful
from helios.counters import Phase, TrainingState
from helios.engines.device import move_to_device
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.context import Context, PerReplica
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

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
    model's end event. A dict or a vector is split into ``<name>/<key>`` or ``<name>/<index>``;
    values of other shapes are only in the table.

    Args:
        metrics: the metrics by name; the plugin resets, updates and saves them. A module dict, such
            as torchmetrics' ``MetricCollection``, is split into its members. With several replicas
            each has copies of those with ``merge_state``; others get the batches of all replicas,
            in their order.
        inputs: takes the context, at the end of each forward, and returns the tuple of arguments
            for ``update``. If a batch has several forwards, the last one counts.
        phase: the phase to measure: training, validation or testing.
        every: ``"epoch"`` for one value per epoch or pass; in training also a number of optimizer
            steps.
        plug_id: unique id of the plugin; ``"metrics-<phase>"`` by default.

    Raises:
        ArgumentError: for an invalid value of ``every``.
        ArgumentTypeError: for something that is not a metric.
    """

    _internals: ClassVar[str] = (
        "_arguments _every _inputs _metrics _parts _phase _prefix _waiting _whole"
    )

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        inputs: Callable[[Context], tuple[Any, ...]],
        phase: Phase = Phase.VALIDATION,
        every: int | str = "epoch",
        plug_id: str | None = None,
    ) -> None:
        super().__init__(f"metrics-{phase.value}" if plug_id is None else plug_id)
        is_count = type(every) is int and every > 0 and phase is Phase.TRAINING
        if every != "epoch" and not is_count:
            raise ArgumentError(
                'Metrics(every=...) must be "epoch", or in training a positive number of steps, '
                f"got {every!r} with {phase}. A pass of an evaluation has one value: omit it there."
            )
        self._metrics = _take_apart(metrics)
        self._inputs = inputs
        self._phase = phase
        self._prefix = _PREFIXES[phase]
        self._every = every if isinstance(every, int) else None
        self.setup()

    def setup(self) -> None:
        """Discard the state of an earlier run."""
        self._whole = _MetricSet({}, self.device)
        self._parts: PerReplica[_MetricSet] | None = None
        self._arguments: dict[int, list[Any]] = {}
        self._waiting: list[tuple[tuple[int, ...], list[Any]]] = []

    def on_fit_start(self) -> None:
        """Find the metrics that can be merged over replicas, before training."""
        self._get_ready()

    def on_forward_end(self, context: Context) -> None:
        """Keep the inputs of the metrics for a replica."""
        if context.phase is self._phase:
            with torch.no_grad():
                arguments = self._find_arguments()
            if arguments is not None:
                self._arguments[context.replica] = arguments

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

    def on_validation_batch_end(self, step: int, dataloader_idx: int = 0) -> None:
        """Update with a validation batch."""
        self._end_batch(Phase.VALIDATION, dataloader_idx, step)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Put the values into ``model.metrics``, from where training logs them."""
        if self._phase is Phase.VALIDATION:
            self.context.model.metrics.update(self._compute())

    def on_testing_batch_end(self, step: int, dataloader_idx: int = 0) -> None:
        """Update with a test batch."""
        self._end_batch(Phase.TESTING, dataloader_idx, step)

    def on_testing_end(self) -> None:
        """Put the values into ``model.test_scores``, and log them."""
        if self._phase is Phase.TESTING:
            values = self._compute()
            self.context.model.test_scores.update(values)
            self._log(values)

    def teardown(self) -> None:
        """Release the copies of the replicas."""
        self.setup()

    def _get_ready(self) -> PerReplica[_MetricSet]:
        """Return the data of each replica, which has copies of what can be merged."""
        if self._parts is None:
            is_shared = self.context.choose(False, True)
            with _apart():
                merged = {n: x for n, x in self._metrics.items() if is_shared and _can_merge(x)}
                lone = {n: x for n, x in self._metrics.items() if n not in merged}
                self._whole = _MetricSet(lone, self.device)
                self._parts = self.context.per_replica(
                    lambda: _MetricSet(copy.deepcopy(merged), self.device),
                    lambda earlier, later: later.merge_before(earlier),
                )
        return self._parts

    def _end_batch(self, phase: Phase, *place: int) -> None:
        """Update with the batches of the replicas of this process, in their order.

        Args:
            phase: the phase of the batch.
            place: the numbers of the batch.
        """
        if phase is not self._phase:
            return
        parts = self._get_ready()
        found, self._arguments = self._arguments, {}
        is_alone = self.context.num_processes == 1
        for replica, arguments in found.items():
            with _apart(*place, replica):
                parts.local[replica].update(arguments)
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
        parts = self._get_ready()
        self._catch_up()
        found: dict[str, Any] = {}
        with _apart(self.context.state.global_iteration):
            for part in (self._whole, parts.merged()):
                if part.num_updates:
                    found |= {name: metric.compute() for name, metric in part.metrics.items()}
        for part in (self._whole, *parts.local.values()):
            part.reset()
        return _spread({name: found[name] for name in self._metrics if name in found})

    def _log(self, values: Mapping[str, Any]) -> None:
        numbers = {f"{self._prefix}/{n}": x for n, x in values.items() if isinstance(x, float)}
        self.context.log(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the data of the metrics, for each of several replicas."""
        state = {"names": [*self._metrics], **self._whole.state_dict()}
        # There is none between passes of an evaluation.
        if self._parts is not None and self._phase is Phase.TRAINING:
            state |= self._parts.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the data; with other metrics than before, all of them start empty."""
        parts = self._get_ready()
        if self._metrics.keys() == {*state_dict["names"]}:
            self._whole.load_state_dict(state_dict)
            parts.load_state_dict(state_dict)
        else:
            text = "The checkpoint has other metrics of plugin %r: all start without data."
            _LOGGER.warning(text, self.plug_id)


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


@contextmanager
def _apart(*place: int) -> Iterator[None]:
    """Run a block without gradients, with random numbers of its own for each place."""
    with torch.no_grad(), rng.stream(rng.key("metrics", *place)):
        yield


@final
class _MetricSet:
    """Metrics by name, and their number of updates.

    A metric that is a module may omit its data from its ``state_dict``, and hold counters beside
    it: numbers, tensors and lists among its attributes that differ from those of a metric without
    data are saved, too.

    Args:
        metrics: the metrics; they are reset.
        device: where those are moved that are modules.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self.metrics = metrics
        self._device = device
        self.reset()
        for metric in metrics.values():
            for part in _modules_in(metric).values():
                part.to(device)
                if "distributed_available_fn" in vars(part):
                    # Else torchmetrics would count data twice. A call of bool returns False.
                    part.distributed_available_fn = bool
        self._fresh = copy.deepcopy({name: _attributes_of(part) for name, part in metrics.items()})

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
            metric.merge_state(earlier.metrics[name])
        self.num_updates += earlier.num_updates
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by reference."""
        metrics = {}
        for name, metric in self.metrics.items():
            found, fresh = _attributes_of(metric), self._fresh[name]
            changed = {key: x for key, x in found.items() if not same(x, fresh.get(key))}
            metrics[name] = {"state": dict(metric.state_dict()), "attributes": changed}
        return {"num_updates": self.num_updates, "metrics": metrics}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a copy of what :meth:`state_dict` has returned."""
        self.num_updates = state_dict["num_updates"]
        found = move_to_device(copy.deepcopy(state_dict["metrics"]), self._device)
        for name, saved in found.items():
            metric = self.metrics[name]
            metric.load_state_dict(saved["state"])
            modules = _modules_in(metric)
            attributes = copy.deepcopy(self._fresh[name]) | saved["attributes"]
            for key, value in attributes.items():
                path, _, attribute = key.rpartition(".")
                setattr(modules[path], attribute, value)


def _modules_in(metric: object) -> dict[str, Any]:
    return dict(metric.named_modules()) if isinstance(metric, nn.Module) else {}


def _attributes_of(metric: object) -> dict[str, Any]:
    return {
        f"{path}.{name}": value
        for path, part in _modules_in(metric).items()
        for name, value in vars(part).items()
        if type(value) in (int, float, list, Tensor)
    }


def _can_merge(metric: Any) -> bool:
    """Return whether a metric without data can be merged with its like, and stays without data."""
    # What wraps a metric may not merge it.
    if any(path and isinstance(part, Metric) for path, part in _modules_in(metric).items()):
        return False
    try:
        one, other = copy.deepcopy(metric), copy.deepcopy(metric)
        one.merge_state(other)
        found, fresh = (dict(x.state_dict()) | _attributes_of(x) for x in (one, other))
        return same(found, fresh)
    except Exception:
        return False


def _take_apart(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics by name, with module dicts split into their members.

    Some collections decide in their first update which members share a state. A run that resumes
    inside an epoch could decide differently.

    Raises:
        ArgumentTypeError: for something that is not a metric.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            found |= {f"{name}/{key}": part for key, part in metric.items()}
        elif isinstance(metric, Metric):
            found[name] = metric
        else:
            raise ArgumentTypeError(
                "Metrics(metrics=...) must be a dict of objects with update, compute, reset, "
                f"state_dict and load_state_dict, got {name!r}: {metric!r}."
            )
    return found
