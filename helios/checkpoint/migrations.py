"""What is known here of files that other versions wrote: enough to say what to do with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import torch

from helios.checkpoint import layout
from helios.errors import IncompatibleCheckpointError
from helios.state import TrainingState

_COUNTERS = ("global_epoch", "global_iteration")
# Modules whose objects the published helios-ml pickled; Helios writes none of them.
_OLD_MODULES = ("helios.", "pathlib.")


def refuse_old_globals(path: Path, names: Iterable[str]) -> None:
    """Refuse a file that refers to what only helios-ml put into files.

    Raises:
        IncompatibleCheckpointError: with the way to migrate the file.
    """
    if any(name.startswith(_OLD_MODULES) for name in names):
        raise _unmigrated(path)


def refuse_foreign(path: Path, payload: Any) -> None:
    """Refuse what is no payload of Helios at all.

    Raises:
        IncompatibleCheckpointError: with the way to migrate a file of helios-ml.
    """
    if isinstance(payload, Mapping) and layout.KEY_SCHEMA in payload:
        return
    if isinstance(payload, Mapping) and layout.KEY_TRAINING_STATE in payload:
        raise _unmigrated(path)
    raise _foreign(path, f"it holds a {type(payload).__name__} without {layout.KEY_SCHEMA!r}")


def refuse_missing_keys(path: Path, payload: Mapping[str, Any]) -> None:
    """Refuse a payload that lacks what every checkpoint has (H18, H25).

    Raises:
        IncompatibleCheckpointError: naming the keys.
    """
    missing = [key for key in layout.REQUIRED_KEYS if key not in payload]
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


def _unmigrated(path: Path) -> IncompatibleCheckpointError:
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
