"""Manifest and lineage of whole trainings: what they say of each start, and what they refuse."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.checkpoint import file_names, loading
from helios.checkpoint.store import RunFolder
from helios.errors import ArgumentError, RunMismatchError
from helios.ledger import diff, run_file, timing, verify
from helios.ledger.manifest_file import (
    FILE_NAME,
    Manifest,
    Section,
    read_manifest,
    write_manifest,
)
from helios.ledger.run_file import read_run_file
from helios.plugins import Plugin
from helios.startup import run_manifest
from helios.state import TrainingState
from helios.storage import codec, files
from tests.checkpoint.helpers import save_payload
from tests.support import elastic
from tests.support.ranks import run_ranks
from tests.support.runs import Setting, train
from tests.support.warned import collect_warnings

SETTING = Setting(total_steps=4, chkpt_frequency=2)
LONGER = dataclasses.replace(SETTING, total_steps=6)
VARIABLE = "PYTHONHASHSEED"
"""A variable that may change a training, so far as anybody knows."""


def _manifest(folder: Path) -> Manifest:
    found = read_manifest(folder / "small")
    assert found is not None
    return found


def _events(folder: Path) -> list[str]:
    return [event["event"] for event in read_run_file(folder / "small")]


def _strict(setting: Setting, **options: Any) -> Setting:
    return dataclasses.replace(setting, options={"reproducibility": "strict", **options})


@pytest.mark.shows("P22", "P58")
def test_every_start_has_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-X", "dev", "train.py", "--token", "abc"]
    monkeypatch.setattr(sys, "orig_argv", words)
    train(tmp_path, SETTING)
    (first,) = _manifest(tmp_path).sections
    assert first.start["iteration"] == 0
    assert first.facts["options"]["total_steps"] == 4
    assert first.facts["command"]["words"] == [*words[:-1], "***"]
    assert first.facts["options"]["train_unit"] == "iteration"
    assert first.facts["seeds"] == {"random_seed": 5}
    assert first.facts["data"]["dataset"] == "IndexData"
    assert first.facts["parameters"]["net"] == {"all": 73, "trainable": 25}
    assert first.facts["program"]["model"] == "tests.support.runs.SmallModel"
    assert "code" in first.facts["code"]["tests.support.runs"]
    assert first.facts["level"]["level"] == "restart"
    train(tmp_path, LONGER)
    _, second = _manifest(tmp_path).sections
    assert second.start["checkpoint"] == "small_epoch_1_iter_4.pth"
    assert second.facts["options"]["total_steps"] == 6


def test_a_finished_run_that_is_started_again_adds_nothing(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    before = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    train(tmp_path, SETTING)
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before


def test_no_thread_outlives_the_training(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    assert not [each for each in threading.enumerate() if each.name == "helios-manifest"]


def test_without_checkpoints_or_with_ledger_off_there_is_no_evidence(tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(SETTING, options={"ledger": "off"}))
    train(tmp_path, dataclasses.replace(SETTING, chkpt_frequency=None))
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert not names & {FILE_NAME, run_file.FILE_NAME, timing.FILE_NAME}


@pytest.mark.parametrize("is_strict", [False, True])
def test_the_same_program_resumes_without_a_word(is_strict: bool, tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    with collect_warnings() as said:
        train(tmp_path, _strict(LONGER) if is_strict else LONGER)
    assert said == []
    assert "end" in _events(tmp_path)


def test_what_may_change_the_training_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    monkeypatch.setenv(VARIABLE, "3")
    monkeypatch.setenv("MKL_CBWR", "AVX")
    with collect_warnings() as said:
        train(tmp_path, LONGER)
    (line,) = said
    training, rounding = line.split("; and in what may change the rounding of numbers: ")
    assert f"environment.{VARIABLE}: - -> 3" in training
    assert "environment.MKL_CBWR: - -> AVX" in rounding


def test_a_reason_that_several_changes_share_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    for name in ("MKL_CBWR", "MKL_DYNAMIC", "ONEDNN_VERBOSE"):
        monkeypatch.setenv(name, "1")
    with collect_warnings() as said:
        train(tmp_path, LONGER)
    (line,) = said
    reason = "(the order of samples and random numbers stay, but rounding may differ)"
    assert line.count(reason) == 1
    assert line.endswith(f"environment.ONEDNN_VERBOSE: - -> 1 {reason}.")


@pytest.mark.parametrize("comes_from_gpu", [False, True])
def test_another_device_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_from_gpu: bool
) -> None:
    """The line of the checkpoint's machine names it; all else about GPUs follows from it."""
    gather = run_manifest.describe_environment

    def gather_on_gpu(modules: Any) -> dict[str, Any]:
        return gather(modules) | {"gpu": {"devices": ["H200"], "cuda": "13.0", "driver": "580.1"}}

    for is_on_gpu, setting in ((comes_from_gpu, SETTING), (not comes_from_gpu, LONGER)):
        with monkeypatch.context() as patch, collect_warnings() as said:
            if is_on_gpu:
                patch.setattr(run_manifest, "describe_environment", gather_on_gpu)
                patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            train(tmp_path, setting)
    assert said == []


def test_what_may_change_the_training_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    monkeypatch.setenv(VARIABLE, "3")
    gather, check = run_manifest.describe_environment, run_manifest.RunManifest.checked
    is_asked, seen = threading.Event(), []

    def gather_late(modules: Any) -> dict[str, Any]:
        assert is_asked.wait(20)
        return gather(modules)

    def ask(manifest: run_manifest.RunManifest) -> str:
        is_asked.set()
        return check(manifest)

    class Look(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_start(self) -> None:
            seen.append([text for text in said if VARIABLE in text])

    monkeypatch.setattr(run_manifest, "describe_environment", gather_late)
    monkeypatch.setattr(run_manifest.RunManifest, "checked", ask)
    with collect_warnings() as said:
        train(tmp_path, LONGER, Look("look"))
    (before,) = seen
    assert len(before) == 1


def test_a_finished_run_says_what_this_start_would_train_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    monkeypatch.setenv(VARIABLE, "3")
    with collect_warnings() as said:
        train(tmp_path, dataclasses.replace(SETTING, seed=6))
    first, second = said
    assert f"environment.{VARIABLE}: - -> 3" in first
    assert "seeds.random_seed: 5 -> 6" in first
    assert "data." not in first
    assert "Nothing to do" in second


@pytest.mark.shows("P25")
def test_a_strict_start_refuses_what_may_change_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    before = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    monkeypatch.setenv(VARIABLE, "3")
    with pytest.raises(
        RunMismatchError, match=rf"{VARIABLE}: - -> 3.*allow_changes=\(.environment"
    ):
        train(tmp_path, _strict(LONGER))
    assert {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()} == before
    train(tmp_path, _strict(LONGER, allow_changes=("environment",)))
    # The next start compares itself with this one.
    train(tmp_path, _strict(dataclasses.replace(SETTING, total_steps=8)))
    assert len(_manifest(tmp_path).sections) == 3


@pytest.mark.parametrize("name", ["MKL_CBWR", "OMP_NUM_THREADS"])
def test_a_strict_start_accepts_what_only_may_change_the_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    monkeypatch.setenv(name, "5")
    train(tmp_path, _strict(LONGER))
    assert _manifest(tmp_path).sections[1].facts["environment"][name] == "5"


def test_a_change_that_defines_the_run_and_is_allowed_passes_a_strict_start(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    changed = dataclasses.replace(LONGER, seed=6)
    train(tmp_path, _strict(changed, allow_changes=("random_seed", "seed")))
    assert "random_seed: 5 -> 6" in [
        event["cause"] for event in read_run_file(tmp_path / "small") if event["event"] == "change"
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reproducibility": "maybe"}, '"warn" or "strict"'),
        ({"reproducibility": "strict", "ledger": "off"}, 'ledger="off"'),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        helios.Trainer(total_steps=1, **options)


def test_a_damaged_manifest_is_renamed(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    (tmp_path / "small" / FILE_NAME).write_text("{")
    with collect_warnings() as said:
        train(tmp_path, LONGER)
    assert any("damaged" in text for text in said)
    assert (tmp_path / "small" / "run.before-1.json").read_text() == "{"
    assert len(_manifest(tmp_path).sections) == 1


def test_a_manifest_of_another_run_is_renamed_and_one_of_the_same_is_replaced(
    tmp_path: Path,
) -> None:
    train(tmp_path, SETTING)
    for path in file_names.find_checkpoints(tmp_path / "small"):
        path.unlink()
    train(tmp_path, SETTING)
    assert len(_manifest(tmp_path).sections) == 1
    for path in file_names.find_checkpoints(tmp_path / "small"):
        path.unlink()
    train(tmp_path, dataclasses.replace(SETTING, seed=6))
    assert (tmp_path / "small" / "run.before-1.json").exists()
    assert _manifest(tmp_path).sections[0].facts["seeds"] == {"random_seed": 6}


@pytest.mark.shows("P22")
def test_a_disk_that_refuses_the_manifest_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_text_durably

    def refuse(path: Path, text: str) -> None:
        if path.name == FILE_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(files, "write_text_durably", refuse)
    with collect_warnings() as said:
        assert train(tmp_path, SETTING).records
    assert any("manifest" in text and "No space left" in text for text in said)


@pytest.mark.shows("P22")
def test_facts_that_cannot_be_found_stop_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(run_manifest, "describe_environment", lambda modules: fail())
    with collect_warnings() as said:
        train(tmp_path, SETTING)
    assert any("of the test" in text for text in said)
    assert "options" in _manifest(tmp_path).sections[0].facts


class Leave(Plugin):
    """Interrupts the training after an iteration, or fails there."""

    unsaved = ("iteration", "error")

    def __init__(self, iteration: int, error: Exception | None = None) -> None:
        super().__init__("leave")
        self.iteration = iteration
        self.error = error

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            if self.error is not None:
                raise self.error
            self.context.interrupt("the test says so")


@pytest.mark.shows("P26")
def test_the_lineage_says_what_happened(tmp_path: Path) -> None:
    # With saves in a thread, their order among the other events is open.
    options = {"store": helios.CheckpointStore(is_async=False)}
    first, longer = (dataclasses.replace(each, options=options) for each in (SETTING, LONGER))
    train(tmp_path, first, Leave(3))
    with pytest.raises(KeyError):
        train(tmp_path, longer, Leave(5, KeyError("token = 'abcdefgh'")))
    train(tmp_path, longer)
    events = list(read_run_file(tmp_path / "small"))
    two, three, four, six = (f"small_epoch_1_iter_{number}.pth" for number in (2, 3, 4, 6))
    assert [(each["event"], each.get("checkpoint"), each.get("cause")) for each in events] == [
        ("start", None, None),
        ("save", two, None),
        ("save", three, None),
        ("interruption", None, "the test says so"),
        ("resume", three, None),
        ("change", None, "total_steps: 4 -> 6"),
        ("save", four, None),
        ("error", None, "KeyError: \"token = '***'\""),
        ("resume", four, None),
        ("save", six, None),
        ("end", None, "total_steps reached"),
    ]
    sidecar = loading.read_sidecar(tmp_path / "small" / three)
    assert sidecar is not None
    digests = [event["digest"] for event in events if event.get("checkpoint") == three]
    assert digests == [sidecar.digest] * 2


@pytest.mark.shows("P26")
def test_a_damaged_checkpoint_and_a_lost_ledger_are_events(tmp_path: Path) -> None:
    train(tmp_path, SETTING)
    newest = tmp_path / "small" / "small_epoch_1_iter_4.pth"
    newest.write_bytes(newest.read_bytes()[:-100])
    (tmp_path / "small" / "ledger.jsonl").unlink()
    train(tmp_path, LONGER)
    events = [
        event
        for event in read_run_file(tmp_path / "small")
        if event["event"] not in ("save", "end")
    ]
    assert [event["event"] for event in events][1:] == [
        "fallback",
        "resume",
        "change",
        "lost ledger",
    ]
    assert events[1]["checkpoint"] == newest.name
    assert events[2]["iteration"] == 2


@pytest.mark.shows("P26")
def test_a_save_that_fails_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, seen = files.replace, []

    def refuse(source: Path, target: Path) -> None:
        if target.suffix == ".pth" and not seen:
            seen.append(target)
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(files, "replace", refuse)
    train(tmp_path, SETTING)
    (failed,) = [e for e in read_run_file(tmp_path / "small") if e["event"] == "failed save"]
    assert failed["checkpoint"] == "small_epoch_1_iter_2.pth"
    assert "Input/output error" in failed["cause"]


def test_a_branch_and_a_new_run_keep_the_evidence_apart(tmp_path: Path) -> None:
    train(tmp_path / "first", SETTING)
    source = tmp_path / "first" / "small" / "small_epoch_1_iter_2.pth"
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    train(tmp_path / "second", dataclasses.replace(SETTING, options={"resume": source}))
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before
    assert _events(tmp_path / "second")[0] == "branch"
    assert len(_manifest(tmp_path / "second").sections) == 1
    train(tmp_path / "first", dataclasses.replace(SETTING, options={"resume": "never"}))
    (aside,) = (tmp_path / "first" / "small").glob("before-*")
    for name in (FILE_NAME, run_file.FILE_NAME, timing.FILE_NAME):
        assert (aside / name).read_bytes() == before[name]
    assert _events(tmp_path / "first")[0] == "start"


@pytest.mark.shows("P27")
def test_a_replaced_checkpoint_is_found_though_its_sidecar_matches(tmp_path: Path) -> None:
    """The file of another run with the same ledger, so that only the lineage knows it."""
    train(tmp_path / "first", SETTING)
    train(tmp_path / "second", SETTING)
    folder, name = tmp_path / "first" / "small", "small_epoch_1_iter_2.pth"
    payload = {**codec.read(tmp_path / "second" / "small" / name), "planted": 1}
    sidecar = loading.read_sidecar(folder / name)
    assert sidecar is not None
    digests = {name: sidecar.digest}
    assert verify(folder, digests=digests).is_good
    (folder / name).unlink()
    save_payload(RunFolder(folder), payload, stem=Path(name).stem, sidecar=sidecar)
    replaced = loading.read_sidecar(folder / name)
    assert replaced is not None
    (finding,) = verify(folder, digests={name: replaced.digest}).findings
    assert finding == f"{name} is not the file that the run has saved: it was replaced"


def test_a_difference_names_what_the_starts_differ_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "first", SETTING)
    monkeypatch.setenv(VARIABLE, "3")
    train(tmp_path / "second", dataclasses.replace(SETTING, seed=6))
    found = diff(tmp_path / "first", tmp_path / "second")
    names = [change.name for change in found.manifest]
    assert {"seeds.random_seed", f"environment.{VARIABLE}", "options.chkpt_root"} <= set(names)
    assert names.index("seeds.random_seed") < names.index("options.chkpt_root")
    assert json.loads(json.dumps(found.as_dict()))["manifest"][0]["effect"] == "trajectory-changing"
    (tmp_path / "second" / "small" / FILE_NAME).unlink()
    assert diff(tmp_path / "first", tmp_path / "second").manifest == []


def _start_strictly(rank: int, folder: Path, total_steps: int) -> str:
    """Start a run of two processes, in which rank 0 alone has another variable set."""
    if rank == 0 and total_steps > 2:
        os.environ[VARIABLE] = "3"
    setting = elastic.Elastic(
        num_replicas=2, total_steps=total_steps, options={"reproducibility": "strict"}
    )
    try:
        elastic.train(folder, setting)
    except RunMismatchError as error:
        return str(error)
    return ""


def test_all_processes_refuse_what_rank_0_has_found(tmp_path: Path) -> None:
    assert run_ranks(_start_strictly, 2, tmp_path, 2) == ["", ""]
    assert all(VARIABLE in text for text in run_ranks(_start_strictly, 2, tmp_path, 3))
    (events,) = (list(read_run_file(path.parent)) for path in tmp_path.glob("*/run.jsonl"))
    assert [event["processes"] for event in events if "processes" in event] == [2]


def test_no_checkpoint_is_committed_before_the_section_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, seen = files.replace, []

    def note(source: Path, target: Path) -> None:
        if target.suffix == ".pth":
            seen.append((target.parent / FILE_NAME).exists())
        replace(source, target)

    def describe(folder: Path) -> dict[str, Any]:
        time.sleep(0.5)
        return {}

    monkeypatch.setattr(files, "replace", note)
    monkeypatch.setattr(run_manifest, "_describe_git", describe)
    train(tmp_path, SETTING)
    assert seen == [True] * 2


@pytest.mark.parametrize("is_same", [True, False])
def test_sources_are_parsed_once_for_all_starts_with_a_version_of_python(
    is_same: bool, tmp_path: Path
) -> None:
    train(tmp_path, SETTING)
    manifest = _manifest(tmp_path)
    facts = manifest.sections[0].facts
    facts["code"]["tests.support.runs"]["code"] = "known"
    if not is_same:
        facts["versions"]["python"] = "2.7"
    write_manifest(tmp_path / "small", manifest)
    train(tmp_path, LONGER)
    _, second = _manifest(tmp_path).sections
    assert (second.facts["code"]["tests.support.runs"]["code"] == "known") is is_same


@pytest.mark.parametrize("harm", ["missing", "damaged", "unreadable facts"])
def test_a_strict_start_needs_something_to_compare_with(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    path = tmp_path / "small" / FILE_NAME
    if harm == "missing":
        path.unlink()
    elif harm == "damaged":
        path.write_text("{")
    else:
        monkeypatch.setattr(run_manifest, "hash_texts", lambda *given: 1 / 0)
    with pytest.raises(RunMismatchError, match=r'cannot compare.*"warn" once'):
        train(tmp_path, _strict(LONGER))
    train(tmp_path, LONGER)


def test_a_start_is_compared_with_the_one_that_has_written_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, SETTING)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "3")
        with pytest.raises(KeyError):
            train(tmp_path, LONGER, Leave(5, KeyError("before any checkpoint")))
    assert len(_manifest(tmp_path).sections) == 2
    with collect_warnings() as said:
        train(tmp_path, _strict(LONGER))
    # The plugin of the test was no part of the first start.
    assert said == []


def test_names_that_are_no_text_stop_no_training(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    events = run_file.RunFile(tmp_path)
    events.add(run_file.SAVE, checkpoint=name)
    (event,) = read_run_file(tmp_path)
    assert event["checkpoint"] == name
    manifest = Manifest("run", [Section({}, {"command": {"script": name}})])
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


class SilentError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_without_a_text_stays_the_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(SilentError):
        train(tmp_path, SETTING, Leave(2, SilentError()))
    (cause,) = [each["cause"] for each in read_run_file(tmp_path / "small") if "cause" in each]
    assert cause == "SilentError"


@pytest.mark.shows("P72")
def test_the_first_iteration_waits_for_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, begun, seen = threading.Event(), threading.Event(), []

    class Look(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            assert arrived.wait(20)
            seen.append(begun.wait(0.2 if state.global_iteration == 1 else 20))

    def note(event: threading.Event) -> dict[str, Any]:
        event.set()
        return {}

    monkeypatch.setattr(run_manifest, "hash_texts", lambda *given: note(arrived))
    monkeypatch.setattr(run_manifest, "hash_statements", lambda *given: note(begun))
    monkeypatch.setattr(run_manifest, "_describe_git", lambda folder: {"commit": "abc"})
    train(tmp_path, dataclasses.replace(SETTING, chkpt_frequency=100), Look("look"))
    assert seen == [False, True, True, True]
    assert _manifest(tmp_path).sections[0].facts["git"] == {"commit": "abc"}
