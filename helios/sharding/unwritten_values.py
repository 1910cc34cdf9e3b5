"""Marks memory that nothing was written to yet, and finds what is left of the marks."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = (0xA5, 0x5B)


def fill_unwritten(tensor: Tensor, *, again: bool = False) -> Tensor:
    """Mark all elements of a tensor as unwritten, and return it.

    Floating-point numbers become NaN, which also spreads to what is computed from them; integers a
    number that could be meant.

    Args:
        tensor: the tensor.
        again: whether to use another number. An integer was meant unless it is marked both times.
    """
    if not is_exact(tensor):
        return tensor.fill_(float("nan"))
    bits, mark = _mark(tensor, _BYTES[again])
    bits.fill_(mark)
    return tensor


def has_nan(tensor: Tensor) -> bool:
    """Return whether an element of a tensor of floating-point numbers is NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor if tensor.element_size() > 1 else tensor.float()
    # A minimum needs no memory for each element, and that of a NaN and anything is NaN.
    return bool(wide.amin().isnan())


def find_unwritten(tensor: Tensor, *, again: bool = False) -> Tensor:
    """Return which integers of a tensor are what :func:`fill_unwritten` marks them with."""
    bits, mark = _mark(tensor, _BYTES[again])
    return bits == mark


def is_exact(tensor: Tensor) -> bool:
    """Return whether elements are integers, of which none is a mark for certain."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _mark(tensor: Tensor, byte: int) -> tuple[Tensor, int]:
    """Return a tensor as one of numbers, and the number that marks its elements."""
    bits = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    pattern = bytes([byte]) * bits.element_size()
    return bits, int.from_bytes(pattern, "little", signed=bits.dtype.is_signed)
