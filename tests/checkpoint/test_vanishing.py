"""A run goes on in the folder that is looked at: it commits a checkpoint and deletes another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint import loading
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


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_deleted_while_it_is_loaded_is_no_error_and_the_newer_one_is_taken(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three loads looks at what is no longer the newest one."""
    folder = RunFolder(tmp_path / "run", CheckpointStore(keep_last=1))
    newest = [save(folder, 1, 1)]
    module, name = STEPS[step]
    original = getattr(module, name)

    def save_before(*args: Any, **kwargs: Any) -> Any:
        if len(newest) < 4:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(module, name, original)
                newest.append(save(folder, 1, len(newest) + 1))
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, save_before)
    loaded = RunFolder(folder.path).load_newest(renames_damaged=False)
    assert loaded is not None
    assert (len(newest), loaded.path) == (4, newest[-1])
    assert is_same(loaded.payload, make_payload(1, 4))
