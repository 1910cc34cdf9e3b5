"""A number for the bits of a tensor, to see changes and differences without a digest's cost."""

from __future__ import annotations

import torch
from torch import Tensor


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, on its device: fast, and no digest."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.numel() == 0 or flat.dtype is torch.bool:
        return flat.sum(dtype=torch.int64)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(width.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)
