"""Writes exported weights to a folder, which has its name only when it is complete.

It is written beside its place, and renamed. A note in it says what it holds, so that nothing but an
export is ever replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from helios.checkpoint.export import Weights
from helios.checkpoint.export_files import (
    already_there,
    check_strided,
    refuse_checkpoint_name,
    safetensors_writer,
)
from helios.core.sharded_tensors import value_of
from helios.errors import ArgumentError, CheckpointError
from helios.storage import files

NOTE_NAME = "helios_export.json"
CONFIG_NAME = "config.json"
_REPLACED_SUFFIX = f".replaced{files.TEMPORARY_SUFFIX}"
_NOTE_DRAFT = files.temporary_path(Path(NOTE_NAME)).name
_SCHEMA = 1


class FolderFormat(ABC):
    """A format whose exports are folders."""

    @abstractmethod
    def write(self, folder: Path, weights: Weights, metadata: Mapping[str, str]) -> None:
        """Write the files of an export, durably.

        Args:
            folder: an empty folder.
            weights: the tensors.
            metadata: describes their origin.

        Raises:
            CheckpointError: if the format cannot hold a tensor.
            UsageError: if a package is not installed.
            OSError: if the disk fails.
        """


@final
@dataclasses.dataclass(frozen=True)
class HuggingFace(FolderFormat):
    """The folder that ``from_pretrained`` of transformers loads.

    Memory is needed for the tensors of one file.

    Attributes:
        max_bytes: the size of a file; one tensor that is larger gets a file of its own.
        config: the content of ``config.json``; ``None`` without one.
    """

    max_bytes: int
    config: bytes | None = None

    def write(self, folder: Path, weights: Weights, metadata: Mapping[str, str]) -> None:
        """Write the tensors to one or several files, with an index; see the base."""
        write = safetensors_writer(metadata)
        groups = list(self._groups(weights))
        count = len(groups)
        named = {_part_name(number, count): group for number, group in enumerate(groups, 1)}
        for file, group in named.items():
            write(folder / file, weights.read(group))
        if count > 1:
            table = {
                "metadata": {"total_size": weights.num_bytes},
                "weight_map": {name: file for file, group in named.items() for name in group},
            }
            _write_bytes(folder / "model.safetensors.index.json", _json_bytes(table))
        if self.config is not None:
            _write_bytes(folder / CONFIG_NAME, self.config)

    def _groups(self, weights: Weights) -> Iterator[list[str]]:
        """Yield the names for each file: as many as fit, in their order."""
        group: list[str] = []
        size = 0
        for name, tensor in weights.tensors.items():
            added = tensor.numel() * tensor.element_size()
            if group and size + added > self.max_bytes:
                yield group
                group, size = [], 0
            group.append(name)
            size += added
        yield group


def _part_name(number: int, count: int) -> str:
    part = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
    return f"model{part}.safetensors"


@final
class DistributedCheckpoint(FolderFormat):
    """The folder that ``torch.distributed.checkpoint`` loads.

    Memory is needed for one tensor.
    """

    def write(self, folder: Path, weights: Weights, metadata: Mapping[str, str]) -> None:
        """Write each tensor to a file; see the base."""
        from helios.storage.dcp_folder import write_dcp_folder

        for name, tensor in weights.tensors.items():
            check_strided(name, tensor, "dcp")
        write_dcp_folder(folder, weights.tensors, value_of)


def write_folder(
    path: Path,
    weights: Weights,
    layout: FolderFormat,
    *,
    metadata: Mapping[str, str],
    replaces: bool = False,
) -> list[str]:
    """Write weights to a folder, durably.

    A kill leaves the whole folder or, under this name, nothing; an old export that is replaced may
    then be beside it, at ``<name>.replaced.tmp``.

    Args:
        path: the folder.
        weights: the tensors.
        layout: the format.
        metadata: describes their origin.
        replaces: whether an existing export may be replaced.

    Returns:
        The names of its files.

    Raises:
        ArgumentError: if there is something at the path that may not be replaced, or it is named
            like a checkpoint.
        CheckpointError: if the format cannot hold a tensor, or there is something else at a
            temporary path.
        UsageError: if a package is not installed.
        OSError: if the disk fails.
    """
    refuse_checkpoint_name(path)
    if path.name in ("", ".."):
        raise ArgumentError(
            f"Exported weights need a folder with a name, which they get when they are complete, "
            f"got {path}. Write out its name."
        )
    files.make_folder(path.parent)
    _check_replaceable(path, replaces=replaces)
    draft = files.temporary_path(path)
    _remove_own(draft)
    names = _write_draft(draft, weights, layout, metadata)
    _rename(draft, path)
    return names


def _write_draft(
    draft: Path, weights: Weights, layout: FolderFormat, metadata: Mapping[str, str]
) -> list[str]:
    try:
        files.make_folder(draft)
        # First of all, so that what a kill leaves is known as ours.
        _write_note(draft, [], metadata)
        layout.write(draft, weights, metadata)
        names = sorted(each.name for each in draft.iterdir())
        _write_note(draft, names, metadata)
        files.fsync_folder(draft)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(draft)
        raise
    return names


def _rename(draft: Path, path: Path) -> None:
    replaced = path.with_name(path.name + _REPLACED_SUFFIX)
    if not path.exists():
        files.replace(draft, path)
    else:
        _remove_own(replaced)
        files.replace(path, replaced)
        try:
            files.replace(draft, path)
        except OSError:
            files.replace(replaced, path)
            raise
    files.fsync_folder(path.parent)
    _remove_own(replaced)


def _write_note(folder: Path, names: list[str], metadata: Mapping[str, str]) -> None:
    note = {"schema": _SCHEMA, "files": names, "metadata": dict(metadata)}
    files.write_text_durably(folder / NOTE_NAME, json.dumps(note, indent=2) + "\n")


def _read_note(folder: Path) -> list[str] | None:
    """Return the names of the files in an export; ``None`` if the folder is none."""
    try:
        note: Any = json.loads((folder / NOTE_NAME).read_text("utf-8"))
        names = note["files"]
        return [str(name) for name in names] if isinstance(names, list) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check_replaceable(path: Path, *, replaces: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not replaces:
        raise already_there(path)
    names = None if path.is_symlink() else _read_note(path)
    if names is None:
        raise ArgumentError(
            f"{path} is not a folder that Helios has exported, so it is not replaced. Choose "
            "another name, or move it away."
        )
    others = sorted({each.name for each in path.iterdir()} - {NOTE_NAME, *names})
    if others:
        raise ArgumentError(
            f"{path} also holds {', '.join(others[:3])}, which Helios has not exported, so it is "
            "not replaced. Choose another name, or move them away."
        )


def _remove_own(folder: Path) -> None:
    """Remove what a kill has left of an export."""
    if not folder.exists() and not folder.is_symlink():
        return
    is_own = not folder.is_symlink() and folder.is_dir()
    if is_own and _read_note(folder) is None:
        # The kill came before the note.
        is_own = {each.name for each in folder.iterdir()} <= {_NOTE_DRAFT}
    if not is_own:
        raise CheckpointError(
            f"{folder} is in the way: it is not what a killed export has left. Move it away."
        )
    _remove(folder)


def _remove(folder: Path) -> None:
    for each in sorted(folder.iterdir()):
        # The note is the last one, so that a kill leaves what is known as ours.
        if each.name != NOTE_NAME:
            files.unlink(each)
    files.remove_folder(folder)


def _json_bytes(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()


def _write_bytes(path: Path, data: bytes) -> None:
    with files.create(path) as handle:
        files.write(handle, data)
        files.fsync(handle)
