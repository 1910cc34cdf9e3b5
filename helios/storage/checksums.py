"""Checksums of the bits of a tensor or array, which show changes at less cost than a digest.

For 200 MB blake2b takes 0.31 s, ``zlib.crc32`` 0.07 s. Weighted sums of 64-bit words in torch or
NumPy are three times faster still, but miss that the signs of two float64 numbers flip together.
A cyclic redundancy check detects every change within 32 bits, and of any others, such as exchanged
elements or flipped signs, all but one in four billion.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.core.sharded_tensors import local_of

_MAX_COPIED = 1 << 16
_WORDS = 1 << 22


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, on its device; fast, but not a digest."""
    flat = local_of(tensor.detach()).reshape(-1).contiguous()
    if flat.numel() == 0 or flat.dtype is torch.bool:
        return flat.sum(dtype=torch.int64)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(width.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)


def array_sum(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of the elements of an array without objects, in order."""
    whole = np.ascontiguousarray(array)
    return zlib.crc32(whole.reshape(-1).view(np.uint8).data)


def tensor_sum(tensor: Tensor) -> int:
    """Return a checksum of a dense tensor's elements; a large one is read on its device."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.is_cpu and (flat.data_ptr() or not flat.numel()):
        # NumPy would borrow the memory, and torch resizes no memory that is lent.
        return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    flat = flat.reshape(-1).view(torch.uint8)
    if flat.numel() <= _MAX_COPIED:
        return zlib.crc32(flat.cpu().numpy().data)
    return weighted_sum(flat)


def weighted_sum(flat: Tensor) -> int:
    """Return the sum of 32-bit words, weighted by position, on their device.

    With 64-bit words the signs of two float64 numbers could flip together unnoticed.

    Args:
        flat: bytes.
    """
    is_whole = flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0
    words = flat.view(torch.int32) if is_whole else flat
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), _WORDS):
        part = words[begin : begin + _WORDS]
        places = torch.arange(begin, begin + part.numel(), device=flat.device)
        total += (part.to(torch.int64) * _weights(places)).sum()
    return int(total)


def _weights(places: Tensor) -> Tensor:
    """Return odd 64-bit pseudorandom numbers (splitmix64, Steele et al. 2014)."""
    mixed = (places + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1
