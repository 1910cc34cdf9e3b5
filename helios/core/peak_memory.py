"""The most memory that this process has used so far, as far as it is known at no cost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from helios.core.sizes import size_text


def find_peak_memory() -> dict[str, int]:
    """Return peaks in bytes, without waiting for a device.

    Returns:
        ``memory`` of this process, where the system tells it; ``gpu_memory`` that PyTorch has used
        on its current GPU, if it uses one.
    """
    # A report imports this module, and needs no PyTorch.
    import torch

    found = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["memory"] = peak if sys.platform == "darwin" else peak * 1024
    # After an error of the device, nothing may be known of it.
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["gpu_memory"] = torch.cuda.max_memory_allocated()
    return found


def peak_text(peaks: Mapping[str, int]) -> str:
    """Return the peak on the GPU, or else that of the process; empty if neither is known."""
    if "gpu_memory" in peaks:
        return f"GPU peak {size_text(peaks['gpu_memory'])}"
    return f"peak {size_text(peaks['memory'])}" if "memory" in peaks else ""
