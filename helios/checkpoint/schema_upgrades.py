"""Steps from each format to the next, and errors for files that need one.

A step converts the content of a file, as a dictionary, from one schema to the next. Schema 0 is the
format of helios-ml: only :mod:`helios.migration` reads it, so that a start never takes an old file
for one of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

from helios.checkpoint import file_names
from helios.checkpoint.record import REQUIRED
from helios.errors import IncompatibleCheckpointError
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)

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

    Raises:
        IncompatibleCheckpointError: if there is no step from a lower schema.
    """
    while (schema := payload[file_names.KEY_SCHEMA]) < to:
        if schema not in steps:
            raise IncompatibleCheckpointError(
                f"Format {schema} cannot be upgraded to format {to}: there is no step from it. "
                "Install the version of Helios that wrote the file."
            )
        payload = steps[schema](payload) | {file_names.KEY_SCHEMA: schema + 1}
    return payload


def _add_what_is_missing(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 to 2: what files of schema 1 lack was not known; plain attributes were not saved."""
    new: dict[str, Any] = {"missing": {}, "claims": [], "owners": {}}
    taken = sorted(new.keys() & old.keys())
    if taken:
        _LOGGER.warning(
            "on_save_checkpoint has added %s to the checkpoint, a name that Helios uses now: "
            "on_load_checkpoint finds it with '_of_hooks' appended. Choose another name.",
            ", ".join(map(repr, taken)),
        )
    return old | {f"{key}_of_hooks": old[key] for key in taken} | new


def _name_nodes(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 to 3: values are nodes of a graph, instead of members of containers."""
    # What only lists checkpoints uses this module, and needs no PyTorch.
    from helios.checkpoint.state_upgrade import upgrade_state, upgrade_values

    def upgrade_part(own: dict[str, Any]) -> dict[str, Any]:
        places = own.get("places", {})
        values = own.get("values")
        return own | {
            "values": None if values is None else upgrade_values(values, places),
            "places": {key: part for key, part in places.items() if key == "inner"},
            "owners": {name: upgrade_state(part) for name, part in own.get("owners", {}).items()},
        }

    new = dict(old)
    if "model" in old:
        new["model"] = upgrade_state(old["model"])
    new["owners"] = {name: upgrade_state(part) for name, part in old["owners"].items()}
    new["by_rank"] = [upgrade_part(part) for part in old.get("by_rank", ())]
    return new


def _lay_out_tensors(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 3 to 4: forms, ties and shared memory of tensors are one section."""
    # What only lists checkpoints uses this module, and needs no PyTorch.
    from helios.checkpoint.state_upgrade import lay_out_tensors

    def in_owners(holder: Mapping[str, Any]) -> dict[str, Any]:
        return {name: lay_out_tensors(part) for name, part in holder.get("owners", {}).items()}

    new = old | {"owners": in_owners(old)}
    if "model" in old:
        new["model"] = lay_out_tensors(old["model"])
    new["by_rank"] = [part | {"owners": in_owners(part)} for part in old.get("by_rank", ())]
    return new


STEPS: Mapping[int, Step] = {1: _add_what_is_missing, 2: _name_nodes, 3: _lay_out_tensors}
"""The step from each schema; that from helios-ml is in :mod:`helios.migration`."""


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
