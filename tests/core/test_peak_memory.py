"""The peak of memory is that of this process."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
held = bytearray(int(sys.argv[1]) << 20)
held[::4096] = b"x" * len(held[::4096])
if sys.argv[2:]:
    import subprocess
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2]]).returncode)
"""
_CHILD = """
from helios.core.utils import peak_memory_text
print(peak_memory_text())
"""


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    """``ru_maxrss`` is inherited over fork and exec."""
    command = [sys.executable, "-c", _SCRIPT, "800", _CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, number, unit = done.stdout.split()
    assert unit == "MiB"
    assert 20 < float(number) < 700
