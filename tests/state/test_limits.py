"""What is too large is named at every capture."""

from __future__ import annotations

import threading

import pytest

from tests.state.owners import Owner, changed, started


@pytest.mark.shows("S50")
def test_what_is_too_large_is_missing_at_every_capture_and_named_once(said: list[str]) -> None:
    owner = Owner(big=b"", helper=threading.Lock())
    discovery = started(owner)
    discovery.limit = 2**20
    owner.big, owner.helper = b"x" * 2**21, threading.Lock()
    for _ in range(3):
        missing = discovery.capture()["missing"]
        assert list(missing) == ["big", "helper"]
        assert missing["big"].startswith("plain values are saved up to a total of 1 MiB: register ")
        assert "lock" in missing["helper"]
    assert len(said) == 1
    owner.big, owner.helper = b"x", None
    assert not discovery.capture()["missing"]
    assert sorted(changed(discovery)) == ["big", "helper"]
