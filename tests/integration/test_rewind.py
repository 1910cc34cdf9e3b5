"""Rewinds: a run goes back past a loss spike once, skips batches, and stays one run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import helios
from helios.checkpoint import loading
from helios.cli.commands import main
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.errors import ArgumentError, CheckpointError, LedgerError, RunMismatchError
from helios.ledger import diff
from helios.ledger.book import FILE_NAME
from helios.ledger.lineage import read_lineage
from helios.plugins import CSVLogger
from helios.startup import rewinding
from helios.startup.rewinding import Rewind, RewindPlan, settle
from tests.support import elastic, tier
from tests.support.elastic import Elastic
from tests.support.kills import KillAt, KillAtFileOperation, run_in_child, train_in_child
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.resume import assert_equal, assert_equal_ledgers, copy_checkpoint, iteration_of
from tests.support.runs import (
    NUM_SAMPLES,
    WIDTH,
    IndexModule,
    Outcome,
    Setting,
    replay,
    train,
)

STEPS = Setting(total_steps=14, chkpt_frequency=4)
EPOCHS = Setting(unit="epoch", total_steps=3, valid_frequency=1, accumulation=4)
WINDOWS = Setting(total_steps=5, chkpt_frequency=1, accumulation=4)


def rewound(setting: Setting, to: int, *skip: int, **changes: Any) -> Setting:
    """Return a setting with a rewind."""
    options = {**setting.options, "rewind_to": to, "skip_batches": skip}
    return dataclasses.replace(setting, options=options, **changes)


def _folder_of(root: Path) -> Path:
    return root / "small"


def _iterations(folder: Path) -> list[int]:
    return sorted(map(iteration_of, folder.glob("*.pth")))


def _aside(root: Path) -> list[Path]:
    return sorted(_folder_of(root).glob("before-*"))


def _events(root: Path, name: str) -> list[dict[str, Any]]:
    return [each for each in read_lineage(_folder_of(root)) if each["event"] == name]


def _copy(root: Path, target: Path) -> Path:
    return Path(shutil.copytree(root, target))


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Return the folder and the outcome of a run that is never rewound."""
    root = tmp_path_factory.mktemp("spiked") / "run"
    return root, train(root, STEPS)


@pytest.fixture(scope="module")
def again(
    spiked: tuple[Path, Outcome], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """Return the same run, rewound to iteration 4 without the batches of 6, 7 and 12."""
    root = _copy(spiked[0], tmp_path_factory.mktemp("again") / "run")
    setting = rewound(STEPS, 5, 6, 7, 12)
    setting.options["reproducibility"] = "strict"
    return root, train(root, setting)


class _Plain(Dataset):
    """Samples without augmentation."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        # A planted spike: these samples have values that no other one has.
        scale = 100.0 if index in (0, 1) else 1.0
        return index, scale * torch.sin(torch.arange(WIDTH) * (index + 1.0))


class _Windows(Quiet):
    """Notes the number of each batch in its window, by iteration."""

    unsaved = ("found",)

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}

    def on_training_batch_start(self, state: Any) -> None:
        self.found[state.global_iteration] = self.context.window_index


class _Batches:
    """Batches in another order each epoch, some of which may never have existed."""

    def __init__(self, size: int, missing: set[tuple[int, int]]) -> None:
        self.size = size
        self.missing = missing
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = [(7 * i + 5 * self.epoch) % NUM_SAMPLES for i in range(NUM_SAMPLES)]
        firsts = range(0, NUM_SAMPLES, self.size)
        batches = [order[first : first + self.size] for first in firsts]
        left = [b for n, b in enumerate(batches) if (self.epoch, n) not in self.missing]
        return iter(left)


class _ListedModule(IndexModule):
    """The data of a setting, in batches listed by hand."""

    missing: set[tuple[int, int]] = set()  # noqa: RUF012 - replaced, never changed

    def setup(self) -> None:
        params = helios.DataLoaderParams(
            batch_sampler=_Batches(self.setting.batch_size, self.missing)
        )
        self._train_dataset = self._create_dataset(_Plain(), params)
        if self.setting.validates:
            params = helios.DataLoaderParams(batch_size=4)
            self._valid_dataset = self._create_dataset(_Plain(), params)


@pytest.mark.shows("P50")
@pytest.mark.parametrize(
    ("setting", "to", "skip", "missing"),
    [
        pytest.param(STEPS, 5, (6,), {(0, 5)}, id="the last one of an epoch"),
        pytest.param(STEPS, 4, (7, 8, 13), {(1, 0), (1, 1), (2, 0)}, id="the first of an epoch"),
        pytest.param(STEPS, 4, (5, 6), {(0, 4), (0, 5)}, id="the rest of an epoch"),
        pytest.param(EPOCHS, 8, (8, 18), {(1, 1), (2, 5)}, id="epochs with windows"),
        pytest.param(WINDOWS, 4, (6, 9), {(0, 5), (1, 2)}, id="steps with windows"),
    ],
)
def test_a_rewound_run_has_the_bits_of_one_that_never_had_the_batches(
    setting: Setting,
    to: int,
    skip: tuple[int, ...],
    missing: set[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.runs.IndexModule", _ListedModule)
    windows, expected_windows = _Windows(), _Windows()
    train(tmp_path / "rewound", setting, windows)
    found = train(tmp_path / "rewound", rewound(setting, to, *skip), windows)
    monkeypatch.setattr(_ListedModule, "missing", missing)
    expected = train(tmp_path / "without", setting, expected_windows)
    since = min(found.records) - 1
    assert since <= to
    tail = {number: each for number, each in expected.records.items() if number > since}
    assert found.records == tail
    assert found.bits() == expected.bits()
    assert windows.found.items() >= expected_windows.found.items()
    assert_equal_ledgers(tmp_path / "rewound", tmp_path / "without")


@pytest.mark.shows("P51")
def test_other_batches_keep_their_samples_and_skipped_ones_are_not_fetched(
    spiked: tuple[Path, Outcome], again: tuple[Path, Outcome]
) -> None:
    whole, found = spiked[1], again[1]
    left = [number for number in range(5, 15) if number not in (6, 7, 12)]
    ids = {number: ids for number, (ids, _) in found.records.items()}
    assert [ids[number] for number in range(5, 12)] == [whole.records[n][0] for n in left]
    assert found.records[5] == whole.records[5]
    trained = [index for number in sorted(ids) for index in ids[number]]
    # The last batch before is fetched again, to compare the data.
    assert found.fetched == [*whole.records[4][0], *trained]


@pytest.mark.shows("P51")
@pytest.mark.parametrize("changes", [{"num_workers": 2}, {"chkpt_frequency": 2}], ids=str)
def test_what_changes_no_bit_changes_no_line_of_a_rewound_run(
    changes: dict[str, Any],
    spiked: tuple[Path, Outcome],
    again: tuple[Path, Outcome],
    tmp_path: Path,
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    train(root, rewound(STEPS, 4, 6, 7, 12, **changes))
    assert_equal_ledgers(root, again[0])


@pytest.mark.shows("P52")
@pytest.mark.parametrize("setting", [STEPS, EPOCHS, WINDOWS], ids=["steps", "epochs", "windows"])
def test_a_rewound_run_resumes_from_each_of_its_checkpoints(
    setting: Setting, tmp_path: Path
) -> None:
    """Each checkpoint alone, with the ledger, is enough."""
    root = tmp_path / "run"
    setting = dataclasses.replace(setting, requests=True)
    train(root, setting)
    whole = train(root, rewound(setting, 4, 6, 8, 12))
    checkpoints = [each for each in _folder_of(root).glob("*.pth") if iteration_of(each) > 4]
    assert len(checkpoints) >= 3
    for path in checkpoints:
        resumed = train(copy_checkpoint(path, tmp_path / path.stem), setting)
        if resumed.has_ended:
            assert_equal(resumed, whole, since=iteration_of(path))
        assert_equal_ledgers(tmp_path / path.stem, root)


@pytest.mark.shows("P52")
def test_a_rewind_is_carried_out_once(spiked: tuple[Path, Outcome], tmp_path: Path) -> None:
    root, setting = _copy(spiked[0], tmp_path / "run"), rewound(STEPS, 4, 6)
    setting.options["store"] = helios.CheckpointStore(is_async=False)
    assert train_in_child(root, setting, KillAt("on_training_batch_start", 10)) == -9
    assert _iterations(_folder_of(root)) == [4, 8]
    found = train(root, setting)
    assert min(found.records) == 9
    assert train(root, setting).records == {}
    assert len(_aside(root)) == len(_events(root, "rewind")) == 1


@pytest.mark.shows("P52")
def test_nothing_is_lost(
    spiked: tuple[Path, Outcome], again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    (aside,) = _aside(again[0])
    before = _folder_of(spiked[0])
    moved = [each for each in before.iterdir() if "_iter_" in each.name and iteration_of(each) > 4]
    assert len(moved) == 6
    for path in [*moved, before / FILE_NAME]:
        assert (aside / path.name).read_bytes() == path.read_bytes()
    assert {each.name for each in aside.iterdir()} == {FILE_NAME, *(each.name for each in moved)}


@pytest.mark.shows("P54")
def test_a_rewind_is_recorded(again: tuple[Path, Outcome]) -> None:
    folder = _folder_of(again[0])
    (aside,) = _aside(again[0])
    own = {"to": 5, "skip": [6, 7, 12], "after": 4, "places": [[0, 5], [1, 0], [1, 5]]}
    (event,) = _events(again[0], "rewind")
    sidecar = json.loads((folder / "small_epoch_1_iter_4.json").read_text())
    assert "rewinds" not in sidecar
    assert event == event | own | {
        "checkpoint": "small_epoch_1_iter_4.pth",
        "digest": sidecar["digest"],
        "folder": aside.name,
    }
    newest = loading.read_sidecar(folder / "small_epoch_3_iter_14.pth")
    assert newest is not None
    assert newest.rewinds == [own]
    assert helios.load_checkpoint(folder / "small_epoch_3_iter_14.pth")["rewinds"] == [own]
    text = "rewound to iteration 4, without the batches of iterations 6, 7, 12"
    assert newest.changes == [text]
    assert text in {each["cause"] for each in _events(again[0], "change")}


@pytest.mark.shows("P54")
def test_verify_is_good_and_diff_names_the_first_skipped_iteration(
    again: tuple[Path, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    (aside,) = _aside(again[0])
    assert main(["verify", str(again[0])]) == 0
    assert main(["verify", str(aside)]) == 0
    capsys.readouterr()
    assert diff(_folder_of(again[0]), aside).iteration == 6


@pytest.mark.shows("P54")
@pytest.mark.parametrize("start", [0, 4, pytest.param(8, marks=pytest.mark.full), 12])
def test_a_replay_skips_what_the_run_has_skipped(start: int, again: tuple[Path, Outcome]) -> None:
    found, repeated = replay(again[0], STEPS, start=start)
    assert (found.is_equal, found.begins_after, found.num_equal) == (True, start, 14)
    assert repeated.bits() == again[1].bits()


@pytest.mark.shows("P54")
@pytest.mark.parametrize("kept", ["rewinds.json", "checkpoints", "lineage.jsonl", ""])
def test_a_replay_needs_one_record_of_the_rewinds(
    kept: str, again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(again[0], tmp_path / "run")
    for name in {"rewinds.json", "lineage.jsonl"} - {kept}:
        (_folder_of(root) / name).unlink()
    for path in [] if kept == "checkpoints" else _folder_of(root).glob("*_iter_*"):
        if iteration_of(path) > 4:
            path.unlink()
    found, _ = replay(root, STEPS, start=4)
    assert found.iteration == (None if kept else 6)


@pytest.mark.shows("P53")
def test_a_later_rewind_keeps_what_an_earlier_one_skips(
    spiked: tuple[Path, Outcome], again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(again[0], tmp_path / "run")
    found = train(root, rewound(STEPS, 4, 5, 9))
    whole = spiked[1].records
    left = [number for number in range(5, 15) if number not in (5, 6, 7, 11, 12)]
    assert [found.records[n][0] for n in range(5, 10)] == [whole[n][0] for n in left]
    assert len(_aside(root)) == 2
    assert replay(root, STEPS, start=0)[0].is_equal
    assert train(root, rewound(STEPS, 5, 6, 7, 12)).records == {}
    assert main(["verify", str(root)]) == 0


@pytest.mark.shows("P50")
def test_a_rewind_without_skipped_batches_repeats_the_run(
    spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    found = train(root, rewound(STEPS, 11))
    assert min(found.records) == 9
    assert found.bits() == spiked[1].bits()
    assert_equal_ledgers(root, spiked[0])


@pytest.mark.shows("P52")
def test_rows_of_loggers_are_cut_back(tmp_path: Path) -> None:
    setting, path = Setting(total_steps=6, chkpt_frequency=2, print_frequency=1), tmp_path / "rows"
    train(tmp_path / "run", setting, CSVLogger(path))
    before = path.read_text().splitlines()
    train(tmp_path / "run", rewound(setting, 2, 4), CSVLogger(path))
    found = path.read_text().splitlines()
    numbers = [int(row.split(",")[1]) for row in found[1:] if ",train/" in row]
    assert numbers == [1, 2, 3, 4, 5, 6]
    is_equal = [one == other for one, other in zip(found, before, strict=True)]
    assert is_equal.index(False) > 3


class _Failing(Quiet):
    """Ends a run with an error, as a guard does that finds numbers which are not finite."""

    def __init__(self, iteration: int) -> None:
        super().__init__("failing")
        self.iteration = iteration

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            raise FloatingPointError("The loss is not finite.")


@pytest.mark.shows("P60")
@pytest.mark.parametrize("last", [6, 7], ids=["of an epoch", "inside an epoch"])
def test_the_batch_of_an_error_can_be_skipped(
    last: int, spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Its iteration has no line in the ledger, and there is no later checkpoint."""
    root, other = tmp_path / "run", _copy(spiked[0], tmp_path / "other")
    with pytest.raises(FloatingPointError):
        train(root, STEPS, _Failing(last + 1))
    assert _iterations(_folder_of(root)) == [4]
    train(root, rewound(STEPS, 4, last + 1))
    train(other, rewound(STEPS, 4, last + 1))
    assert_equal_ledgers(root, other)
    assert replay(root, STEPS, start=0)[0].is_equal
    for each in (root, other):
        train(each, rewound(STEPS, 4, 9))
    assert_equal_ledgers(root, other)


@pytest.mark.shows("P52")
@pytest.mark.parametrize(
    "is_after",
    [pytest.param(False, id="before"), pytest.param(True, id="after", marks=pytest.mark.full)],
)
def test_a_kill_at_any_file_operation_of_a_rewind_costs_nothing(
    is_after: bool, tmp_path: Path
) -> None:
    whole, short = tmp_path / "whole", Setting(total_steps=4, chkpt_frequency=1, validates=False)
    short.options["store"] = helios.CheckpointStore(is_async=False)
    train(whole, short)
    setting = rewound(short, 2, 3)
    expected = _copy(whole, tmp_path / "expected")
    train(expected, setting)
    number, code, committed = 0, -9, False
    # Once a new checkpoint is there, kills are those of any run.
    while code == -9 and not (committed and not tier.is_full()):
        number += 1
        root = _copy(whole, tmp_path / f"run-{number}")

        def work(number: int = number, root: Path = root) -> None:
            KillAtFileOperation(number, is_after=is_after).install()
            train(root, setting)

        code = run_in_child(work, root.with_suffix(".outcome"))
        assert code in (-9, 0)
        committed = _iterations(_folder_of(root)) == [1, 2, 3]
        train(root, setting)
        assert_equal_ledgers(root, expected)
        assert _iterations(_folder_of(root)) == [1, 2, 3, 4]
        (aside,) = _aside(root)
        assert _iterations(aside) == [3, 4]
        for path in _folder_of(whole).glob("*_iter_[34].*"):
            assert (aside / path.name).read_bytes() == path.read_bytes()
        ledger = _folder_of(whole) / FILE_NAME
        assert (aside / FILE_NAME).read_bytes() == ledger.read_bytes()
        assert len(_events(root, "rewind")) == 1
    assert number > 15


def test_only_what_is_to_be_carried_out_gets_other_places() -> None:
    loader, sampler = create_dataloader(_Plain(), batch_size=4)
    source = open_source(loader, sampler, run_seed=1, purpose="fetch")
    done = Rewind(to=3, skip=(4,), after=3, places=((0, 9), (1, 0)))
    asked = Rewind(to=5, skip=(6, 7), after=5, places=((0, 5), (0, 6)))
    settled = dataclasses.replace(asked, places=((0, 5), (1, 1)))
    plan = RewindPlan(asked, "a.pth", None, "before-now")
    rewinds, plans = settle([done, asked], [plan], source)
    assert rewinds == [done, settled]
    assert plans == [dataclasses.replace(plan, rewind=settled)]


@pytest.mark.shows("P52")
def test_a_rewind_that_has_begun_is_completed_without_the_arguments(
    spiked: tuple[Path, Outcome], again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    killer = KillAt("on_training_batch_start", 6)
    assert train_in_child(root, rewound(STEPS, 5, 6, 7, 12), killer) == -9
    with pytest.raises(CheckpointError, match="before it has saved a checkpoint"):
        train(root, rewound(STEPS, 4, 5))
    train(root, STEPS)
    assert_equal_ledgers(root, again[0])


@pytest.mark.shows("P60")
@pytest.mark.parametrize(
    ("to", "skip", "error", "text"),
    [
        (3, (), CheckpointError, "the oldest one is of iteration 4"),
        (15, (), ArgumentError, "at most 14, the newest checkpoint"),
        (14, (), ArgumentError, "below 14, the newest checkpoint"),
        (8, (8,), ArgumentError, "iterations from 9"),
        (8, (9, 16), ArgumentError, "to 15, the one after the last"),
        (4, tuple(range(7, 13)), ArgumentError, "at least one batch of each epoch"),
    ],
    ids=str,
)
def test_a_rewind_that_cannot_be_is_refused_before_anything_changes(
    to: int,
    skip: tuple[int, ...],
    error: type[Exception],
    text: str,
    spiked: tuple[Path, Outcome],
    tmp_path: Path,
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(error, match=text):
        train(root, rewound(STEPS, to, *skip))
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_messages_of_rewinds_and_replays_have_the_step_beside_the_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, WINDOWS)
    last = max(_iterations(_folder_of(tmp_path)))
    end = rf"{last} \(step 5\)"
    for to, text in (
        (2, r"the oldest one is of iteration 4 \(step 1\)\. Pass rewind_to=4 or"),
        (last + 1, f"at most {end}, the newest checkpoint"),
        (last, f"below {end}, the newest checkpoint"),
    ):
        with pytest.raises((ArgumentError, CheckpointError), match=text):
            train(tmp_path, rewound(WINDOWS, to))
    for part, text in (({"start": last}, f"below {end}, the end of"), ({"stop": 99}, f"to {end}")):
        with pytest.raises(ArgumentError, match=text):
            replay(tmp_path, WINDOWS, **part)
    capsys.readouterr()
    train(tmp_path, rewound(WINDOWS, 4))
    assert "The run is rewound to iteration 4 (step 1). Moved 4 later" in capsys.readouterr().err


@pytest.mark.shows("P60")
@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (rewound(STEPS, 4, *range(7, 13)), ArgumentError),
        (dataclasses.replace(STEPS, batch_size=2), RunMismatchError),
    ],
    ids=["a rewind", "a resume"],
)
def test_a_start_that_is_refused_late_cuts_no_events(
    refused: Setting, error: type[Exception], tmp_path: Path
) -> None:
    logs = {"run_path": tmp_path / "events", "enable_tensorboard": True}
    setting = dataclasses.replace(STEPS, print_frequency=1, options=logs)
    with pytest.raises(FloatingPointError):
        train(tmp_path / "run", setting, _Failing(12))
    before = {path: path.read_bytes() for path in logs["run_path"].rglob("*tfevents*")}
    assert before
    with pytest.raises(error):
        train(tmp_path / "run", dataclasses.replace(refused, options={**refused.options, **logs}))
    assert {path: path.read_bytes() for path in before} == before
    train(tmp_path / "run", setting)
    assert {path: path.read_bytes() for path in before if path.exists()} != before


@pytest.mark.shows("P60")
def test_a_run_without_checkpoints_cannot_be_rewound(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is none in"):
        train(tmp_path, rewound(STEPS, 4))


@pytest.mark.shows("P60")
def test_a_ledger_that_does_not_match_the_checkpoint_names_no_batches(
    spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    ledger = _folder_of(root) / FILE_NAME
    ledger.write_bytes(ledger.read_bytes()[:200])
    with pytest.raises(LedgerError, match="does not match the checkpoint"):
        train(root, rewound(STEPS, 4, 6))


@pytest.mark.shows("P60")
def test_the_order_must_not_change_while_batches_to_skip_are_ahead(
    spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    setting = rewound(STEPS, 4, 6, batch_size=2)
    setting.options["allow_changes"] = ("batch_size",)
    with pytest.raises(RunMismatchError, match="batch_size must not change in an epoch"):
        train(root, setting)
    assert not _aside(root)
    assert _iterations(_folder_of(root)) == [4, 8, 12, 14]


@pytest.mark.shows("P53")
def test_rewinds_of_a_run_whose_checkpoints_are_gone_do_not_concern_a_new_one(
    again: tuple[Path, Outcome], spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(again[0], tmp_path / "run")
    for path in _folder_of(root).glob("*_iter_*"):
        path.unlink()
    train(root, STEPS)
    assert_equal_ledgers(root, spiked[0])
    assert not (_folder_of(root) / rewinding.FILE_NAME).exists()
    assert replay(root, STEPS, start=0)[0].is_equal


@pytest.mark.shows("P53")
def test_an_undone_rewind_leaves_the_run_that_it_was(
    again: tuple[Path, Outcome], spiked: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(again[0], tmp_path / "run")
    for path in _folder_of(root).glob("*_iter_*"):
        if iteration_of(path) > 4:
            path.unlink()
    for path in _aside(root)[0].iterdir():
        path.rename(_folder_of(root) / path.name)
    (_folder_of(root) / rewinding.FILE_NAME).write_text("[]")
    assert train(root, STEPS).records == {}
    assert replay(root, STEPS, start=0)[0].is_equal
    assert main(["verify", str(root)]) == 0


@pytest.mark.shows("P53")
def test_a_branch_of_a_rewound_run_skips_the_same_batches(
    again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    (origin,) = _folder_of(again[0]).glob("*_iter_8.pth")
    branch = dataclasses.replace(STEPS, options={"resume": origin})
    found = train(tmp_path, branch)
    assert found.bits() == again[1].bits()
    for path in _folder_of(tmp_path).glob("*_iter_*"):
        path.unlink()
    assert replay(tmp_path, branch)[0].is_equal


def test_a_damaged_file_of_rewinds_is_named(again: tuple[Path, Outcome], tmp_path: Path) -> None:
    root = _copy(again[0], tmp_path / "run")
    (_folder_of(root) / rewinding.FILE_NAME).write_text('[{"to": 5}]')
    with pytest.raises(CheckpointError, match="holds the rewinds of the run, cannot be read"):
        train(root, STEPS)


@pytest.mark.shows("P53")
def test_a_lost_checkpoint_after_a_rewind_does_not_bring_the_batches_back(
    again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(again[0], tmp_path / "run")
    for path in _folder_of(root).glob("*_iter_*"):
        if iteration_of(path) > 4:
            path.unlink()
    train(root, STEPS)
    assert_equal_ledgers(root, again[0])
    assert len(_events(root, "rewind")) == 1


def _train_elastic(rank: int, folder: Path, setting: Elastic) -> None:
    elastic.train(folder, setting)


@pytest.mark.shows("P51")
@pytest.mark.parametrize("num_processes", [2, pytest.param(1, marks=pytest.mark.full)])
def test_any_number_of_processes_gives_the_same_rewound_run(
    num_processes: int, tmp_path: Path
) -> None:
    setting = Elastic(num_replicas=2, total_steps=8, chkpt_frequency=3, length=13)
    elastic.train(tmp_path / "one", setting)
    other = _copy(tmp_path / "one", tmp_path / "other")
    setting.options.update(rewind_to=3, skip_batches=(5, 7))
    elastic.train(tmp_path / "one", setting)
    run_ranks(_train_elastic, num_processes, other, setting)
    found, expected = (root / "elastic" / FILE_NAME for root in (other, tmp_path / "one"))
    assert found.read_bytes() == expected.read_bytes()
    before = next((tmp_path / "one" / "elastic").glob("before-*"))
    assert diff(found, before).iteration == 5
