"""Removes what a save leaves behind that was killed before its commit."""

from __future__ import annotations

import logging
from pathlib import Path

from helios.checkpoint import file_names, loading
from helios.errors import CheckpointError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove partial files of a killed save; other files are not touched.

    Args:
        folder: the folder of a run, which no other process changes meanwhile.

    Returns:
        The committed checkpoints of the same listing, oldest first.
    """
    present = file_names.list_files(folder)
    for path in present:
        if not file_names.is_temporary(path) and not _is_orphan(path):
            continue
        try:
            if file_names.is_folder(path):
                files.remove_folder(path)
            else:
                files.unlink(path, missing_ok=True)
        except OSError as error:
            _LOGGER.warning(
                "The partial file of a killed save, %s, could not be removed: %s. It does no "
                "harm; delete it when you can.",
                path,
                error,
            )
    return file_names.select_checkpoints(present)


def _is_orphan(path: Path) -> bool:
    is_named_so = path.suffix == file_names.SIDECAR_SUFFIX and file_names.parse(path) is not None
    if not is_named_so or any(each.exists() for each in file_names.described_by(path)):
        return False
    # A user's own JSON file may have such a name: only sidecars are removed.
    try:
        sidecar = loading.read_sidecar(path)
    except (CheckpointError, OSError):
        return False
    if sidecar is None:
        return False
    return not sidecar.names_run or (sidecar.epoch, sidecar.iteration) == file_names.parse(path)
