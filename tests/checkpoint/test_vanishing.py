"""A run goes on in the folder that is looked at: it commits a checkpoint and deletes another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint import file_names, loading
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.storage import codec
from tests.checkpoint.helpers import is_same, make_payload, save

STEPS = {
    "listing": (os, "scandir"),
    "sidecar": (loading, "read_sidecar"),
    "bytes": (loading, "digest_file"),
    "opening": (codec, "read"),
    "mapping": (torch, "load"),
}


class Training:
    """Keeps one checkpoint, and saves the next one before the operations that a test names."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path, CheckpointStore(keep_last=1))
        self.count = 0
        self.save()

    def save(self) -> None:
        self.count += 1
        save(self.folder, 1, self.count)

    @property
    def newest(self) -> Path:
        return self.folder.path / f"run_epoch_1_iter_{self.count}.pth"

    def saves_before(
        self, patch: pytest.MonkeyPatch, step: str, *, times: int = 1
    ) -> Callable[..., Any]:
        """Save right before the first calls of an operation, which looks at what was newest."""
        module, name = STEPS[step]
        original = getattr(module, name)
        rest = [None] * times

        def call(*args: Any, **kwargs: Any) -> Any:
            if rest:
                rest.pop()
                with pytest.MonkeyPatch.context() as inner:
                    inner.setattr(module, name, original)
                    self.save()
            return original(*args, **kwargs)

        patch.setattr(module, name, call)
        return original


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def _make_listings_late(training: Training, patch: pytest.MonkeyPatch, *, times: int) -> None:
    """Let the training save between the first listings and their use."""
    scandir, rest = os.scandir, [None] * times

    def look(folder: Any) -> Any:
        with scandir(folder) as entries:
            listed = list(entries)
        if rest:
            rest.pop()
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(os, "scandir", scandir)
                training.save()
        return contextlib.nullcontext(listed)

    patch.setattr(os, "scandir", look)


def test_a_listing_made_while_a_run_saves_is_made_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_listings_late(training, monkeypatch, times=2)
    assert file_names.find_last_checkpoint(training.folder.path) == training.newest
    assert training.count == 3


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_deleted_while_it_is_loaded_is_no_error_and_the_newer_one_is_taken(
    training: Training, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    training.saves_before(monkeypatch, step, times=3)
    loaded = RunFolder(training.folder.path).load_newest(renames_damaged=False)
    assert loaded is not None
    assert training.count == 4
    assert loaded.path == training.newest
    assert is_same(loaded.payload, make_payload(1, training.count))
