"""From a run to a record and back: what is asked of every object, and in which order it is given.

For a training that is the whole state. For inference, and for a finished run, it is what a trained
model consists of.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from helios.checkpoint.record import Record
from helios.core import rng
from helios.errors import StateError
from helios.protocols import Stateful
from helios.state import Cursor, TrainingState

_LOGGER = logging.getLogger(__name__)


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


class Owners(Protocol):
    """The plain attributes of plugins, data module, loops and engine."""

    def capture(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the states by owner, and what they lack: place and reason."""
        ...

    def restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Give the owners their states."""
        ...


class NoOwners:
    """Nothing with plain attributes."""

    def capture(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return nothing."""
        return {}, {}

    def restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Do nothing."""


class LiveModel(Protocol):
    """What is asked of a model."""

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Its tables of losses and scores."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        """Take its state, or what inference needs of it."""
        ...


class LiveData(Protocol):
    """What is asked of the training data."""

    @property
    def description(self) -> dict[str, Any]:
        """What it is."""
        ...

    @property
    def missing(self) -> dict[str, str]:
        """What its state lacks: place and reason."""
        ...

    @property
    def state_is_per_process(self) -> bool:
        """Whether each process has another state."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take its state."""
        ...


class Team(Protocol):
    """What is asked of the replicas and their processes."""

    num_replicas: int
    num_processes: int
    rank: int

    @property
    def is_whole(self) -> bool:
        """Whether there is one process."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a value of every process, by rank."""
        ...


class LiveRun(Protocol):
    """A training."""

    state: TrainingState
    cursor: Cursor
    is_manual: bool | None
    is_resumed: bool
    obstacles: list[str]
    unshared: list[str]
    missing: dict[str, str]
    claims: list[str]
    saved_randomness: dict[str, Any] | None

    @property
    def model(self) -> LiveModel:
        """The model."""
        ...

    @property
    def is_discovered(self) -> bool:
        """Whether Helios itself takes the model's state."""
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
    def owner_states(self) -> Owners:
        """The plain attributes of all others than the model."""
        ...


def capture(run: LiveRun) -> Record:
    """Return the whole state of a training, by reference; all processes call this together."""
    source = run.training_source
    model = run.model.state_dict()
    owners, lacking = run.owner_states.capture()
    # A model with a state_dict of its own may have a key of this name.
    lost = model.get("missing", {}) if run.is_discovered else {}
    if run.is_discovered:
        _refuse_misfits(model.pop("misfits", {}))
    missing, claims = _join(run, {**run.missing, **source.missing, **lost, **lacking})
    return Record(
        training_state=run.state.dict(),
        cursor=run.cursor.dict(),
        model=model,
        by_rank=_gather_own_parts(run, model),
        tables=_capture_tables(run.model),
        is_manual=run.is_manual,
        plugins=run.plugin_states.capture(),
        loops=run.loop_states.capture(),
        data={"description": source.description, "state": source.state_dict()},
        engine=run.engine.state_dict(),
        rng=rng.get_rng_state_dict(),
        num_threads=torch.get_num_threads(),
        num_replicas=run.replicas.num_replicas,
        obstacles=list(run.obstacles),
        unshared=list(run.unshared),
        missing=missing,
        claims=claims,
        owners=owners,
    )


def _refuse_misfits(misfits: dict[str, str]) -> None:
    if misfits:
        names = [f"{path} ({text})" if text else path for path, text in sorted(misfits.items())]
        raise StateError(
            "A checkpoint must fit what setup() makes, but networks, optimizers or parameters "
            f"came, went or changed their structure after it: {', '.join(names)}. No resume could "
            "make that again, so nothing was written. Create all of them in setup()."
        )


def apply(record: Record, run: LiveRun, *, state: TrainingState, cursor: Cursor) -> None:
    """Give a training the state of a record.

    Args:
        record: no part of it is kept that :func:`detach` would copy.
        run: newly set up.
        state: the counters of the record, as far as the options let them be.
        cursor: likewise, the place in the data.

    Raises:
        StateError: if somebody refuses its state.
    """
    record = _take_own_part(record, run.replicas)
    run.state, run.cursor, run.is_resumed = state, cursor, True
    run.is_manual = record.is_manual
    run.obstacles += record.obstacles
    run.unshared += record.unshared
    run.engine.load_state_dict(record.engine)
    run.model.load_state_dict(record.model)
    apply_tables(record.tables, run.model)
    run.training_source.load_state_dict(record.data["state"])
    run.plugin_states.restore(record.plugins)
    run.loop_states.restore(record.loops)
    run.owner_states.restore(record.owners)
    # The generators come last, when nothing is left that could draw.
    run.saved_randomness = record.rng


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a trained model consists of, for inference and for other processes.

    Attributes:
        model: what its ``state_dict`` returned.
        tables: its tables of losses and scores.
        plugins: states of plugins by id.
    """

    model: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    plugins: dict[str, Any]

    @classmethod
    def of(cls, record: Record) -> Trained:
        """Return the part of a record."""
        return cls(record.model, record.tables, record.plugins)


def capture_trained(model: LiveModel, plugins: States) -> Trained:
    """Return what was trained, by reference; all processes call this together."""
    return Trained(model.state_dict(), _capture_tables(model), plugins.capture())


def apply_trained(trained: Trained, model: LiveModel, plugins: States) -> None:
    """Give a model that was set up for inference, and plugins, what was trained.

    Raises:
        StateError: if somebody refuses its state.
    """
    model.load_state_dict(trained.model, fast_init=True)
    apply_tables(trained.tables, model)
    plugins.restore(trained.plugins)


def _capture_tables(model: LiveModel) -> dict[str, dict[str, Any]]:
    return {name: _as_plain(table) for name, table in model.tables.items()}


def _as_plain(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without graphs and tensor subclasses: only its numbers are state."""
    return {
        name: value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
        for name, value in table.items()
    }


def apply_tables(tables: Mapping[str, Mapping[str, Any]], model: LiveModel) -> None:
    """Give a model its tables of losses and scores."""
    for name, table in model.tables.items():
        table.clear()
        table.update(tables[name])


def _join(run: LiveRun, missing: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return what any process lacks, and whose word any of them takes."""
    everybodys: dict[str, str] = {}
    claims: dict[str, None] = {}
    for own, words in run.replicas.gather_objects((missing, list(run.claims))):
        everybodys |= own
        claims |= dict.fromkeys(words)
    return everybodys, list(claims)


def _gather_own_parts(run: LiveRun, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what differs between processes of the same run, by rank; empty for one process."""
    source = run.training_source
    if run.replicas.is_whole or not (run.unshared or source.state_is_per_process):
        return []
    # A model with a state_dict of its own is taken at its word.
    objects = model["objects"] if run.is_discovered else {}
    own = {
        "values": model["values"] if run.is_discovered and run.unshared else None,
        "objects": {path: part for path, part in objects.items() if _holds_any(path, run.unshared)},
        "data": source.state_dict() if source.state_is_per_process else None,
    }
    return run.replicas.gather_objects(own)


def _holds_any(path: str, names: list[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for name in names)


def _take_own_part(record: Record, replicas: Team) -> Record:
    """Return a record as this process left it: each gets its own in a start with as many."""
    if not record.by_rank:
        return record
    if len(record.by_rank) != replicas.num_processes:
        _LOGGER.warning(
            "%d processes went on each with its own %s, and now there are %d: all take what rank 0 "
            "had, so bits may differ from an undisturbed run's.",
            len(record.by_rank),
            ", ".join(record.unshared) or "loader",
            replicas.num_processes,
        )
        return record
    own = record.by_rank[replicas.rank]
    model, data = record.model, record.data
    if own["values"] is not None:
        objects = {**model["objects"], **own["objects"]}
        model = {**model, "values": own["values"], "objects": objects}
    if own["data"] is not None:
        data = {**data, "state": own["data"]}
    return dataclasses.replace(record, model=model, data=data)


def detach(record: Record, *, keeps_model: bool) -> Record:
    """Return a record with copies of all tensors that somebody may keep.

    Mapping the file spares a copy of the whole state at every start. What goes on living must not
    lie there: somebody may write to the file.

    Args:
        record: tensors may lie in its file.
        keeps_model: whether the model's part may be kept, too; Helios' own way of loading keeps
            nothing of it.
    """
    parts = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    if not keeps_model:
        del parts["model"]
    # In one piece, so that what shares memory does so again.
    return dataclasses.replace(record, **copy.deepcopy(parts))
