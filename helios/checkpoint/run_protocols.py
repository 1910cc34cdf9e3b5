"""The interfaces of the objects that hold the state of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from helios.protocols import Stateful
from helios.state import Cursor, TrainingState


class States(Protocol):
    """Several objects with state, each under a name."""

    def capture(self) -> dict[str, Any]:
        """Return their states by name."""
        ...

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give them their states."""
        ...


class NoStates:
    """Nothing with state."""

    def capture(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Do nothing."""


class StepComparison(Protocol):
    """Compares what an owner holds before and after a step."""

    def changed(self, *, counts_parameters: bool = True) -> list[str]:
        """Return the paths of what has changed."""
        ...


class OwnerStates(Protocol):
    """The attributes of plugins, data module, loops and engine."""

    def begin_training(self) -> None:
        """Mark the end of the start events, which every start repeats."""
        ...

    def note_named(self, places: Iterable[str]) -> None:
        """Treat missing paths as already reported in this start."""
        ...

    def capture(
        self, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return what training changed by owner, and what is missing from that: path and reason.

        Args:
            own: what the ``state_dict`` of owners returned, by name.
        """
        ...

    def prepare(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Prepare for owners that load their state with their own ``load_state_dict``."""
        ...

    def restore(self, states: Mapping[str, dict[str, Any]], *, is_inference: bool = False) -> None:
        """Restore the states of the owners."""
        ...

    def watch(self, *, sees_unsaved: bool = False) -> Sequence[tuple[str, StepComparison]]:
        """Start to compare what a step changes, by owner."""
        ...

    def marks(self, states: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
        """Return hashes that are equal for equal states, by owner."""
        ...


class NoOwners:
    """Nothing with attributes."""

    def begin_training(self) -> None:
        """Do nothing."""

    def note_named(self, places: Iterable[str]) -> None:
        """Do nothing."""

    def capture(
        self, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return nothing."""
        return {}, {}

    def prepare(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Do nothing."""

    def restore(self, states: Mapping[str, dict[str, Any]], *, is_inference: bool = False) -> None:
        """Do nothing."""

    def watch(self, *, sees_unsaved: bool = False) -> Sequence[tuple[str, StepComparison]]:
        """Return nothing."""
        return []

    def marks(self, states: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
        """Return nothing."""
        return {}


class LiveModel(Protocol):
    """The interface of a model."""

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Its tables of losses and scores."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        """Load its state, or what inference needs of it."""
        ...


class LiveData(Protocol):
    """The interface of the training data."""

    @property
    def description(self) -> dict[str, Any]:
        """Its description."""
        ...

    @property
    def missing(self) -> dict[str, str]:
        """What its state lacks: path and reason."""
        ...

    @property
    def length(self) -> int | None:
        """Number of samples that it has now; ``None`` if unknown."""
        ...

    @property
    def pass_length(self) -> int | None:
        """Number of samples of the current pass; ``None`` if unknown."""
        ...

    @property
    def state_is_per_process(self) -> bool:
        """Whether the state differs between processes."""
        ...

    @property
    def state_is_per_replica(self) -> bool:
        """Whether the state of a process is that of its replicas only."""
        ...

    def join_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all replicas from those of the processes, by rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load its state."""
        ...


class Team(Protocol):
    """The interface of the replicas and their processes."""

    num_replicas: int
    num_processes: int
    rank: int

    @property
    def has_single_process(self) -> bool:
        """Whether there is only one process."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a value of every process, by rank."""
        ...

    def join_shards(self, tree: Any) -> Any:
        """Return a state with whole tensors on rank 0; all processes call this together."""
        ...


class LiveRun(Protocol):
    """A training."""

    state: TrainingState
    cursor: Cursor
    is_manual: bool | None
    is_resumed: bool
    obstacles: list[str]
    unshared: list[str]
    mismatches: list[str]
    missing: dict[str, str]
    claims: list[str]
    saved_randomness: dict[str, Any] | None

    @property
    def model(self) -> LiveModel:
        """The model."""
        ...

    @property
    def is_discovered(self) -> bool:
        """Whether Helios discovers the model's state."""
        ...

    @property
    def training_source(self) -> LiveData:
        """The training data."""
        ...

    @property
    def engine(self) -> Stateful:
        """The engine."""
        ...

    @property
    def replicas(self) -> Team:
        """The replicas and their processes."""
        ...

    @property
    def plugin_states(self) -> States:
        """Those of the plugins."""
        ...

    @property
    def loop_states(self) -> States:
        """Those of the loops."""
        ...

    @property
    def owner_states(self) -> OwnerStates:
        """The plain attributes of all others than the model."""
        ...
