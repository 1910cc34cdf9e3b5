"""The most memory that a process and its GPU have used so far."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from helios.text import size_text

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def find_peak_memory() -> dict[str, int]:
    """Return peaks in bytes, without waiting for a device.

    Returns:
        ``vm_hwm`` of this process; where the system does not tell it, ``memory`` by ``ru_maxrss``,
        which may be that of the process that has started this one; ``gpu_memory`` that PyTorch has
        used on its current GPU, if it uses one.
    """
    found = _find_process_peak()
    # After an error of the device, nothing may be known of it.
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["gpu_memory"] = torch.cuda.max_memory_allocated()
    return found


def _find_process_peak() -> dict[str, int]:
    with contextlib.suppress(OSError):
        line = _PEAK.search(_STATUS.read_bytes())
        if line is not None:
            return {"vm_hwm": int(line[1]) * 1024}
    if sys.platform == "win32":
        return {}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory": peak if sys.platform == "darwin" else peak * 1024}


def peak_text(peaks: Mapping[str, int]) -> str:
    """Return the peak on the GPU, or else that of the process; empty if neither is known."""
    if "gpu_memory" in peaks:
        return f"GPU peak {size_text(peaks['gpu_memory'])}"
    if "vm_hwm" in peaks:
        return f"peak {size_text(peaks['vm_hwm'])}"
    return f"peak {size_text(peaks['memory'])} (ru_maxrss)" if "memory" in peaks else ""
