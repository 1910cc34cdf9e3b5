"""``Metrics``: accumulate metrics over batches, and log their values.

Any object with update, compute, reset and a state is a metric, as those of torchmetrics are. Its
state is in the checkpoint, so a run that resumes inside an epoch gives the same value. Metrics are
updated after each batch with one replica, after each forward with several.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from helios.core import rng
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.context import Context
from helios.hooks.events import asks_nothing
from helios.plugins.metric_state import Metric, Tally, portable, take_apart
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import Phase, TrainingState

__all__ = ["Metric", "Metrics"]

_LOGGER = logging.getLogger(__name__)
_PREFIXES = {Phase.TRAINING: "train", Phase.VALIDATION: "valid", Phase.TESTING: "test"}

_Arguments: TypeAlias = Callable[[], list[Any]]
"""Returns the arguments for ``update`` of the batch that the context shows."""


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
            each has copies of them, which must have ``merge_state``.
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
        "_every _inputs _intake _is_chosen _is_fitting _phase _warned _whole _written"
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
                f"Metrics(inputs=...) must be a function of the context, got {inputs!r}. Define "
                "one at the top level of a module, so that other processes can import it, which "
                'returns e.g. (context.model_outputs["logits"], context.batch[1]).'
            )
        self._whole = Tally(take_apart(metrics))
        self._inputs = inputs
        self._phase = phase
        self._every = _check_every(every, phase)
        self._written: list[str] = []
        self._warned: set[str] = set()
        self._is_fitting = False
        self._leave_run()

    def setup(self) -> None:
        """Start without data, on the device."""
        self._leave_run()
        self._intake.reset()
        self._whole.move(self.device)

    def on_fit_start(self) -> None:
        """Check before training that several replicas can measure the metrics."""
        self._enter_run()
        self._is_fitting = True

    def on_training_epoch_start(self, current_epoch: int) -> None:
        """Reset the metrics, if values are per epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._intake.reset()

    def on_forward_end(self, context: Context) -> None:
        """Update with the batch of one of several replicas."""
        if context.phase is self._phase:
            self._intake.end_forward(self._find_arguments)

    @asks_nothing
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        """Update with a training batch."""
        self._update(Phase.TRAINING)

    @asks_nothing
    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Log the values every ``every`` steps."""
        if self._every is not None and committed and (state.global_step + 1) % self._every == 0:
            self._conclude_training()

    def on_training_epoch_end(self, current_epoch: int) -> None:
        """Log the values of the epoch."""
        if self._phase is Phase.TRAINING and self._every is None:
            self._conclude_training()

    def on_validation_start(self, validation_cycle: int) -> None:
        """Reset the metrics for a validation."""
        self._begin_pass(Phase.VALIDATION)

    def on_validation_batch_end(self, step: int) -> None:
        """Update with a validation batch."""
        self._update(Phase.VALIDATION)

    def on_validation_end(self, validation_cycle: int) -> None:
        """Put the values into ``model.metrics``; training logs what is there."""
        if self._phase is Phase.VALIDATION:
            self.context.declare_summed(self._write())

    def on_testing_start(self) -> None:
        """Reset the metrics for a test."""
        self._begin_pass(Phase.TESTING)

    def on_testing_batch_end(self, step: int) -> None:
        """Update with a test batch."""
        self._update(Phase.TESTING)

    def on_testing_end(self) -> None:
        """Put the values into ``model.test_scores``, and log them."""
        if self._phase is Phase.TESTING:
            self._log(self._write())

    def on_fit_end(self) -> None:
        """Remember that no checkpoint follows."""
        self._is_fitting = False

    def teardown(self) -> None:
        """Release the copies of the replicas."""
        self._is_fitting = False
        self._leave_run()

    def _begin_pass(self, phase: Phase) -> None:
        if phase is self._phase:
            self._enter_run()
            self._intake.reset()
            # A model that keeps its scores from pass to pass must not find old values of ours.
            for name in self._written:
                self._table.pop(name, None)
            self._written = []

    @property
    def _table(self) -> dict[str, Any]:
        model = self.context.model
        table: dict[str, Any] = model.test_scores if self._phase is Phase.TESTING else model.metrics
        return table

    def _leave_run(self) -> None:
        """Use a single set of metrics, as for one replica."""
        self._intake: _Intake = _LoneIntake(self._whole)
        self._is_chosen = False

    def _enter_run(self) -> None:
        """Give each replica of this process its own metrics, if there are several."""
        if not self._is_chosen:
            make = self.context.choose(_LoneIntake, _SharedIntake)
            self._intake = make(self._whole, self.context)
            self._is_chosen = True

    def _update(self, phase: Phase) -> None:
        if phase is self._phase:
            self._intake.end_batch(self._find_arguments)

    def _find_arguments(self) -> list[Any]:
        arguments = self._inputs(self.context)
        if not isinstance(arguments, tuple):
            raise UsageError(
                f"Metrics(inputs=...) must return the tuple of arguments for update, got "
                f"{type(arguments).__name__}. Return e.g. (predictions, targets)."
            )
        # A metric that keeps its inputs would keep their graph.
        return [item.detach() if isinstance(item, Tensor) else item for item in arguments]

    def _compute(self) -> dict[str, Any]:
        """Return the values over all data, and reset."""
        values: dict[str, Any] = {}
        with _aside():
            self._intake.join()
            if self._whole.num_updates:
                for name, value in self._whole.compute().items():
                    values |= _spread(name, value)
        self._intake.reset()
        return values

    def _conclude_training(self) -> None:
        values = self._compute()
        for name, value in values.items():
            if not isinstance(value, float):
                self._warn(name, "is not a number, and is not logged. Log parts of it yourself")
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
        """Return the data of the metrics, for each of several replicas."""
        # There is none between passes of an evaluation, and after training nobody needs it.
        has_data = self._is_fitting and self._phase is Phase.TRAINING
        return self._intake.capture(has_data=has_data)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; warn of metrics that were added or removed while there is data."""
        self._enter_run()
        saved = self._intake.read(state_dict)
        # Only an evaluation may find the state of another number of replicas; it needs none.
        self._warn_of_differences(saved.values())
        self._intake.restore(saved)

    def _warn_of_differences(self, states: Iterable[Mapping[str, Any]]) -> None:
        different = {
            name
            for state in states
            if state["num_updates"]
            for name in state["metrics"].keys() ^ set(self._whole.names)
        }
        if different:
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
    if type(every) is not int or every < 1:
        raise ArgumentError(
            f'Metrics(every=...) must be "epoch" or a positive number of steps, got {every!r}. '
            'Pass e.g. "epoch".'
        )
    if phase is not Phase.TRAINING:
        raise ArgumentError(
            f'Metrics(every=...) must be "epoch" with {phase}, got {every!r}: a pass has one value.'
            " Omit it."
        )
    return every


class _Intake(ABC):
    """Updates metrics with batches.

    Args:
        whole: the metrics; after :meth:`join`, they hold the data of all replicas.
        tallies: the metrics of each replica of this process.
    """

    def __init__(self, whole: Tally, tallies: dict[int, Tally]) -> None:
        self._whole = whole
        self._tallies = tallies

    def reset(self) -> None:
        """Reset all metrics."""
        for tally in (self._whole, *self._tallies.values()):
            tally.reset()

    @abstractmethod
    def end_forward(self, find: _Arguments) -> None:
        """Called at the end of a forward in the phase that is measured."""

    @abstractmethod
    def end_batch(self, find: _Arguments) -> None:
        """Called at the end of an iteration's batches in that phase."""

    @abstractmethod
    def join(self) -> None:
        """Merge the data of all replicas into the whole; all processes call this together."""

    @abstractmethod
    def capture(self, *, has_data: bool) -> dict[str, Any]:
        """Return the state; all processes call this together.

        Args:
            has_data: whether there may be data that a later start needs.
        """

    @abstractmethod
    def read(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """Return the states by replica from the result of :meth:`capture`."""

    def restore(self, saved: Mapping[int, Any]) -> None:
        """Restore the states of the replicas of this process."""
        for replica in saved.keys() & self._tallies.keys():
            self._tallies[replica].restore(saved[replica])


@final
class _LoneIntake(_Intake):
    """One replica: each batch updates the metrics themselves, at its end.

    Args:
        whole: the metrics.
        context: the run; not needed, and ``None`` before one.
    """

    def __init__(self, whole: Tally, context: Context | None = None) -> None:
        super().__init__(whole, {0: whole})

    def end_forward(self, find: _Arguments) -> None:
        """Do nothing: the batch is used at its end."""

    def end_batch(self, find: _Arguments) -> None:
        """Update the metrics with the batch."""
        with _aside(is_lone_step=True):
            self._whole.update(find())

    def join(self) -> None:
        """Do nothing: the whole holds all data."""

    def capture(self, *, has_data: bool) -> dict[str, Any]:
        """Return the state of the metrics."""
        return self._whole.capture()

    def read(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """Return the state as that of replica 0; nothing if several replicas have saved it."""
        return {0: state_dict} if "metrics" in state_dict else {}


class _Turn(NamedTuple):
    """What a replica's metrics are updated with at the end of its turn."""

    replica: int
    arguments: list[Any] | None
    randomness: dict[str, Any]


@final
class _SharedIntake(_Intake):
    """Several replicas: each has copies of the metrics, updated with its own batches.

    Args:
        whole: the metrics.
        context: the run.

    Raises:
        ArgumentError: for metrics that cannot be merged.
    """

    def __init__(self, whole: Tally, context: Context) -> None:
        with _aside():
            whole.prepare_to_join()
            super().__init__(
                whole, {r: whole.copy() for r in context.engine.replicas.local_replicas}
            )
            self._spare = whole.copy()
        self._context = context
        self._has_warned = False
        self._forget_turns()

    def reset(self) -> None:
        """Reset all metrics, and discard an open turn."""
        super().reset()
        self._forget_turns()

    def _forget_turns(self) -> None:
        self._turn: _Turn | None = None
        self._num_turns = 0

    def end_forward(self, find: _Arguments) -> None:
        """Record the batch of a replica, and update with that of the replica before."""
        context = self._context
        is_training = context.phase is Phase.TRAINING
        # In an evaluation each forward is a turn; replicas without a batch are the last ones.
        replica = context.replica if is_training else min(self._tallies) + self._num_turns
        self._num_turns += 1
        if self._turn is not None and self._turn.replica != replica:
            self._end_turn()
        # A batch may be used in several forwards, of which the last one counts.
        with _aside(), _at_its_end(context):
            arguments = self._drop_padding(find()) if is_training else find()
            self._turn = _Turn(replica, arguments, rng.read_states())

    def _drop_padding(self, arguments: list[Any]) -> list[Any] | None:
        """Return arguments without samples that occur twice in the epoch; ``None`` if none is left.

        Those of all samples of a batch have one row for each; others cannot be divided.
        """
        num_repeated, size = self._context.padding
        if not num_repeated:
            return arguments
        if num_repeated == size:
            return None
        lengths = {len(each) for each in arguments if isinstance(each, Tensor) and each.ndim}
        if lengths == {size}:
            kept = size - num_repeated
            return [x[:kept] if isinstance(x, Tensor) and x.ndim else x for x in arguments]
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "The training metrics count the samples twice that pad the end of each epoch, "
                "because Metrics(inputs=...) does not return tensors with a row for each of the %d "
                "samples of a batch. Let it do so, or set drop_last=True.",
                size,
            )
        return arguments

    def end_batch(self, find: _Arguments) -> None:
        """Update with the batch of the last replica."""
        self._end_turn()
        self._num_turns = 0

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            with _aside():
                # What a metric draws must not depend on which replica of this process is next.
                rng.load_states(turn.randomness)
                if turn.arguments is not None:
                    self._tallies[turn.replica].update(turn.arguments)

    def join(self) -> None:
        """Merge the data of the replicas, in their order."""
        self._whole.join(self._gather(), self._spare)

    def _gather(self) -> list[dict[str, Any]]:
        """Return the states of all replicas, in their order."""
        own = [portable(tally.capture()) for tally in self._tallies.values()]
        return self._context.gather_replicas(own)

    def capture(self, *, has_data: bool) -> dict[str, Any]:
        """Return the states of all replicas."""
        return {"replicas": self._gather() if has_data else []}

    def read(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """Return the states; nothing if a single replica has saved its own."""
        return dict(enumerate(state_dict.get("replicas", [])))


@contextmanager
def _aside(*, is_lone_step: bool = False) -> Iterator[None]:
    """Run a block without gradients, and without changing the random number generators.

    Args:
        is_lone_step: whether it runs in each iteration of a single replica. NumPy's global
            generator stays where the block leaves it then: to read and restore it takes 50 µs, and
            the next iteration seeds it.
    """
    read, load = rng.read_states, rng.load_states
    if is_lone_step:
        read, load = rng.get_rng_state_dict, rng.load_rng_state_dict
    found = read()
    try:
        with torch.no_grad():
            yield
    finally:
        load(found)


@contextmanager
def _at_its_end(context: Context) -> Iterator[None]:
    """Show the batch in a forward as it is shown at the batch's end."""
    run = context._run
    shown, run.batch = run.batch, run.raw_batch
    try:
        yield
    finally:
        run.batch = shown
