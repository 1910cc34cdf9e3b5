"""A training goes on when nobody reads its output any more."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import helios
from tests.support.runs import IndexModule, Setting, SmallModel

SETTING = Setting(total_steps=4, valid_frequency=None)


def fit(folder: Path, *, has_bar: bool) -> str:
    """Train; returns what the log file has."""
    assert helios.Trainer(
        train_unit="iteration",
        total_steps=4,
        print_frequency=1,
        use_cpu=True,
        enable_progress_bar=has_bar,
        enable_file_logging=True,
        log_path=folder,
    ).fit(SmallModel(SETTING), IndexModule(SETTING))
    return next(folder.glob("*.log")).read_text()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Make stderr a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with io.FileIO(writer, "w") as raw:
        # As Python does it for a pipe: lines are written at once.
        stream = io.TextIOWrapper(raw, line_buffering=True, write_through=True)
        monkeypatch.setattr(sys, "stderr", stream)
        yield stream


@pytest.mark.parametrize("has_bar", [False, True], ids=["lines", "bar"])
def test_a_pipe_without_a_reader_does_not_end_the_training(
    tmp_path: Path, pipe: TextIO, *, has_bar: bool
) -> None:
    with pytest.raises(BrokenPipeError):
        pipe.write("nobody reads\n")
    assert "total_steps reached" in fit(tmp_path, has_bar=has_bar)


@pytest.mark.parametrize("has_bar", [False, True], ids=["lines", "bar"])
@pytest.mark.parametrize("what", ["none", "closed"])
def test_a_process_without_stderr_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, *, has_bar: bool
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", None if what == "none" else stream)
    assert "total_steps reached" in fit(tmp_path, has_bar=has_bar)
