"""Steps from each format to the next, and errors for files that need one.

A step converts the content of a file, as a dictionary, from one schema to the next. Files of
helios-ml have no schema: only :mod:`helios.migration` reads them, so that a start never takes an
old file for one of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.record import REQUIRED
from helios.counters import TrainingState
from helios.errors import IncompatibleCheckpointError

Step = Callable[[dict[str, Any]], dict[str, Any]]

_COUNTERS = ("global_epoch", "global_iteration")
# Modules whose objects the released versions of helios-ml pickled; Helios writes none of them.
_OLD_MODULES = ("helios.", "pathlib.")


def upgrade(
    payload: dict[str, Any], steps: Mapping[int, Step], *, to: int = file_names.SCHEMA
) -> dict[str, Any]:
    """Upgrade the content of a file to a schema, one step after another.

    Args:
        payload: the content, with its ``schema``.
        steps: by the schema that each starts from; :data:`STEPS`.
        to: the target schema.
    """
    while (schema := payload[file_names.KEY_SCHEMA]) < to:
        payload = steps[schema](payload) | {file_names.KEY_SCHEMA: schema + 1}
    return payload


STEPS: Mapping[int, Step] = {}
"""The step from each released schema to the next; none has a successor yet."""


def refuse_old_globals(path: Path, names: Iterable[str]) -> None:
    """Refuse a file that refers to objects that only helios-ml wrote.

    Raises:
        IncompatibleCheckpointError: with the way to migrate the file.
    """
    if any(name.startswith(_OLD_MODULES) for name in names):
        raise unmigrated(path)


def refuse_unmigrated(path: Path, payload: Any) -> None:
    """Refuse content that helios-ml has written.

    Raises:
        IncompatibleCheckpointError: with the way to migrate the file.
    """
    keys = payload if isinstance(payload, Mapping) else {}
    if file_names.KEY_TRAINING_STATE in keys and file_names.KEY_SCHEMA not in keys:
        raise unmigrated(path)


def refuse_foreign(path: Path, payload: Any) -> None:
    """Refuse content that Helios has not written.

    Raises:
        IncompatibleCheckpointError: saying what it is.
    """
    if isinstance(payload, Mapping) and file_names.KEY_SCHEMA in payload:
        return
    raise _foreign(path, f"it holds a {type(payload).__name__} without {file_names.KEY_SCHEMA!r}")


def refuse_missing_keys(path: Path, payload: Mapping[str, Any]) -> None:
    """Refuse a payload that lacks keys that every checkpoint has.

    Raises:
        IncompatibleCheckpointError: naming the keys.
    """
    required = (file_names.KEY_SCHEMA, file_names.KEY_VERSION, *REQUIRED)
    missing = [key for key in required if key not in payload]
    state = payload.get(file_names.KEY_TRAINING_STATE)
    counters = state if isinstance(state, Mapping) else {}
    missing += [key for key in _COUNTERS if key not in counters]
    if missing:
        raise _foreign(path, f"it lacks {', '.join(map(repr, missing))}")


def _foreign(path: Path, reason: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{path} is not a checkpoint of Helios: {reason}. Move it to another folder, or "
        "correct the path."
    )


def unmigrated(path: Path) -> IncompatibleCheckpointError:
    """Return the error for a file of helios-ml, with the way to migrate it."""
    return IncompatibleCheckpointError(
        f"{path} was written by helios-ml, the earlier package, in a format that is no longer "
        f"read. Migrate it with: python -m chkpt_migrator {path.parent}"
    )


def get_trainer_safe_types_for_load() -> list[Any]:
    """Return the types, beside plain ones, that ``weights_only`` must admit for old checkpoints."""
    return [TrainingState, PosixPath, WindowsPath]


def register_trainer_types_for_safe_load() -> None:
    """Register these types with ``torch.serialization.add_safe_globals``."""
    # What only lists checkpoints uses this module, and needs no PyTorch.
    import torch

    torch.serialization.add_safe_globals(get_trainer_safe_types_for_load())
