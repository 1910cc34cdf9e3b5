"""Going back: ``resume=`` takes an older checkpoint of the run, and batches can be skipped."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import helios
from helios.cli.commands import main
from helios.errors import ArgumentError, RunMismatchError
from helios.ledger import diff
from tests.support import elastic, tier
from tests.support.elastic import Elastic, KillRank
from tests.support.kills import KillAt, KillAtFileOperation, run_in_child, train_in_child
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.resume import assert_equal_ledgers, iteration_of
from tests.support.runs import (
    NUM_SAMPLES,
    WIDTH,
    IndexModule,
    Outcome,
    Setting,
    digest,
    train,
)

STEPS = Setting(total_steps=14, chkpt_frequency=4)
WINDOWS = Setting(total_steps=5, chkpt_frequency=1, accumulation=4)


def skipping(setting: Setting, *numbers: int, **options: Any) -> Setting:
    """Return a setting that skips batches, which may be another set than the run had before."""
    options |= {"skip_batches": numbers, "allow_changes": ("skip_batches",)}
    return dataclasses.replace(setting, options={**setting.options, **options})


def going_back(root: Path, iteration: int, setting: Setting, *numbers: int) -> Setting:
    """Return a setting that goes back to a checkpoint of the run, and skips batches."""
    (path,) = (each for each in _checkpoints(root) if iteration_of(each) == iteration)
    return skipping(setting, *numbers, resume=path)


def _checkpoints(root: Path) -> list[Path]:
    return sorted((root / "small").glob("*.pth"), key=iteration_of)


def _iterations(folder: Path) -> list[int]:
    return sorted(map(iteration_of, folder.glob("*.pth")))


def _aside(root: Path) -> list[Path]:
    return sorted((root / "small").glob("before-*"))


def _copy(root: Path, target: Path) -> Path:
    return Path(shutil.copytree(root, target))


def _contents(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Return the folder and the outcome of a run that never goes back."""
    root = tmp_path_factory.mktemp("spiked") / "run"
    return root, train(root, STEPS)


@pytest.fixture(scope="module")
def again(
    spiked: tuple[Path, Outcome], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """Return the same run, which went back to iteration 4, without batches 6, 7 and 12."""
    root = _copy(spiked[0], tmp_path_factory.mktemp("again") / "run")
    return root, train(root, going_back(root, 4, STEPS, 6, 7, 12))


@pytest.mark.shows("P52")
@pytest.mark.parametrize("keeps_path", [False, True], ids=["resume=auto", "resume=path"])
def test_a_run_that_went_back_stays_on_its_new_branch_over_three_kills(
    keeps_path: bool, spiked: tuple[Path, Outcome], again: tuple[Path, Outcome], tmp_path: Path
) -> None:
    root = _copy(spiked[0], tmp_path / "run")
    back = going_back(root, 4, STEPS, 6, 7, 12)
    back.options["store"] = helios.CheckpointStore(is_async=False)
    later = back if keeps_path else skipping(STEPS, 6, 7, 12, store=back.options["store"])
    # Before its first checkpoint, after it, and after its second one.
    for setting, iteration in ((back, 7), (later, 10), (later, 14)):
        assert train_in_child(root, setting, KillAt("on_training_batch_start", iteration)) == -9
    assert train(root, later).bits() == again[1].bits()
    assert_equal_ledgers(root, again[0])
    assert train(root, later).records == {}
    assert _iterations(root / "small") == [4, 8, 12, 14]
    assert len(_aside(root)) == 1
    assert main(["verify", str(root)]) == 0


class _Plain(Dataset):
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

    def __len__(self) -> int:
        return len(list(iter(self)))

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
        pytest.param(STEPS, 4, (7, 8, 13), {(1, 0), (1, 1), (2, 0)}, id="the first of an epoch"),
        pytest.param(STEPS, 4, (5, 6), {(0, 4), (0, 5)}, id="the rest of an epoch"),
        pytest.param(WINDOWS, 4, (6, 9), {(0, 5), (1, 2)}, id="steps with windows"),
    ],
)
def test_a_run_that_skips_has_the_bits_of_one_that_never_had_the_batches(
    setting: Setting,
    to: int,
    skip: tuple[int, ...],
    missing: set[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.runs.IndexModule", _ListedModule)
    windows, expected_windows = _Windows(), _Windows()
    root = tmp_path / "back"
    train(root, setting, windows)
    found = train(root, going_back(root, to, setting, *skip), windows)
    at_once = train(tmp_path / "at once", skipping(setting, *skip))
    monkeypatch.setattr(_ListedModule, "missing", missing)
    expected = train(tmp_path / "without", setting, expected_windows)
    tail = {number: each for number, each in expected.records.items() if number > to}
    assert found.records == tail
    assert found.bits() == at_once.bits() == expected.bits()
    assert windows.found.items() >= expected_windows.found.items()
    assert_equal_ledgers(root, tmp_path / "without")


@pytest.mark.shows("P52")
def test_a_kill_at_any_file_operation_of_going_back_costs_nothing(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole", Setting(total_steps=4, chkpt_frequency=1, validates=False)
    short.options["store"] = helios.CheckpointStore(is_async=False)
    train(whole, short)
    expected = _copy(whole, tmp_path / "expected")
    train(expected, going_back(expected, 2, short, 3))
    number, code, committed = 0, -9, False
    # Once a new checkpoint is there, kills are those of any run.
    while code == -9 and not (committed and not tier.is_full()):
        number += 1
        root = _copy(whole, tmp_path / f"run-{number}")
        setting = going_back(root, 2, short, 3)

        def work(number: int = number, root: Path = root, setting: Setting = setting) -> None:
            KillAtFileOperation(number, is_after=False).install()
            train(root, setting)

        code = run_in_child(work, root.with_suffix(".outcome"))
        assert code in (-9, 0)
        committed = _iterations(root / "small") == [1, 2, 3]
        train(root, setting)
        assert_equal_ledgers(root, expected)
        assert _iterations(root / "small") == [1, 2, 3, 4]
        # A kill between two moves leaves them in two folders.
        aside = {each.name: data for at in _aside(root) for each, data in _contents(at).items()}
        aside.pop("ledger.jsonl.tmp", None)
        before = _contents(whole / "small")
        moved = {each.name: data for each, data in before.items() if each.match("*_iter_[34].*")}
        assert aside == moved | {"ledger.jsonl": before[Path("ledger.jsonl")]}
    assert number > 8


@pytest.mark.shows("P60")
def test_a_refused_start_changes_nothing(tmp_path: Path) -> None:
    logs = {"run_path": tmp_path / "events", "enable_tensorboard": True}
    setting = dataclasses.replace(STEPS, print_frequency=1, options=logs)
    root = tmp_path / "run"
    train(root, setting)
    before = _contents(tmp_path)
    with pytest.raises(RunMismatchError, match="has passed, but changed for 3"):
        train(root, going_back(root, 4, setting, 3, 6))
    with pytest.raises(ArgumentError, match="at least one batch of each epoch"):
        train(root, going_back(root, 4, setting, *range(7, 13)))
    # A start opens an event file before the checkpoint is loaded.
    assert _contents(tmp_path).items() >= before.items()


def _train_elastic(rank: int, folder: Path, setting: Elastic, *plugins: Any) -> None:
    elastic.train(folder, setting, *plugins)


@pytest.mark.shows("P51")
def test_other_processes_stay_on_the_same_branch(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=2, total_steps=11, chkpt_frequency=3, length=13)
    elastic.train(tmp_path / "one", setting)
    other = _copy(tmp_path / "one", tmp_path / "other")
    setting.options.update({"skip_batches": (5, 7, 10), "allow_changes": ("skip_batches",)})

    def go_back(root: Path) -> Elastic:
        (path,) = (root / "elastic").glob("*_iter_3.pth")
        return dataclasses.replace(setting, options={**setting.options, "resume": path})

    elastic.train(tmp_path / "one", go_back(tmp_path / "one"))
    for start, iteration in ((go_back(other), 5), (setting, 7), (setting, 10)):
        kill = KillRank("on_training_batch_start", iteration, None)
        with pytest.raises(RankError):
            run_ranks(_train_elastic, 2, other, start, kill)
    run_ranks(_train_elastic, 2, other, setting)
    found, expected = (root / "elastic/ledger.jsonl" for root in (other, tmp_path / "one"))
    assert found.read_bytes() == expected.read_bytes()
    weights = [
        digest(helios.load_checkpoint(helios.find_last_checkpoint(each.parent))["model"])
        for each in (found, expected)
    ]
    assert weights[0] == weights[1]
    before = next((tmp_path / "one" / "elastic").glob("before-*"))
    assert diff(found, before).iteration == 5
