"""Converts a run to a record and back, asking each object for its state in a fixed order.

For training that is the complete state; for inference and finished runs, only the state of the
objects.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from helios.checkpoint.frozen import complete, references_of
from helios.checkpoint.record import Record
from helios.core import rng
from helios.counters import Cursor, TrainingState
from helios.engines.engine import Engine
from helios.errors import StateError
from helios.findings import Finding, FindingKind, Findings
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.state.anchors import leads_to
from helios.state.digests import mark_of
from helios.storage.dcp_folder import refer_to_sharded

if TYPE_CHECKING:
    from helios.run_parts import RunParts

_LOGGER = logging.getLogger(__name__)

# What a start finds again, and each process by itself, are the others.
_OWN_KINDS = (FindingKind.OBSTACLE, FindingKind.UNSHARED)


def capture(parts: RunParts) -> Record:
    """Return the complete state of a run, by reference; all processes must call this together."""
    run, source = parts.run, parts.training_source
    objects, own, lacking = _capture_objects(parts, leaves_out=True)
    model, owners = objects["model"], objects["owners"]
    is_discovered = _is_discovered(parts.model)
    # A model that overrides state_dict may have a key of this name.
    lost = model.get("missing", {}) if is_discovered else {}
    misfits = model.pop("misfits", {}) if is_discovered else {}
    own_missing = {**parts.findings.missing, **lost, **lacking}
    missing, claims = _join(parts, own_missing, misfits)
    if is_discovered:
        del own["model"]
    by_rank = _gather_own_parts(parts, model, owners, own)
    findings = Findings(parts.findings.of(*_OWN_KINDS))
    findings.add_missing(missing)
    findings.extend(Finding(FindingKind.CLAIM, text=word) for word in claims)
    # The same for any number of processes.
    of_data = source.gather_state(parts.replicas.gather_objects)
    return Record(
        training_state=run.state.dict(),
        cursor=run.cursor.dict(),
        by_rank=by_rank,
        is_manual=run.is_manual,
        data={
            "description": source.description,
            "state": of_data,
            "length": source.pass_length if run.cursor.batch else source.length,
        },
        rng=rng.read_states(),
        num_threads=torch.get_num_threads(),
        num_replicas=parts.replicas.num_replicas,
        findings=findings,
        best_validations=run.best.as_plain(),
        loss_means=parts.loss_means.capture(parts.replicas.gather_by_replica),
        **objects,
    )


def apply(record: Record, parts: RunParts, *, state: TrainingState, cursor: Cursor) -> None:
    """Restore the state of a run from a record.

    Args:
        record: the record; nothing that :func:`detach` would copy is referred to afterwards.
        parts: the objects of the run, after its setup.
        state: the counters of the record, adjusted to the options.
        cursor: the position in the data, likewise.

    Raises:
        StateError: if an object refuses its state.
    """
    record, run = _take_own_part(record, parts.replicas), parts.run
    run.state, run.cursor, run.is_resumed = state, cursor, True
    run.is_manual = record.is_manual
    parts.findings.extend(record.findings.of(*_OWN_KINDS))
    if record.loss_means is not None:
        parts.loss_means.restore(record.loss_means, state, parts.replicas.local_replicas)
    parts.training_source.load_state_dict(record.data["state"])
    if parts.frozen is not None:
        parts.frozen.keep(references_of(record.model))
    apply_trained(record, parts, is_inference=False)


def choose_trained(record: Record, replicas: Replicas) -> Record:
    """Return the record of a process, or of rank 0 if the number of processes has changed."""
    is_same = len(record.by_rank) == replicas.num_processes
    return _take_own_part(record, replicas) if is_same else record


def capture_trained(parts: RunParts) -> Record:
    """Return the state of the objects, by reference; all processes must call this together.

    The record is for :func:`apply_trained` in this process or another one, which needs no more.
    """
    objects, _, _ = _capture_objects(parts, leaves_out=False)
    names = ("model", "plugins", "owners")
    joined = parts.replicas.join_shards(tuple(objects[name] for name in names))
    objects.update(zip(names, joined, strict=True))
    run, num_replicas = parts.run, parts.replicas.num_replicas
    state, cursor = run.state.dict(), run.cursor.dict()
    return Record(training_state=state, cursor=cursor, rng={}, num_replicas=num_replicas, **objects)


def _capture_objects(
    parts: RunParts, *, leaves_out: bool
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, str]]:
    """Return entries of a record, what ``state_dict`` of objects returned, and what is missing.

    Args:
        parts: the objects of the run.
        leaves_out: whether frozen weights that are as ``setup`` made them are left out, if the
            store asks for that.
    """
    model = parts.model.state_dict()
    if leaves_out and parts.frozen is not None:
        model = parts.frozen.leave_out(model)
    plugins = parts.plugin_states.capture()
    loops = {path: state for path, state in parts.loop_states.capture().items() if state}
    # Also where a method of the user's leaves out what its base returns.
    engine = {**Engine.state_dict(parts.engine), **parts.engine.state_dict()}
    own = {"model": model, "engine": engine}
    own |= {f"plugin {name!r}": state for name, state in plugins.items()}
    own |= {f"loop {path!r}": state for path, state in loops.items()}
    owners, lacking = parts.owner_states.capture(own)
    objects = {
        "model": model,
        "tables": {name: _as_plain(table) for name, table in parts.model.tables.items()},
        "plugins": plugins,
        "loops": loops,
        "engine": engine,
        "owners": owners,
    }
    return objects, own, lacking


def apply_trained(record: Record, parts: RunParts, *, is_inference: bool) -> None:
    """Restore the state of the objects of a run.

    Args:
        record: what holds it.
        parts: the objects of the run, after its setup.
        is_inference: whether to ignore state of objects that the run does not have.

    Raises:
        StateError: if an object refuses its state.
    """
    model = complete(record.model, parts.model)
    if not is_inference:
        # One that a model of helios-ml made of its own has no such form.
        is_captured = _is_discovered(parts.model) and "objects" in model
        made = parts.model.discovery.check(model) if is_captured else {}
        parts.owner_states.check(record.owners, made)
    # Also where a method of the user's leaves out that of its base.
    Engine.load_state_dict(parts.engine, record.engine)
    parts.engine.load_state_dict(record.engine)
    parts.owner_states.prepare(record.owners)
    parts.model.load_state_dict(model, fast_init=is_inference)
    apply_tables(record.tables, parts.model)
    parts.plugin_states.restore(record.plugins)
    parts.loop_states.restore(record.loops)
    parts.owner_states.restore(record.owners, is_inference=is_inference)


def _is_discovered(model: Model) -> bool:
    """Return whether Helios finds the model's state: it has no ``state_dict`` of its own."""
    return type(model).state_dict is Model.state_dict


def _as_plain(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without graphs and tensor subclasses: only its numbers are state."""
    return {
        name: value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
        for name, value in table.items()
    }


def apply_tables(tables: Mapping[str, Mapping[str, Any]], model: Model) -> None:
    """Restore a model's tables of losses and scores."""
    for name, table in model.tables.items():
        table.clear()
        table.update(tables[name])


def _join(
    parts: RunParts, missing: dict[str, str], misfits: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Merge what is missing, and the claims, over all processes.

    Raises:
        StateError: in all processes, if something prevents a resume in one of them.
    """
    everybodys: dict[str, str] = {}
    unfit: dict[str, str] = {}
    claims: dict[str, None] = {}
    own_claims = parts.findings.names(FindingKind.CLAIM)
    for own, odd, words in parts.replicas.gather_objects((missing, misfits, own_claims)):
        everybodys |= own
        unfit |= odd
        claims |= dict.fromkeys(words)
    if unfit:
        names = [f"{path} ({text})" if text else path for path, text in sorted(unfit.items())]
        raise StateError(
            "A checkpoint must match what setup() creates, but networks, optimizers or parameters "
            f"were added, removed or changed in structure since: {', '.join(names)}. No resume "
            "could restore that, so nothing was written. Create all of them in setup()."
        )
    return everybodys, list(claims)


def _gather_own_parts(
    parts: RunParts,
    model: dict[str, Any],
    owners: dict[str, dict[str, Any]],
    own_states: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return what differs between processes of the same run, by rank; empty for one process.

    Args:
        parts: the objects of the run.
        model: the state of the model.
        owners: what training has changed of the others besides their own states.
        own_states: what ``state_dict`` of user code has returned, by owner.
    """
    source, unshared = parts.training_source, parts.findings.names(FindingKind.UNSHARED)
    if parts.replicas.has_single_process:
        return []
    owners = refer_to_sharded(owners, root="owners")
    # Sharded tensors are no process's own.
    of_users = {
        name: refer_to_sharded(state, root=name)
        for name, state in own_states.items()
        if parts.owner_states.has_own_state(name)
    }
    differing = _find_differing(parts, owners, of_users)
    if not (unshared or source.state_is_per_process or differing):
        return []
    # What an overridden state_dict of the model omits is among the owners.
    is_discovered = _is_discovered(parts.model)
    of_model: dict[str, Any] = {}
    if is_discovered and unshared:
        of_model = {key: model[key] for key in ("values", "inner")}
        of_model["objects"] = {
            # Sharded tensors are no process's own.
            path: refer_to_sharded(part, root=f"model.objects.{path}")
            for path, part in model["objects"].items()
            if leads_to(path, unshared)
        }
    own = {
        "model": of_model,
        "data": source.state_dict() if source.state_is_per_process else None,
        "owners": {name: owners[name] for name in differing if name in owners},
        "states": {name: of_users[name] for name in differing if name in of_users},
    }
    return parts.replicas.gather_objects(own)


def _find_differing(
    parts: RunParts, owners: dict[str, dict[str, Any]], states: dict[str, dict[str, Any]]
) -> list[str]:
    """Return the owners whose state differs between processes, which binds the run to these."""
    values = {name: (owners.get(name), states.get(name)) for name in owners | states}
    marks = {name: mark_of(value) for name, value in values.items()}
    tables = parts.replicas.gather_objects(marks)
    names = sorted({name for table in tables for name in table})
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    for name in differing:
        text = f"the state of {name} differs between processes"
        parts.findings.add(FindingKind.OBSTACLE, text=text)
    return differing


def _take_own_part(record: Record, replicas: Replicas) -> Record:
    """Return a record as this process saved it, if the number of processes is the same."""
    if not record.by_rank:
        return record
    if len(record.by_rank) != replicas.num_processes:
        _LOGGER.warning(
            "%d processes saved this checkpoint, each with its own %s, and now there are %d: all "
            "load that of rank 0, so bits may differ from those of an uninterrupted run.",
            len(record.by_rank),
            ", ".join(record.findings.names(FindingKind.UNSHARED)) or "loader or plugins",
            replicas.num_processes,
        )
        return record
    own = record.by_rank[replicas.rank]
    model, data = record.model, record.data
    if own["model"]:
        objects = {**model["objects"], **own["model"]["objects"]}
        model = {**model, **own["model"], "objects": objects}
    if own["data"] is not None:
        data = {**data, "state": own["data"]}
    owners = record.owners | own["owners"]
    record = dataclasses.replace(record, model=model, data=data, owners=owners)
    return _with_states(record, own["states"])


def _with_states(record: Record, states: Mapping[str, Any]) -> Record:
    """Return a record with what ``state_dict`` of user code has returned in this process."""
    parts = {
        "model": states.get("model", record.model),
        "engine": states.get("engine", record.engine),
        "plugins": {
            name: states.get(f"plugin {name!r}", state) for name, state in record.plugins.items()
        },
        "loops": {
            path: states.get(f"loop {path!r}", state) for path, state in record.loops.items()
        },
    }
    return dataclasses.replace(record, **parts) if states else record


def detach(record: Record, *, keeps_model: bool, is_shown: bool) -> Record:
    """Return a record with copies of all tensors that may be kept.

    Mapping the file saves a copy of the whole state at every start. Objects that outlive loading
    must not refer to it, because the file may be overwritten.

    Args:
        record: its tensors may be mapped from the file.
        keeps_model: whether the model's part may be kept, too; the default loading keeps nothing.
        is_shown: whether user code sees the record.
    """
    parts = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    # Owners copy what they load, and so does the default loading of a model.
    if not is_shown:
        del parts["owners"]
    if not keeps_model:
        del parts["model"]
    # In one call, so that shared memory stays shared.
    return dataclasses.replace(record, **copy.deepcopy(parts))
