"""Writes exported weights to one file: safetensors, or what ``torch.load`` reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from helios.checkpoint import file_names
from helios.checkpoint.export import Weights
from helios.errors import ArgumentError, CheckpointError, UsageError
from helios.storage import codec, files

FILE_FORMATS = ("safetensors", "pt")


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
        UsageError: if safetensors is requested and not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    refuse_checkpoint_name(path)
    if path.exists() and not replaces:
        raise already_there(path)
    write = safetensors_writer(metadata) if kind == "safetensors" else None
    with files.replacing(path) as partial:
        if write is None:
            _write_pt(partial, weights)
        else:
            write(partial, weights.read())


def refuse_checkpoint_name(path: Path) -> None:
    """Refuse a name that a training would take for a checkpoint, or for a part of one.

    Raises:
        ArgumentError: for such a name.
    """
    if file_names.is_checkpoint(path):
        raise ArgumentError(
            f"Exported weights must not be named like a checkpoint, got {path}: a training would "
            "load it. Choose another name."
        )
    if any(map(file_names.is_checkpoint, path.absolute().parents)):
        raise ArgumentError(
            f"Exported weights must not be in the folder of a checkpoint, got {path}: no training "
            "would load it then. Choose another folder."
        )


def already_there(path: Path) -> ArgumentError:
    """Return the error for an export that is there already."""
    return ArgumentError(
        f"{path} exists already. Choose another name, or overwrite it with --force."
    )


def _write_pt(path: Path, weights: Weights) -> None:
    state = OrderedDict((name, part.detach()) for name, part in weights.read().items())
    if weights.versions:
        vars(state)["_metadata"] = OrderedDict(weights.versions)
    codec.write_file(path, state)


def safetensors_writer(metadata: Mapping[str, str]) -> Callable[[Path, Mapping[str, Tensor]], None]:
    """Return a function that writes tensors with values to a file, durably.

    Args:
        metadata: the header.

    Raises:
        UsageError: if safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "Exporting to safetensors needs the package safetensors, which is not installed. "
            'Install it with: pip install "helios-trainer[safetensors]", or export to pt.'
        ) from error

    def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
        separate = _apart(tensors)
        try:
            safetensors.torch.save_file(separate, path, metadata=dict(metadata))
        except Exception as error:
            raise CheckpointError(
                f"{path} was not written: safetensors reports {error}. Check the disk; types that "
                "safetensors does not support can be exported to pt."
            ) from error
        with path.open("r+b") as handle:
            files.fsync(handle)

    return write


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        check_strided(name, tensor, "safetensors")
        part = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = part.untyped_storage()
        size = part.numel() * part.element_size()
        if storage.data_ptr() in seen or storage.nbytes() != size:
            part = part.clone()
        seen.add(part.untyped_storage().data_ptr())
        result[name] = part
    return result


def check_strided(name: str, tensor: Tensor, target: str) -> None:
    """Refuse a tensor that only ``pt`` can hold, such as a sparse one; raises CheckpointError."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name} is {tensor.layout}, {tensor.dtype}, which {target} cannot hold. Export to pt."
        )
