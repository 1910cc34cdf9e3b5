"""A run goes on in the folder that is looked at: it commits a checkpoint and deletes another."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint import contents, file_names, loading, status
from helios.checkpoint.loading import Condition, Depth
from helios.checkpoint.status import StartOutcome
from helios.checkpoint.store import CheckpointStore, RunFolder, load_checkpoint
from helios.cli import main
from helios.errors import CheckpointError
from helios.storage import codec
from tests.checkpoint.helpers import is_same, make_payload, save

STEPS = {
    "listing": (os, "scandir"),
    "sidecar": (loading, "read_sidecar"),
    "bytes": (contents, "digest_file"),
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


@pytest.mark.parametrize("times", [1, 2])
def test_a_listing_made_while_a_run_saves_is_made_again(
    training: Training, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    _make_listings_late(training, monkeypatch, times=times)
    assert file_names.find_last_checkpoint(training.folder.path) == training.newest
    assert training.count == 1 + times


def test_a_run_that_saves_without_a_pause_never_seems_to_have_no_checkpoint(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_listings_late(training, monkeypatch, times=10_000)
    monkeypatch.setattr(file_names, "_MAX_LISTINGS", 3)
    found = file_names.find_last_checkpoint(training.folder.path)
    assert found == training.newest.with_name(f"run_epoch_1_iter_{training.count - 1}.pth")
    assert training.count == 5


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_deleted_while_it_is_loaded_is_no_error_and_the_newer_one_is_taken(
    training: Training, monkeypatch: pytest.MonkeyPatch, step: str, times: int
) -> None:
    training.saves_before(monkeypatch, step, times=times)
    loaded = RunFolder(training.folder.path).load_newest(renames_damaged=False)
    assert loaded is not None
    assert training.count == 1 + times
    assert loaded.path == training.newest
    assert is_same(loaded.payload, make_payload(1, training.count))


@pytest.mark.parametrize("step", ["sidecar", "bytes", "opening", "mapping"])
def test_a_file_that_goes_while_it_is_loaded_by_name_is_called_gone(
    training: Training, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = training.newest
    training.saves_before(monkeypatch, step)
    with pytest.raises(CheckpointError, match=r"There is no file at .*iter_1\.pth") as caught:
        load_checkpoint(path)
    assert type(caught.value) is CheckpointError


def _read_all(path: Path) -> status.Status:
    return status.examine(path, Depth.BYTES)


def test_who_never_gets_to_the_end_of_a_file_is_told_why(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.saves_before(monkeypatch, "bytes", times=10_000)
    monkeypatch.setattr(file_names, "_MAX_LISTINGS", 3)
    with pytest.raises(CheckpointError, match=r"before it was read to the end.*keep_last"):
        training.folder.load_newest(renames_damaged=False)
    with pytest.raises(CheckpointError, match="before it was read to the end"):
        status.examine_folder(training.folder.path, _read_all)


@pytest.mark.parametrize("step", ["sidecar", "bytes", "mapping"])
def test_a_look_at_a_folder_shows_the_checkpoint_that_took_the_place_of_a_deleted_one(
    training: Training, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    training.saves_before(monkeypatch, step, times=2)
    found = status.examine_folder(training.folder.path, _read_all)
    assert training.count == 3
    assert [part.path for part in found.files] == [training.newest]
    assert (found.start, found.outcome) == (training.newest, StartOutcome.RESUMES)


@pytest.mark.parametrize("step", ["sidecar", "bytes", "mapping"])
def test_a_file_that_goes_while_it_is_looked_at_is_called_gone_and_not_damaged(
    training: Training, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = training.newest
    training.saves_before(monkeypatch, step)
    found = status.examine(path, Depth.BYTES)
    assert found.condition is Condition.UNREADABLE
    assert found.reason == loading.gone_text(path)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_tools_look_again_at_the_folder_of_a_run_that_goes_on(
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    training.saves_before(monkeypatch, "sidecar", times=2)
    assert main([command, str(training.folder.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = document["files"] if command == "verify" else document["folders"][0]["files"]
    state = "good" if command == "verify" else "not verified"
    assert [(part["path"], part["state"]) for part in files] == [(str(training.newest), state)]


def test_what_cannot_be_looked_at_is_not_called_gone(tmp_path: Path) -> None:
    assert file_names.is_gone(tmp_path / "run.pth")
    assert file_names.is_gone(Path(__file__) / "run.pth")
    assert not file_names.is_gone(Path(__file__))
    assert not file_names.is_gone(tmp_path / ("x" * 300))
