"""The leak check itself: each kind of leak is named, and what ends by itself is none."""

from __future__ import annotations

import logging
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


@contextmanager
def _handler() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.getLogger("helios").addHandler(handler)
    yield
    logging.getLogger("helios").removeHandler(handler)


_LEAKS = {
    "child processes": _child,
    "loggers": _handler,
}


@pytest.mark.parametrize("name", _LEAKS)
def test_a_leak_is_named_and_gone_after_tidying_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_GRACE_SECONDS", 0.02)
    before = leaks.take_snapshot()
    with _LEAKS[name]():
        found = before.leaks()
    assert any(name in text for text in found), found
    assert before.leaks() == []
