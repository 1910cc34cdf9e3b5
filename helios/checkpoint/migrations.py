"""Ordered steps from every format to the next, and what is said of files that need one.

A step takes the content of a file, as a dictionary, from one schema to the one above it. Schema 0
is what helios-ml wrote, in plain form: only the migrator brings it here, so that a start never
takes an old file for one of this package.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import torch

from helios.checkpoint import layout, old_files
from helios.checkpoint.record import REQUIRED
from helios.core import rng
from helios.errors import IncompatibleCheckpointError
from helios.state import Cursor, TrainingState
from helios.version import __version__

_LOGGER = logging.getLogger(__name__)

Step = Callable[[dict[str, Any]], dict[str, Any]]

_COUNTERS = ("global_epoch", "global_iteration")
_TABLES = ("_loss_items", "_val_scores", "_running_losses", "_test_scores")
_PCG64 = "PCG64"
# Modules whose objects the published helios-ml pickled; Helios writes none of them.
_OLD_MODULES = ("helios.", "pathlib.")


def upgrade(
    payload: dict[str, Any], steps: Mapping[int, Step], *, to: int = layout.SCHEMA
) -> dict[str, Any]:
    """Bring the content of a file to a schema, one step after another.

    Args:
        payload: with its ``schema``.
        steps: by the schema that each begins at; :data:`STEPS`.
        to: the schema to reach.

    Raises:
        IncompatibleCheckpointError: if no step leads on from a schema below.
    """
    while (schema := payload[layout.KEY_SCHEMA]) < to:
        if schema not in steps:
            raise IncompatibleCheckpointError(
                f"Format {schema} cannot be brought to format {to}: no step leads on from it. "
                "Install the version of Helios that wrote the file."
            )
        payload = steps[schema](payload) | {layout.KEY_SCHEMA: schema + 1}
    return payload


def _from_helios_ml(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 0 to 1: what helios-ml did not save stands at a neutral value."""
    state = _take_state(old["training_state"])
    is_inside = state.dataset_iter > 0
    # Inside of an epoch the number is that of the epoch under way, from 1.
    epoch = max(state.global_epoch - is_inside, 0)
    scaler = old.get(old_files.KEY_AMP_SCALER)
    known = {
        "version": __version__,
        "training_state": state.dict() | {"global_epoch": epoch + is_inside},
        "cursor": Cursor(epoch=epoch, batch=state.dataset_iter).dict(),
        "model": old.get("model", {}),
        "tables": {name: {} for name in _TABLES},
        "plugins": {},
        "loops": {},
        "data": {"description": {}, "state": {}},
        "engine": {"open_micro_batches": 0} | ({"scaler": scaler} if scaler else {}),
        "rng": _take_randomness(old.get("rng")),
        # How many processes trained is not in the file.
        "num_replicas": 0,
        "num_threads": None,
        "options": {},
        "is_manual": None,
        # No marks: event files of the old run are gone on with, and never cut back.
        "events": None,
        "migrated_from": str(old.get("version", "")),
    }
    handled = (old_files.KEY_AMP_SCALER, old_files.KEY_LOGGERS)
    others = {key: value for key, value in old.items() if key not in known and key not in handled}
    return others | _take_logs(old) | known


def _add_what_is_missing(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 to 2: what files of schema 1 lack was not known; plain attributes were not saved."""
    new: dict[str, Any] = {"missing": {}, "claims": [], "owners": {}}
    taken = sorted(new.keys() & old.keys())
    if taken:
        _LOGGER.warning(
            "on_save_checkpoint has added %s to the checkpoint, a name that belongs to Helios now: "
            "on_load_checkpoint finds it with '_of_hooks' added. Choose another name.",
            ", ".join(map(repr, taken)),
        )
    return old | {f"{key}_of_hooks": old[key] for key in taken} | new


STEPS: Mapping[int, Step] = {0: _from_helios_ml, 1: _add_what_is_missing}
"""The step that begins at each schema."""

OWN_STEPS = {schema: step for schema, step in STEPS.items() if schema > 0}
"""Those that a start takes by itself; files of helios-ml want the migrator."""


def _take_state(old: Mapping[str, Any]) -> TrainingState:
    names = {field.name for field in dataclasses.fields(TrainingState)}
    # A save followed a completed update; updates were counted as iterations are.
    made = {"is_step_boundary": True, "global_step": old["current_iteration"]}
    return TrainingState(**made | {name: old[name] for name in names & old.keys()})


def _take_randomness(old: Any) -> dict[str, Any]:
    """Return the generators as :mod:`helios.core.rng` has them; newly seeded where none is."""
    found = old if isinstance(old, Mapping) else {}
    with rng.stream(rng.get_default_seed()):
        neutral = rng.get_rng_state_dict()
    state = {name: found.get(name, neutral[name]) for name in ("torch", "rand")}
    state["numpy"] = _take_numpy(found.get("numpy"))
    if "cuda" in found:
        # That of the one device of the process.
        cuda = found["cuda"]
        state["cuda"] = list(cuda) if isinstance(cuda, list | tuple) else [cuda]
    return state


def _take_numpy(old: Any) -> dict[str, Any] | None:
    if not isinstance(old, Mapping) or old.get("bit_generator") != _PCG64:
        return None
    words = {name: int(word) for name, word in old["state"].items()}
    rest = {name: int(old[name]) for name in ("has_uint32", "uinteger")}
    return {"bit_generator": _PCG64, "state": words, **rest}


def _take_logs(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the places of logs, and what is known of other loggers."""
    loggers = {
        name: dict(places)
        for name, places in (old.get(old_files.KEY_LOGGERS) or {}).items()
        if isinstance(places, Mapping)
    }
    places = {
        "log_path": loggers.pop("root", {}).get("log_file"),
        "run_path": loggers.pop("tensorboard", {}).get("run_path"),
    }
    found = {name: place for name, place in places.items() if place is not None}
    return found | ({old_files.KEY_LOGGERS: loggers} if loggers else {})


def refuse_old_globals(path: Path, names: Iterable[str]) -> None:
    """Refuse a file that refers to what only helios-ml put into files.

    Raises:
        IncompatibleCheckpointError: with the way to migrate the file.
    """
    if any(name.startswith(_OLD_MODULES) for name in names):
        raise unmigrated(path)


def refuse_foreign(path: Path, payload: Any) -> None:
    """Refuse what is no payload of Helios at all.

    Raises:
        IncompatibleCheckpointError: with the way to migrate a file of helios-ml.
    """
    if isinstance(payload, Mapping) and layout.KEY_SCHEMA in payload:
        return
    if isinstance(payload, Mapping) and layout.KEY_TRAINING_STATE in payload:
        raise unmigrated(path)
    raise _foreign(path, f"it holds a {type(payload).__name__} without {layout.KEY_SCHEMA!r}")


def refuse_missing_keys(path: Path, payload: Mapping[str, Any]) -> None:
    """Refuse a payload that lacks what every checkpoint has (H18, H25).

    Raises:
        IncompatibleCheckpointError: naming the keys.
    """
    required = (layout.KEY_SCHEMA, layout.KEY_VERSION, *REQUIRED)
    missing = [key for key in required if key not in payload]
    state = payload.get(layout.KEY_TRAINING_STATE)
    counters = state if isinstance(state, Mapping) else {}
    missing += [key for key in _COUNTERS if key not in counters]
    if missing:
        raise _foreign(path, f"it lacks {', '.join(map(repr, missing))}")


def _foreign(path: Path, reason: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{path} is no checkpoint of Helios: {reason}. Move it to another folder, or correct the "
        "path."
    )


def unmigrated(path: Path) -> IncompatibleCheckpointError:
    """Return what is to be raised for a file of helios-ml, with the way to migrate it."""
    return IncompatibleCheckpointError(
        f"{path} was written by helios-ml, the earlier package, in a format that is not read any "
        f"more. Migrate it with: python -m chkpt_migrator {path.parent}"
    )


def get_trainer_safe_types_for_load() -> list[Any]:
    """Return the types, beside plain ones, that ``weights_only`` must admit for old checkpoints."""
    return [TrainingState, PosixPath, WindowsPath]


def register_trainer_types_for_safe_load() -> None:
    """Register these types with ``torch.serialization.add_safe_globals``."""
    torch.serialization.add_safe_globals(get_trainer_safe_types_for_load())
