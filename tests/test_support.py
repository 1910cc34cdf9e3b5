"""The helpers of these tests: the choice of restarts, and processes that are ended."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tier
from tests.support.resume import restarts_of
from tests.support.started import end_all, started

# Starts a process in another session, which says that it is there, and waits for it, or does not.
_PARENT = """
import subprocess, sys
child = subprocess.Popen(["sh", "-c", "echo there; exec sleep 600"], start_new_session=True)
if sys.argv[1] == "waits":
    child.wait()
"""
CHECKPOINTS = [Path(f"run_epoch_1_iter_{number}.pth") for number in range(14)]


def test_restarts_of_the_default_tier_reach_every_place_of_an_epoch_and_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier, "is_full", lambda: False)
    places = set()
    for number in range(32):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test[{number}]")
        found = restarts_of(CHECKPOINTS)
        assert found[-2:] == CHECKPOINTS[-2:]
        assert 4 <= len(found) <= 5
        places |= {CHECKPOINTS.index(path) for path in found}
    assert places == set(range(14))
    assert restarts_of(CHECKPOINTS[:5]) == CHECKPOINTS[:5]


def test_each_worker_begins_with_files_of_long_tests() -> None:
    def make(number: int) -> Any:
        mark = True if number in (7, 8, 18) else None
        return SimpleNamespace(path=number // 5, get_closest_marker=lambda _: mark)

    items = [make(number) for number in range(20)]
    places = [items.index(item) for item in tier.deal(items, 2)]
    assert sorted(places) == [*range(20)]
    assert (places[:3], places[10:12]) == ([7, 8, 0], [18, 10])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("parent", "end"), [("waits", "error"), ("ends", "all")])
def test_nothing_is_left_of_a_command(parent: str, end: str) -> None:
    command = [sys.executable, "-c", _PARENT, parent]
    reader, writer = os.pipe()
    with started(["sleep", "600"]) as other, os.fdopen(reader, "rb") as output:
        with (
            contextlib.suppress(LookupError),
            started(command, stdout=writer),
        ):
            os.close(writer)
            assert output.readline() == b"there\n"
            if end == "error":
                raise LookupError
            if end == "all":
                end_all()
        # Nobody has the other end of the pipe any more.
        ready, _, _ = select.select([output], [], [], 60)
        assert ready
        assert output.read() == b""
        assert (other.poll() is None) == (end != "all")
