"""The leak check itself: a leak is named, and what ends by itself is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import leaks


@contextmanager
def _child() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    child.communicate(b"\n")


def test_a_leak_is_named_and_gone_after_tidying_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_SECONDS", 0.02)
    before = leaks.take_snapshot()
    with _child():
        found = before.leaks()
    assert any("child processes" in text for text in found), found
    assert before.leaks() == []
