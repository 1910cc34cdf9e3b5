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
from typing import Any, ClassVar, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from helios.core import rng
from helios.core.memory import same
from helios.counters import Phase, TrainingState
from helios.engines.device import move_to_device
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.context import Context
from helios.hooks.events import asks_nothing
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


class _Turn(NamedTuple):
    """What the metrics are updated with after the turn of a replica."""

    arguments: list[Any] | None
    randomness: dict[str, Any]


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
        inputs: takes the context, at the end of a batch, and returns the tuple of arguments for
            ``update``. With several replicas it is called for each, at the end of its forward.
        phase: the phase to measure.
        every: ``"epoch"`` for one value per epoch or pass; in training also a number of optimizer
            steps.
        plug_id: unique id of the plugin; ``"metrics-<phase>"`` by default.

    Raises:
        ArgumentError: if a value is invalid.
        ArgumentTypeError: for something that is not a metric, or not a function.
    """

    _internals: ClassVar[str] = (
        "_every _inputs _is_fitting _is_ready _is_shared _metrics _parts _phase _turns _waiting "
        "_warned _whole"
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
        self._whole = _MetricSet(self._metrics, self.device)
        self._inputs = inputs
        self._phase = phase
        self._every = _check_every(every, phase)
        self._warned: set[str] = set()
        self._is_fitting = self._is_ready = self._is_shared = False

    def setup(self) -> None:
        """Start without data."""
        self._is_ready = False

    def on_fit_start(self) -> None:
        """Find out before training which metrics several replicas can measure."""
        self._get_ready()
        self._is_fitting = True

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Reset the metrics, if values are per epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._reset()

    def on_forward_end(self, context: Context) -> None:
        """Keep what the metrics need of one of several replicas."""
        if self._is_shared and context.phase is self._phase:
            # A batch may be used in several forwards, of which the last one counts.
            with _aside(), _at_its_end(context):
                arguments = self._find_arguments()
                self._turns[context.replica] = _Turn(
                    self._drop_padding(arguments) if self._phase is Phase.TRAINING else arguments,
                    # What a metric draws must not depend on which replica is next here.
                    rng.read_states(),
                )

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Update with a training batch."""
        self._end_batch(Phase.TRAINING)
        if self._is_shared and self._phase is Phase.TRAINING:
            self._catch_up()

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
        """Remember that no checkpoint follows."""
        self._is_fitting = False

    def teardown(self) -> None:
        """Release the copies of the replicas."""
        self._is_fitting = self._is_ready = False
        vars(self).pop("_parts", None)

    def _begin_pass(self, phase: Phase) -> None:
        if phase is self._phase:
            self._get_ready()
            self._reset()

    def _get_ready(self) -> None:
        """Start without data; with several replicas, each has copies of what can be merged."""
        if self._is_ready:
            return
        self._is_ready, self._is_shared = True, self.context.choose(False, True)
        with _aside():
            merged = {
                name: metric
                for name, metric in self._metrics.items()
                if self._is_shared and _can_merge(metric)
            }
            lone = {n: metric for n, metric in self._metrics.items() if n not in merged}
            self._whole = _MetricSet(lone, self.device)
            self._parts = self.context.per_replica(
                lambda: _MetricSet(copy.deepcopy(merged), self.device),
                lambda earlier, later: later.merge_before(earlier),
            )
        self._reset()

    def _reset(self) -> None:
        for part in (self._whole, *self._parts.local.values()):
            part.reset()
        self._turns: dict[int, _Turn] = {}
        self._waiting: list[tuple[tuple[int, ...], _Turn]] = []

    def _end_batch(self, phase: Phase, *place: int) -> None:
        """Update with the batches of the replicas of this process, in their order.

        Args:
            phase: the phase of the batch.
            place: of an evaluation, the numbers of the loader and of the batch.
        """
        if phase is not self._phase:
            return
        if not self._is_shared:
            with _aside():
                self._whole.update(self._find_arguments())
            return
        turns, self._turns = self._turns, {}
        with _aside():
            for replica, turn in turns.items():
                if turn.arguments is not None:
                    rng.load_states(turn.randomness)
                    self._parts.local[replica].update(turn.arguments)
                    if self._whole.metrics:
                        sent = turn._replace(arguments=move_to_device(turn.arguments, _CPU))
                        self._waiting.append(((*place, replica), sent))

    def _catch_up(self) -> None:
        """Update what cannot be merged with the batches of all replicas, in their order.

        In an evaluation, processes with fewer batches have no end of the last ones: all processes
        call this together when the pass is over.
        """
        if not self._is_shared or not self._whole.metrics:
            return
        found = chain.from_iterable(self.context.gather(self._waiting))
        self._waiting = []
        with _aside():
            for _, turn in sorted(found, key=itemgetter(0)):
                rng.load_states(turn.randomness)
                self._whole.update(move_to_device(turn.arguments, self.device))

    def _find_arguments(self) -> list[Any]:
        arguments = self._inputs(self.context)
        if not isinstance(arguments, tuple):
            raise UsageError(
                f"Metrics(inputs=...) must return the tuple of arguments for update, got "
                f"{type(arguments).__name__}. Return e.g. (predictions, targets)."
            )
        # A metric that keeps its inputs would keep their graph.
        return [item.detach() if isinstance(item, Tensor) else item for item in arguments]

    def _drop_padding(self, arguments: list[Any]) -> list[Any] | None:
        """Return arguments without samples that occur twice in the epoch; ``None`` if none is left.

        Those of all samples of a batch have one row for each; others cannot be divided.
        """
        num_repeated, size = self.context.padding
        if not num_repeated:
            return arguments
        if num_repeated == size:
            return None
        lengths = {len(each) for each in arguments if isinstance(each, Tensor) and each.ndim}
        if lengths == {size}:
            kept = size - num_repeated
            return [x[:kept] if isinstance(x, Tensor) and x.ndim else x for x in arguments]
        self._warn(
            "The training metrics count the samples twice that pad the end of each epoch, because "
            "Metrics(inputs=...) does not return tensors with a row for each sample of a batch. "
            "Let it do so, or set drop_last=True."
        )
        return arguments

    def _compute(self) -> dict[str, Any]:
        """Return the values over all data, and reset."""
        self._catch_up()
        found: dict[str, Any] = {}
        with _aside():
            for part in (self._whole, self._parts.merged()):
                if part.num_updates:
                    found |= {name: metric.compute() for name, metric in part.metrics.items()}
        self._reset()
        values: dict[str, Any] = {}
        for name in self._metrics:
            if name in found:
                values |= _spread(name, found[name])
        return values

    def _log(self, values: Mapping[str, Any]) -> None:
        numbers = {
            f"{_PREFIXES[self._phase]}/{name}": value
            for name, value in values.items()
            if isinstance(value, float)
        }
        if numbers:
            self.context.log(numbers)
        if self._phase is Phase.TRAINING and len(numbers) < len(values):
            self._warn(
                "The training metrics are not all numbers, and only numbers are logged. Let "
                "compute return the parts that you want to see."
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOGGER.warning("%s", text)

    def state_dict(self) -> dict[str, Any]:
        """Return the data of the metrics, for each of several replicas."""
        state = self._whole.state_dict() if self._whole.metrics else {}
        # There is none between passes of an evaluation, and after training nobody needs it.
        if self._is_shared and self._is_fitting and self._phase is Phase.TRAINING:
            state |= self._parts.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; warn of metrics that were added or removed while there is data."""
        self._get_ready()
        if "metrics" in state_dict:
            self._whole.load_state_dict(state_dict)
        self._parts.load_state_dict(state_dict)
        saved = [
            part for part in (state_dict, *state_dict.get("replicas", ())) if "metrics" in part
        ]
        different = self._metrics.keys() ^ {name for part in saved for name in part["metrics"]}
        if different and any(part["num_updates"] for part in saved):
            _LOGGER.warning(
                "The checkpoint and the plugin %r hold different metrics: %s. New ones cover only "
                "the rest of the current epoch; removed ones are dropped.",
                self.plug_id,
                ", ".join(sorted(different)),
            )


def _spread(name: str, value: Any) -> dict[str, Any]:
    """Return a value as numbers by name, as far as possible."""
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
def _aside() -> Iterator[None]:
    """Run a block without gradients, and without changing the random number generators."""
    found = rng.read_states()
    try:
        with torch.no_grad():
            yield
    finally:
        rng.load_states(found)


@contextmanager
def _at_its_end(context: Context) -> Iterator[None]:
    """Show the batch in a forward as it is shown at the batch's end."""
    run = context._run
    shown, run.batch = run.batch, run.raw_batch
    try:
        yield
    finally:
        run.batch = shown


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


def _is_never_available() -> bool:
    return False


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
                    # Data would count twice.
                    part.distributed_available_fn = _is_never_available
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
        """Restore the state of the metrics that exist."""
        self.num_updates = state_dict["num_updates"]
        for name in state_dict["metrics"].keys() & self.metrics.keys():
            metric, saved = self.metrics[name], state_dict["metrics"][name]
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
    own = type(metric).merge_state
    for path, part in _modules_in(metric).items():
        # A method that is that of a metric inside does not merge the metric inside.
        if path and isinstance(part, _Mergeable) and type(part).merge_state is own:
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
