"""``scripts/kill_test.py`` in short: kills at random moments, and equal bits at the end."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from tests.support.scripts import call

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")

_SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"


def _run_script() -> None:
    runpy.run_path(str(_SCRIPT), run_name="__main__")


def try_kills(kills: int, *options: str) -> None:
    """Run the script, whose report must be clean."""
    done = call(_run_script, "--kills", kills, *options, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kills} of {kills} kills")
    places = [line.split() for line in done.stdout.splitlines()[1:]]
    assert sum(int(words[0]) for words in places) == kills, done.stdout


def test_four_kills_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    # Seldom a disk: its fsync takes most of the time.
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else tmp_path
    try_kills(4, "--seed", "3", "--steps", "10", "--folder", str(folder))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (40, ("--seed", "4")),
        (20, ("--seed", "5", "--sync")),
        (12, ("--seed", "6", "--processes", "3", "--steps", "16")),
        (4, ("--seed", "7", "--processes", "3", "--steps", "16", "--cold")),
    ],
    ids=["async", "sync", "three ranks", "by the command line"],
)
def test_more_kills_change_no_bit_either(
    kills: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    try_kills(kills, *options, "--folder", str(tmp_path))
