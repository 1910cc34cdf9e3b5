"""The peak of memory is that of this process, and names its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helios.core import utils
from helios.core.utils import find_peak_memory, peak_text

_SCRIPT = """
import sys
held = bytearray(int(sys.argv[1]) << 20)
held[::4096] = b"x" * len(held[::4096])
if sys.argv[2:]:
    import subprocess
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2]]).returncode)
"""
_CHILD = """
from helios.core.utils import find_peak_memory
print(max(find_peak_memory().values()))
"""


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    """``ru_maxrss`` is inherited over fork and exec."""
    command = [sys.executable, "-c", _SCRIPT, "800", _CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 20 << 20 < int(done.stdout) < 700 << 20


def test_a_peak_by_another_name_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_bytes(b"Name:\tpython\nVmHWM:\t  204800 kB\nVmRSS:\t 1024 kB\n")
    monkeypatch.setattr(utils, "_STATUS", status)
    assert peak_text(find_peak_memory()) == "peak 200 MiB"
    for content in (b"Name:\tpython\n", None):
        status.unlink()
        if content is not None:
            status.write_bytes(content)
        assert find_peak_memory()["memory"] >= 1 << 24, "in bytes"
        assert peak_text(find_peak_memory()).endswith(" (ru_maxrss)")
