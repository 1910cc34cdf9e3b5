"""Converts what helios-ml, the earlier package, wrote into its files to the format of Helios.

Its objects are read as inert stubs with their names and parts; here they become plain values, and
the file the content of a checkpoint of the current schema. The old package is never imported, and
nothing in a file is called.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from helios.checkpoint import file_names
from helios.core import rng
from helios.counters import Cursor, TrainingState
from helios.storage.codec import Unknown
from helios.version import __version__

KEY_AMP_SCALER = "amp_scaler"
KEY_LOGGERS = "loggers"

_STATE = "helios.trainer.TrainingState"
# The present module of the class, which scripts may also write in the old form.
_PRESENT_STATE = "helios.counters.TrainingState"
_FILE_KEYS = "helios.trainer._CheckpointKeys"
_MODEL_KEYS = "helios.model.model._InternalStateKeys"
_USER_KEY = "user"
_BYTES = "builtins.bytes"

_POSIX = ("PosixPath", "PurePosixPath")
_WINDOWS = ("WindowsPath", "PureWindowsPath")
# Python 3.13 keeps the classes in another module; NumPy 2 has renamed its own.
_PATH_MODULES = ("pathlib", "pathlib._local")
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
# Numbers and texts by kind and size; no Python objects.
_DTYPE = re.compile(r"[?biufcSU][0-9]*")
_ORDERS = ("<", ">", "=", "|")
_COUNTERS = ("current_iteration", "global_iteration", "global_epoch", "dataset_iter")
_TABLES = ("_loss_items", "_val_scores", "_running_losses", "_test_scores")
_PCG64 = "PCG64"


class NotAsWrittenError(Exception):
    """Something in a file differs from what any release of helios-ml has written."""


def _make_path(kind: type[PurePosixPath | PureWindowsPath]) -> Callable[[Unknown], str]:
    def convert(value: Unknown) -> str:
        if not all(isinstance(part, str) for part in value.parts):
            raise NotAsWrittenError(f"a path consists of {value.parts!r}")
        return str(kind(*value.parts))

    return convert


def _make_key(value: Unknown) -> str:
    if len(value.parts) != 1 or not isinstance(value.parts[0], str):
        raise NotAsWrittenError(f"{value.name} has the value {value.parts!r}")
    return value.parts[0]


def _make_state(value: Unknown) -> dict[str, Any]:
    if len(value.parts) != 1 or not isinstance(value.parts[0], dict):
        raise NotAsWrittenError("the training state has no fields")
    return dict(value.parts[0])


def _make_dtype(value: Any) -> np.dtype[Any]:
    name, *rest = value.parts if isinstance(value, Unknown) else ("",)
    is_plain = isinstance(value, Unknown) and value.name == "numpy.dtype"
    if not is_plain or not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise NotAsWrittenError(f"a NumPy array has elements of {name or value!r}")
    state = rest[-1] if rest else ()
    order: Any = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
    if order not in _ORDERS:
        raise NotAsWrittenError(f"a NumPy array has the byte order {order!r}")
    result: np.dtype[Any] = np.dtype(name).newbyteorder(order)
    return result


def _make_bytes(value: Unknown) -> bytes:
    # Others are written as text.
    if value.parts:
        raise NotAsWrittenError(f"bytes are made of {value.parts!r}")
    return b""


def _as_bytes(data: Any) -> bytes:
    if isinstance(data, Unknown) and data.name == _BYTES:
        return _make_bytes(data)
    if not isinstance(data, bytes):
        raise TypeError(f"{type(data).__name__} in the place of its bytes")
    return data


def _make_array(value: Unknown) -> np.ndarray[Any, Any]:
    try:
        _version, shape, dtype, is_fortran, data = value.parts[-1]
        flat = np.frombuffer(_as_bytes(data), _make_dtype(dtype))
        array = flat.reshape(shape, order="F" if is_fortran else "C")
        result: np.ndarray[Any, Any] = array.copy(order="K")
        return result
    except (ValueError, TypeError, IndexError) as error:
        raise NotAsWrittenError(f"a NumPy array cannot be read: {error}") from error


def _make_scalar(value: Unknown) -> Any:
    try:
        dtype, data = value.parts
        return np.frombuffer(_as_bytes(data), _make_dtype(dtype))[0]
    except (ValueError, TypeError, IndexError) as error:
        raise NotAsWrittenError(f"a NumPy number cannot be read: {error}") from error


_CONVERTERS: dict[str, Callable[[Unknown], Any]] = {
    _STATE: _make_state,
    _PRESENT_STATE: _make_state,
    _FILE_KEYS: _make_key,
    _MODEL_KEYS: _make_key,
    **{f"{m}.{name}": _make_path(PurePosixPath) for m in _PATH_MODULES for name in _POSIX},
    **{f"{m}.{name}": _make_path(PureWindowsPath) for m in _PATH_MODULES for name in _WINDOWS},
    **{f"{module}._reconstruct": _make_array for module in _ARRAY_MODULES},
    **{f"{module}.scalar": _make_scalar for module in _ARRAY_MODULES},
    "numpy.dtype": _make_dtype,
    _BYTES: _make_bytes,
}
NAMES = frozenset((*_CONVERTERS, "numpy.ndarray"))
"""Full names of all objects but tensors that the releases have written."""


class _Converter:
    """One walk over a tree; shared values are converted each time they occur."""

    def __init__(self) -> None:
        self._memo: dict[int, tuple[Any, Any]] = {}

    def convert(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        if isinstance(value, Unknown):
            return self._remember(value, self._replace(value))
        if type(value) is list:
            result: list[Any] = self._remember(value, [])
            result.extend(map(self.convert, value))
            return result
        if type(value) is tuple:
            return self._remember(value, tuple(map(self.convert, value)))
        if type(value) in (dict, OrderedDict):
            return self._fill(value)
        return value

    def _fill(self, value: Any) -> Any:
        result = self._remember(value, type(value)())
        for key, item in value.items():
            result[self.convert(key)] = self.convert(item)
        if isinstance(value, OrderedDict):
            # The versions of a network's modules, with which torch migrates their state.
            vars(result).update(self.convert(vars(value)))
        return result

    def _replace(self, value: Unknown) -> Any:
        if value.name not in _CONVERTERS:
            raise NotAsWrittenError(f"{value.name} occurs by itself")
        return self.convert(_CONVERTERS[value.name](value))

    def _remember(self, value: Any, result: Any) -> Any:
        # The value is kept alive, because its id could be reused otherwise.
        self._memo[id(value)] = (value, result)
        return result


def find(tree: Any, name: str) -> Any:
    """Return the value of a key of the file, plain or an enum's member; ``None`` if missing."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            plain = key.parts[0] if isinstance(key, Unknown) and key.parts else key
            if isinstance(plain, str) and plain == name:
                return value
    return None


def is_old(tree: Any) -> bool:
    """Return whether a tree is the content of a file that helios-ml wrote."""
    is_ours = find(tree, file_names.KEY_SCHEMA) is not None
    return not is_ours and find(tree, file_names.KEY_TRAINING_STATE) is not None


def convert(tree: Any, *, stem: str) -> dict[str, Any]:
    """Return the content of a file of helios-ml as that of a checkpoint of the present schema.

    What helios-ml did not save gets a neutral value.

    Args:
        tree: the file, with stubs for objects.
        stem: its name without suffix.

    Raises:
        NotAsWrittenError: for what no release has written.
    """
    try:
        plain: dict[Any, Any] = _Converter().convert(dict(tree))
    except RecursionError:
        raise NotAsWrittenError("it is nested too deeply") from None
    if _is_split(find(tree, file_names.KEY_MODEL)):
        inner = plain[file_names.KEY_MODEL]
        plain[file_names.KEY_MODEL] = inner.get(_USER_KEY, {})
        plain[KEY_AMP_SCALER] = inner.get(KEY_AMP_SCALER)
    state = plain[file_names.KEY_TRAINING_STATE]
    if not isinstance(state, dict) or not all(type(state.get(name)) is int for name in _COUNTERS):
        raise NotAsWrittenError(f"it lacks one of the counters {', '.join(_COUNTERS)}")
    if file_names.KEY_VERSION not in plain and _counts_from_zero(state, stem):
        plain[file_names.KEY_TRAINING_STATE] = state | {"global_epoch": state["global_epoch"] + 1}
    return _to_present(plain)


def _is_split(model: Any) -> bool:
    # Release 2 puts the user's state beside its own, under members of an enum. A user's own
    # dictionary may well have a key of the same text.
    keys = model if isinstance(model, Mapping) else {}
    return any(isinstance(key, Unknown) and key.name == _MODEL_KEYS for key in keys)


def _counts_from_zero(state: Mapping[str, Any], stem: str) -> bool:
    """Return whether the current epoch counts from 0, as in releases 0.1 by iterations.

    Their files have no version. Epochs are of one length, so the counters decide in most cases; in
    the others the name may.
    """
    epoch: int = state["global_epoch"]
    begun: int = state["dataset_iter"]
    before: int = state["global_iteration"] - begun
    if not begun:
        return False

    def can_be(completed: int) -> bool:
        if completed <= 0 or before <= 0:
            return completed == before == 0
        return before % completed == 0 and before // completed >= begun

    place = file_names.parse(f"{stem}{file_names.SUFFIX}")
    is_ahead = place is not None and place[0] == epoch + 1
    return can_be(epoch) and (is_ahead or not can_be(epoch - 1))


def _to_present(old: dict[str, Any]) -> dict[str, Any]:
    state = _take_state(old["training_state"])
    is_inside = state.dataset_iter > 0
    # Inside an epoch, the number is that of the current epoch, from 1.
    epoch = max(state.global_epoch - is_inside, 0)
    scaler = old.get(KEY_AMP_SCALER)
    known = {
        file_names.KEY_SCHEMA: file_names.SCHEMA,
        "version": __version__,
        "training_state": state.dict() | {"global_epoch": epoch + is_inside},
        "cursor": Cursor(epoch=epoch, batch=state.dataset_iter).dict(),
        "model": old.get("model", {}),
        "tables": {name: {} for name in _TABLES},
        "by_rank": [],
        "plugins": {},
        "loops": {},
        "owners": {},
        "missing": {},
        "claims": [],
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
    handled = (KEY_AMP_SCALER, KEY_LOGGERS)
    others = {key: value for key, value in old.items() if key not in known and key not in handled}
    return others | _take_logs(old) | known


def _take_state(old: Mapping[str, Any]) -> TrainingState:
    names = {field.name for field in dataclasses.fields(TrainingState)}
    # A save followed a completed update; updates were counted like iterations.
    made = {"is_step_boundary": True, "global_step": old["current_iteration"]}
    return TrainingState(**made | {name: old[name] for name in names & old.keys()})


def _take_randomness(old: Any) -> dict[str, Any]:
    """Return the generators as :mod:`helios.core.rng` holds them; newly seeded if missing."""
    found = old if isinstance(old, Mapping) else {}
    with rng.stream(rng.get_default_seed()):
        neutral = rng.read_states()
    names = ("torch", "rand", "numpy_global")
    state = {name: found.get(name, neutral[name]) for name in names}
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
        for name, places in (old.get(KEY_LOGGERS) or {}).items()
        if isinstance(places, Mapping)
    }
    places = {
        "log_path": loggers.pop("root", {}).get("log_file"),
        "run_path": loggers.pop("tensorboard", {}).get("run_path"),
    }
    found = {name: place for name, place in places.items() if place is not None}
    return found | ({KEY_LOGGERS: loggers} if loggers else {})
