"""The step from the content of helios-ml, in plain form (schema 0), to schema 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from helios.checkpoint import schema_upgrades
from helios.core import rng
from helios.migration import helios_ml
from helios.state import Cursor, TrainingState
from helios.version import __version__

_TABLES = ("_loss_items", "_val_scores", "_running_losses", "_test_scores")
_PCG64 = "PCG64"


def _from_helios_ml(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 0 to 1: what helios-ml did not save gets a neutral value."""
    state = _take_state(old["training_state"])
    is_inside = state.dataset_iter > 0
    # Inside an epoch, the number is that of the current epoch, from 1.
    epoch = max(state.global_epoch - is_inside, 0)
    scaler = old.get(helios_ml.KEY_AMP_SCALER)
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
        # The number of processes that trained is not in the file.
        "num_replicas": 0,
        "num_threads": None,
        "options": {},
        "is_manual": None,
        # No lengths: event files of the old run are continued, and never truncated.
        "events": None,
        "migrated_from": str(old.get("version", "")),
    }
    handled = (helios_ml.KEY_AMP_SCALER, helios_ml.KEY_LOGGERS)
    others = {key: value for key, value in old.items() if key not in known and key not in handled}
    return others | _take_logs(old) | known


STEPS: Mapping[int, schema_upgrades.Step] = {0: _from_helios_ml, **schema_upgrades.STEPS}
"""All steps, from the format of helios-ml to the current one."""


def _take_state(old: Mapping[str, Any]) -> TrainingState:
    names = {field.name for field in dataclasses.fields(TrainingState)}
    # A save followed a completed update; updates were counted like iterations.
    made = {"is_step_boundary": True, "global_step": old["current_iteration"]}
    return TrainingState(**made | {name: old[name] for name in names & old.keys()})


def _take_randomness(old: Any) -> dict[str, Any]:
    """Return the generators as :mod:`helios.core.rng` holds them; newly seeded if missing."""
    found = old if isinstance(old, Mapping) else {}
    with rng.stream(rng.get_default_seed()):
        neutral = rng.get_rng_state_dict()
    state = {name: found.get(name, neutral[name]) for name in ("torch", "rand")}
    state["numpy"] = _take_numpy(found.get("numpy"))
    if "cuda" in found:
        # That of the process's only device.
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
    """Return the paths of logs, and what is known of other loggers."""
    loggers = {
        name: dict(places)
        for name, places in (old.get(helios_ml.KEY_LOGGERS) or {}).items()
        if isinstance(places, Mapping)
    }
    places = {
        "log_path": loggers.pop("root", {}).get("log_file"),
        "run_path": loggers.pop("tensorboard", {}).get("run_path"),
    }
    found = {name: place for name, place in places.items() if place is not None}
    return found | ({helios_ml.KEY_LOGGERS: loggers} if loggers else {})
