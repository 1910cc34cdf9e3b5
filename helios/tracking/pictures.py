"""Pictures as PNG files: the same picture gives the same bytes, and the same name."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from helios.errors import UsageError
from helios.storage import files

_KINDS = {1: 0, 3: 2, 4: 6}
"""Colour types of PNG, by the number of channels."""
_DIGITS = 32
_LEVEL = 1


def as_pixels(name: str, image: torch.Tensor | npt.NDArray[Any], axes: str) -> npt.NDArray[Any]:
    """Return a picture as bytes, of the shape ``(height, width, channels)``.

    Args:
        name: its name, for messages.
        image: floats in [0, 1], or bytes.
        axes: ``"CHW"``, ``"HWC"`` or ``"HW"``.

    Raises:
        UsageError: for another shape, or other values.
    """
    found = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if axes not in ("CHW", "HWC", "HW") or found.ndim != len(axes):
        raise UsageError(
            f"The picture {name!r} must have axes CHW, HWC or HW, got the shape {found.shape} with "
            f"dataformats={axes!r}. Pass one picture, and its dataformats."
        )
    found = found[..., None] if axes == "HW" else found
    found = found.transpose(1, 2, 0) if axes == "CHW" else found
    if found.shape[2] not in _KINDS or not found.size:
        raise UsageError(
            f"The picture {name!r} must have 1, 3 or 4 channels and no empty axis, got the shape "
            f"{found.shape} (height, width, channels). Convert it."
        )
    if found.dtype != np.uint8:
        if found.dtype.kind != "f" or not ((found >= 0) & (found <= 1)).all():
            raise UsageError(
                f"The picture {name!r} must be floats in [0, 1] or bytes, got {found.dtype} in "
                f"[{found.min()}, {found.max()}]. Scale it."
            )
        found = np.rint(found * 255).astype(np.uint8)
    return np.ascontiguousarray(found)


def encode_png(pixels: npt.NDArray[Any]) -> bytes:
    """Return pixels of :func:`as_pixels` as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    # Each line begins with the number of its filter; 0 is none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), _LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def store(folder: Path, pixels: npt.NDArray[Any]) -> str:
    """Write a picture into a folder, unless it is there, and return the name of the file.

    The name is a digest of the pixels, because libraries compress them to different bytes.
    """
    digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
    path = folder / f"{digest[:_DIGITS]}.png"
    if not path.exists():
        files.make_folder(folder)
        with files.replacing(path) as partial, files.create(partial) as handle:
            files.write(handle, encode_png(pixels))
            files.fsync(handle)
    return path.name
