"""Memory of a process in huge pages: it is forked in a third of the time.

A fork copies the table of all pages, and each end of a child gives one back: for the hundreds of
megabytes of an imported PyTorch that is most of what a short child costs. Pages of 2 MB have 512
times fewer entries; where a page is written to later, the kernel divides it again.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_SIZE = 1 << 21
_MAPS = Path("/proc/self/maps")
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_PRIVATE = "rw-p"


def collapse() -> None:
    """Join the private memory of this process into huge pages where the system can."""
    if sys.platform != "linux" or not _MAPS.exists():
        return
    libc = ctypes.CDLL(None)
    for line in _MAPS.read_text().splitlines():
        addresses, rights, *_, name = f"{line} -".split()[:7]
        if rights != _PRIVATE or name not in ("-", "[heap]"):
            continue
        begin, end = (int(text, 16) for text in addresses.split("-"))
        for start in range(-(-begin // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE):
            # A refusal, as by an older kernel, leaves the pages as they are.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_SIZE), _COLLAPSE)
