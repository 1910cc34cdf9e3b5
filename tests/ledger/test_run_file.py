"""``run.jsonl``: what a run was started with and what happened to it, whatever happens."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helios
from helios.checkpoint import loading
from helios.checkpoint.store import RunFolder
from helios.core.utils import AverageTimer
from helios.ledger import verify
from helios.ledger.run_file import FILE_NAME, RunFile, read_run, read_run_file
from helios.loops import epoch
from helios.state import TrainingState
from helios.storage import codec, files
from tests.checkpoint.helpers import save_payload
from tests.support.quiet import Quiet
from tests.support.runs import Setting, train
from tests.support.warned import collect_warnings

# With saves in a thread, their order among the other events is open.
STORE = helios.CheckpointStore(is_async=False)
SETTING = Setting(total_steps=4, chkpt_frequency=2, options={"store": STORE})
LONGER = dataclasses.replace(SETTING, total_steps=6)


def with_options(setting: Setting, **options: Any) -> Setting:
    return dataclasses.replace(setting, options={**setting.options, **options})


def read(root: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of a run, or those of some kinds."""
    return [x for x in read_run_file(root / "small") if not kinds or x["event"] in kinds]


@pytest.mark.shows("P22", "P23")
def test_each_start_says_what_it_runs_with_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--hf-token s3cret --tokenizer bpe --access_key=s3cret PASSWORD=s3cret --x 1"
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    params = {
        "client_secret": "s3cret",
        "max_tokens": "many",
        "token": 7,
        "loader": {"apiKey": ["s3cret"], "key": "s3cret"},
        "sort_key": "length",
    }
    train(tmp_path, with_options(SETTING, params=params))
    train(tmp_path, with_options(LONGER, params=params))
    first, second = read(tmp_path, "start")
    assert (first["iteration"], second["iteration"]) == (0, 4)
    assert second["checkpoint"] == "small_epoch_1_iter_4.pth"
    assert second["changes"] == ["total_steps: 4 -> 6"]
    assert first["options"]["total_steps"] == 4
    assert first["definition"]["random_seed"] == 5
    assert first["machine"]["torch"] == torch.__version__
    assert first["machine"]["threads"] == str(torch.get_num_threads())
    assert {"time", "host", "processes", "helios", "level", "run"} <= first.keys()
    hidden = "<not written>"
    assert first["params"] == {
        "client_secret": hidden,
        "max_tokens": "many",
        "token": 7,
        "loader.apiKey": hidden,
        "loader.key": hidden,
        "sort_key": "length",
    }
    assert first["command"] == [
        *("train.py", "--hf-token", hidden, "--tokenizer", "bpe"),
        *(f"--access_key={hidden}", f"PASSWORD={hidden}", "--x", "1"),
    ]
    for path in (tmp_path / "small").iterdir():
        assert b"s3cret" not in path.read_bytes()


SCRIPT = """
from pathlib import Path
from tests.support.runs import Setting, train
train(Path("runs"), Setting(total_steps=2))
"""


@pytest.mark.shows("P22")
def test_a_start_names_the_commit_of_the_script_and_whether_files_differ(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]

    def call(*words: str | Path) -> str:
        found = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
        return found.stdout.strip()

    call("git", "init")
    script.write_text(SCRIPT)
    call("git", "add", "train.py")
    call(*git, "commit", "-m", "a")
    script.write_text(SCRIPT.replace("=2", "=4"))
    call(sys.executable, script)
    commit = call("git", "rev-parse", "HEAD")
    (start,) = read(tmp_path / "runs", "start")
    assert start["git"] == {"commit": commit, "is_dirty": True}


@pytest.mark.shows("P24")
def test_another_machine_than_that_of_the_checkpoint_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    with collect_warnings() as said:
        train(tmp_path, LONGER)
    assert said == []
    monkeypatch.setattr(np, "__version__", "1.0")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with collect_warnings() as said:
            train(tmp_path, dataclasses.replace(SETTING, total_steps=8))
    finally:
        torch.set_float32_matmul_precision(before)
    (line,) = said
    *_, start = read(tmp_path, "start")
    numpy, precision = start["changes"][1:]
    assert numpy.endswith("-> 1.0")
    assert precision.startswith("matmul_precision: ")
    assert f"{numpy}, {precision}" in line
    # It is compared with the start that wrote the checkpoint, not with the last one.
    older = tmp_path / "small" / "small_epoch_1_iter_6.pth"
    monkeypatch.undo()
    with collect_warnings() as said:
        train(tmp_path, with_options(LONGER, resume=older))
    assert not [text for text in said if "numpy" in text]


class Leave(Quiet):
    """Interrupts the training after an iteration, or fails there."""

    unsaved = ("iteration", "error")

    def __init__(self, iteration: int, error: Exception | None = None) -> None:
        super().__init__("leave")
        self.iteration = iteration
        self.error = error

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            if self.error is not None:
                raise self.error
            self.context.interrupt("the test says so")


@pytest.mark.shows("P26")
def test_the_file_says_what_happened(tmp_path: Path) -> None:
    train(tmp_path, SETTING, Leave(3))
    with pytest.raises(KeyError):
        train(tmp_path, LONGER, Leave(5, KeyError("no")))
    train(tmp_path, LONGER)
    two, three, four, six = (f"small_epoch_1_iter_{number}.pth" for number in (2, 3, 4, 6))
    events = [event for event in read(tmp_path) if event["event"] != "validation"]
    assert [(each["event"], each.get("checkpoint"), each.get("cause")) for each in events] == [
        ("start", None, None),
        ("save", two, None),
        ("save", three, None),
        ("interruption", None, "the test says so"),
        ("start", three, None),
        ("save", four, None),
        ("error", None, "KeyError: 'no'"),
        ("start", four, None),
        ("save", six, None),
        ("end", None, "total_steps reached"),
    ]
    sidecar = loading.read_sidecar(tmp_path / "small" / three)
    assert sidecar is not None
    digests = [event["digest"] for event in events if event.get("checkpoint") == three]
    assert digests == [sidecar.digest] * 2


@pytest.mark.shows("P27")
def test_a_replaced_checkpoint_is_found_though_its_sidecar_matches(tmp_path: Path) -> None:
    """The file of another run with the same ledger, so that only this file knows it."""
    train(tmp_path / "first", SETTING)
    train(tmp_path / "second", SETTING)
    folder, name = tmp_path / "first" / "small", "small_epoch_1_iter_2.pth"
    payload = {**codec.read(tmp_path / "second" / "small" / name), "planted": 1}
    sidecar = loading.read_sidecar(folder / name)
    assert sidecar is not None
    assert verify(folder, {name: sidecar}).is_good
    (folder / name).unlink()
    save_payload(RunFolder(folder), payload, stem=Path(name).stem, sidecar=sidecar)
    replaced = loading.read_sidecar(folder / name)
    assert replaced is not None
    (finding,) = verify(folder, {name: replaced}).findings
    assert name in finding


def test_a_run_without_evidence_and_a_finished_one_write_nothing(tmp_path: Path) -> None:
    train(tmp_path / "off", with_options(SETTING, ledger="off"))
    assert read(tmp_path / "off") == []
    train(tmp_path, SETTING)
    before = (tmp_path / "small" / FILE_NAME).read_bytes()
    train(tmp_path, SETTING)
    assert (tmp_path / "small" / FILE_NAME).read_bytes() == before


@pytest.mark.shows("P42")
def test_validations_have_their_scores_also_those_that_json_does_not_have(tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(SETTING, valid_frequency=2))
    found = read(tmp_path, "validation")
    assert [(event["iteration"], event["step"]) for event in found] == [(2, 2), (4, 4)]
    RunFile(tmp_path / "a").add("validation", iteration=1, scores={"x": float("nan"), "y": 0.1})
    (event,) = read_run(tmp_path / "a").validations
    assert repr(event["scores"]) == "{'x': nan, 'y': 0.1}"
    text = (tmp_path / "a" / FILE_NAME).read_text()
    json.loads(text, parse_constant=pytest.fail)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Slow(Quiet):
    """Training whose parts take known times."""

    unsaved = ("clock", "average")

    def __init__(self, clock: Clock) -> None:
        super().__init__("slow")
        self.clock = clock
        self.average = 0.0

    def on_fit_start(self) -> None:
        self.clock.time += 50.0

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.clock.time += 0.5

    def on_validation_start(self, validation_cycle: int) -> None:
        self.clock.time += 100.0

    def on_training_end(self) -> None:
        self.average = self.context.state.average_iter_time


@pytest.mark.shows("P42")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_iterations_have_their_own_time(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(epoch, "AverageTimer", partial(AverageTimer, clock=clock))
    slow, is_by_epoch = Slow(clock), unit == "epoch"
    setting = Setting(
        unit=unit,
        total_steps=20 if is_by_epoch else 120,
        valid_frequency=18 if is_by_epoch else 105,
        chkpt_frequency=300,
    )
    train(tmp_path, setting, slow)
    assert slow.average == pytest.approx(0.5)


def test_a_line_that_a_kill_has_cut_off_costs_only_itself(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    path = tmp_path / "small" / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    count = len(read(tmp_path))
    train(tmp_path, LONGER)
    assert read(tmp_path)[count]["event"] == "start"


@pytest.mark.shows("P22", "P42")
def test_a_disk_that_refuses_the_file_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def refuse(handle: Any, data: Any) -> int:
        if Path(handle.name).name == FILE_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(files, "write", refuse)
    with collect_warnings() as said:
        assert train(tmp_path, SETTING).has_ended
    assert len([text for text in said if FILE_NAME in text]) == 1
