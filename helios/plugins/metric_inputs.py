"""How metrics are updated: after each batch with one replica, after each forward with several.

The choice is made once, when a run begins.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from helios.core import rng
from helios.hooks.context import Context
from helios.plugins.metric_state import Tally, portable
from helios.state import Phase

_LOGGER = logging.getLogger(__name__)

Take: TypeAlias = Callable[[], list[Any]]
"""Returns the arguments for ``update`` of the batch that the context shows."""


class Intake(ABC):
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
    def end_forward(self, take: Take) -> None:
        """Called at the end of a forward in the phase that is measured."""

    @abstractmethod
    def end_batch(self, take: Take) -> None:
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
class LoneIntake(Intake):
    """One replica: each batch updates the metrics themselves, at its end.

    Args:
        whole: the metrics.
        context: the run; not needed, and ``None`` before one.
    """

    def __init__(self, whole: Tally, context: Context | None = None) -> None:
        super().__init__(whole, {0: whole})

    def end_forward(self, take: Take) -> None:
        """Do nothing: the batch is used at its end."""

    def end_batch(self, take: Take) -> None:
        """Update the metrics with the batch."""
        with aside(is_lone_step=True):
            self._whole.update(take())

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
class SharedIntake(Intake):
    """Several replicas: each has copies of the metrics, updated with its own batches.

    Args:
        whole: the metrics.
        context: the run.

    Raises:
        ArgumentError: for metrics that cannot be merged.
    """

    def __init__(self, whole: Tally, context: Context) -> None:
        with aside():
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

    def end_forward(self, take: Take) -> None:
        """Record the batch of a replica, and update with that of the replica before."""
        context = self._context
        is_training = context.phase is Phase.TRAINING
        # In an evaluation each forward is a turn; replicas without a batch are the last ones.
        replica = context.replica if is_training else min(self._tallies) + self._num_turns
        self._num_turns += 1
        if self._turn is not None and self._turn.replica != replica:
            self._end_turn()
        # A batch may be used in several forwards, of which the last one counts.
        with aside(), _at_its_end(context):
            arguments = self._drop_padding(take()) if is_training else take()
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

    def end_batch(self, take: Take) -> None:
        """Update with the batch of the last replica."""
        self._end_turn()
        self._num_turns = 0

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            with aside():
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
def aside(*, is_lone_step: bool = False) -> Iterator[None]:
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
