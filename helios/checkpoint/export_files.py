"""Writes exported weights: to a file, or to the folder that ``from_pretrained`` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helios.checkpoint import file_names
from helios.checkpoint.export import Weights
from helios.errors import ArgumentError, CheckpointError
from helios.storage import codec, files

_MAX_BYTES = 5 * 10**9
_Writer = Callable[[Path, Mapping[str, Tensor]], None]


def write_weights(
    path: Path, weights: Weights, *, kind: str, metadata: Mapping[str, str], replaces: bool = False
) -> None:
    """Write weights to a file, durably; a kill leaves the old file or the new one.

    Args:
        path: the file.
        weights: the tensors.
        kind: ``"safetensors"``, or ``"pt"`` for a file that ``torch.load`` reads.
        metadata: header of a safetensors file that describes its origin; ``"pt"`` has none.
        replaces: whether an existing file may be overwritten.

    Raises:
        ArgumentError: if the file exists, or would be taken for a checkpoint.
        ModuleNotFoundError: if safetensors is requested and not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    _refuse_checkpoint_name(path)
    if path.exists() and not replaces:
        raise ArgumentError(
            f"{path} exists already. Choose another name, or overwrite it with --force."
        )
    write = _safetensors_writer(metadata) if kind == "safetensors" else None
    with files.replacing(path) as partial:
        if write is None:
            codec.write_file(
                partial, {name: part.detach() for name, part in weights.read().items()}
            )
        else:
            write(partial, weights.read())


def write_folder(
    path: Path,
    weights: Weights,
    *,
    metadata: Mapping[str, str],
    max_bytes: int = _MAX_BYTES,
) -> list[str]:
    """Write weights to a folder that ``from_pretrained`` of transformers loads, durably.

    Memory is needed for the tensors of one file. A kill leaves the whole folder, or nothing under
    this name.

    Args:
        path: the folder, which must not exist.
        weights: the tensors.
        metadata: header of each file that describes its origin.
        max_bytes: the size of a file; one tensor that is larger gets a file of its own.

    Returns:
        The names of its files.

    Raises:
        ArgumentError: if there is something at the path, or it is named like a checkpoint.
        ModuleNotFoundError: if safetensors is not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    _refuse_checkpoint_name(path)
    if path.exists():
        raise ArgumentError(f"{path} exists already. Choose another name, or remove it.")
    write = _safetensors_writer(metadata)
    draft = files.temporary_path(path.with_name(f"{path.name}.export"))
    # What a kill has left.
    files.remove_folder(draft)
    files.make_folder(draft)
    try:
        _write_pretrained(draft, weights, write, max_bytes)
        files.fsync_folder(draft)
        files.replace(draft, path)
    except BaseException:
        files.remove_folder(draft)
        raise
    files.fsync_folder(path.parent)
    return sorted(each.name for each in path.iterdir())


def _write_pretrained(folder: Path, weights: Weights, write: _Writer, max_bytes: int) -> None:
    groups = list(_groups(weights, max_bytes))
    names = [f"model-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
    named = {
        f"{name if len(groups) > 1 else 'model'}.safetensors": group
        for name, group in zip(names, groups, strict=True)
    }
    for file, group in named.items():
        write(folder / file, weights.read(group))
    if len(groups) > 1:
        table: dict[str, Any] = {
            "metadata": {"total_size": weights.num_bytes},
            "weight_map": {name: file for file, group in named.items() for name in group},
        }
        _write_bytes(folder / "model.safetensors.index.json", json.dumps(table, indent=2).encode())


def _groups(weights: Weights, max_bytes: int) -> Iterator[list[str]]:
    """Yield the names for each file: as many as fit, in their order."""
    group: list[str] = []
    size = 0
    for name, tensor in weights.tensors.items():
        added = tensor.numel() * tensor.element_size()
        if group and size + added > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += added
    yield group


def _write_bytes(path: Path, data: bytes) -> None:
    with files.create(path) as handle:
        files.write(handle, data)
        files.fsync(handle)


def _refuse_checkpoint_name(path: Path) -> None:
    """Refuse a name that a training would take for a checkpoint, or for a part of one."""
    if any(map(file_names.is_checkpoint, (path, *path.absolute().parents))):
        raise ArgumentError(
            f"Exported weights must not be named like a checkpoint or be in the folder of one, got "
            f"{path}: a training would load them. Choose another name."
        )


def _safetensors_writer(metadata: Mapping[str, str]) -> _Writer:
    import safetensors.torch

    def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
        for name, part in tensors.items():
            if part.layout is not torch.strided:
                raise CheckpointError(
                    f"safetensors cannot hold {name}, {part.layout}. Use --to pt."
                )
        try:
            # Each has memory of its own, and its values without a lazy sign or conjugation.
            apart = {
                name: part.detach().resolve_conj().resolve_neg().contiguous().clone()
                for name, part in tensors.items()
            }
            safetensors.torch.save_file(apart, path, metadata=dict(metadata))
        except Exception as error:
            raise CheckpointError(
                f"{path} was not written: safetensors reports {error}. Check the disk; types that "
                "safetensors does not support can be exported to pt."
            ) from error
        with path.open("r+b") as handle:
            files.fsync(handle)

    return write
