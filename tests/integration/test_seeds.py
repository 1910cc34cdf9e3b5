"""One seed for each source of random numbers: runs that differ in one share all others.

Each draw is written down by its place: what ``setup`` draws, the initial weights, the ids and the
augmentation of each batch, and what steps, hooks and evaluations draw.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import helios
from helios.cli import main
from helios.core import rng
from helios.errors import RunMismatchError
from helios.ledger import diff
from helios.ledger.book import FILE_NAME
from helios.ledger.differences import CONTENT, NUMERICS, ORDER
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.integration.test_yield_loop import _train as train_gan
from tests.ledger.test_differences import Plan
from tests.ledger.test_differences import run as run_plan
from tests.startup.test_alike import Linear
from tests.support.elastic import (
    Elastic,
    ElasticData,
    ElasticModel,
    KillRank,
    Pictures,
    make_trainer,
)
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.resume import assert_equal
from tests.support.runs import Outcome, Setting, digest, train

SEEDS = {"init": 1, "order": 2, "augmentation": 3, "training": 4}
OTHER = 99
CHANGED_BY = {
    "init": {"weights"},
    "order": {"ids"},
    "augmentation": {"augmentation"},
    "training": {"step", "dropout", "hook"},
    "random_seed": {"data setup", "evaluation", "evaluated ids", "evaluation's augmentation"},
}


def draw() -> list[float]:
    """Draw one number from each generator."""
    numpy_number = float(rng.get_default_numpy_rng().generator.random())
    return [torch.rand(()).item(), random.random(), numpy_number]


class Note:
    """Writes lines (kind, place, value) to a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = 0

    def __call__(self, kind: str, place: list[int], value: Any) -> None:
        with (self.folder / f"notes-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps([kind, place, value]) + "\n")


def read(folder: Path) -> dict[str, dict[tuple[int, ...], Any]]:
    """Return what was noted, by kind and place; what is noted twice must be the same."""
    found: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
    for path in sorted(folder.glob("notes-*.jsonl")):
        for line in path.read_text().splitlines():
            kind, place, value = json.loads(line)
            assert found[kind].setdefault(tuple(place), value) == value, (kind, place)
    return dict(found)


class NotedPictures(Pictures):
    """Pictures with what else their augmentation draws."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), torch.tensor(draw(), dtype=torch.float64))


def collate(samples: list[Any]) -> list[Any]:
    return [*default_collate(samples), draw()]


class NotedData(ElasticData):
    """Shuffled data, also for the validation."""

    unsaved = ("note",)

    def __init__(self, setting: Elastic, note: Note) -> None:
        super().__init__(setting)
        self.note = note

    def setup(self) -> None:
        self.note("data setup", [], draw())
        params = helios.DataLoaderParams(
            batch_size=self.setting.batch_size,
            shuffle=True,
            num_workers=self.setting.num_workers,
            collate_fn=collate,
        )
        self._train_dataset = self._create_dataset(NotedPictures(self.setting.length), params)
        self._valid_dataset = self._create_dataset(NotedPictures(11), params)


class NotedModel(ElasticModel):
    """Notes what each step and hook draws."""

    unsaved = ("note", "places")

    def __init__(self, setting: Elastic, folder: Path) -> None:
        super().__init__(setting, folder)
        self.note = Note(folder)
        self.places = [0]

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.note.rank = self.global_rank

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        self.places = [state.global_epoch, state.global_iteration]
        self.note("hook", self.places, draw())
        if state.global_iteration == 1:
            self.note("weights", [], digest([*self.body.parameters(), *self.head.parameters()]))

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        ids, images, *augmentation = batch
        place = [*self.places, self.trainer._session.turns.replica]
        self.note("ids", place, ids.tolist())
        self.note("augmentation", place, [augmentation[0].tolist(), augmentation[1]])
        self.note("images", place, digest(images))
        self.note("step", place, draw())
        self.note("dropout", place, nn.functional.dropout(torch.ones(40)).tolist())
        return super().train_step((ids, images), state)

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, images, *augmentation = batch
        place = [*self.places, step, self.trainer._session.turns.replica]
        self.note("evaluated ids", place, ids.tolist())
        noise = [augmentation[0].tolist(), augmentation[1]]
        self.note("evaluation's augmentation", place, noise)
        self.note("evaluation", place, draw())
        return super().valid_step((ids, images), step)


def fit(rank: int, folder: Path, setting: Elastic, *plugins: Plugin, **more: Any) -> None:
    """Train, on as many ranks as there are."""
    folder.mkdir(parents=True, exist_ok=True)
    model = NotedModel(setting, folder)
    trainer = make_trainer(folder, setting, *plugins, **more)
    trainer.fit(model, NotedData(setting, model.note))


def make_setting(num_replicas: int = 2, **options: Any) -> Elastic:
    """Return a training over the end of an epoch, with validations before it and in it."""
    given = {"seeds": SEEDS, "random_seed": 8, "sanity_steps": 2, **options}
    steps = 17 if num_replicas == 1 else 10
    return Elastic(num_replicas=num_replicas, total_steps=steps, chkpt_frequency=4, options=given)


def ledger(folder: Path) -> bytes:
    return (folder / "elastic" / FILE_NAME).read_bytes()


@pytest.fixture(scope="module", params=[1, 2])
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, dict[tuple[int, ...], Any]]]:
    """Return a number of replicas, and what a run of all seeds notes."""
    folder = tmp_path_factory.mktemp("known")
    fit(0, folder, make_setting(request.param))
    return request.param, read(folder)


@pytest.mark.shows("P28")
@pytest.mark.parametrize("source", CHANGED_BY)
def test_runs_that_differ_in_one_seed_share_all_else(
    source: str, known: tuple[int, dict[str, dict[tuple[int, ...], Any]]], tmp_path: Path
) -> None:
    num_replicas, expected = known
    is_named = source in SEEDS
    changed = {"seeds": SEEDS | {source: OTHER}} if is_named else {source: OTHER}
    fit(0, tmp_path, make_setting(num_replicas, **changed))
    found = read(tmp_path)
    assert found.keys() == expected.keys() == set.union({"images"}, *CHANGED_BY.values())
    assert {epoch for epoch, _ in found["hook"]} == {1, 2}
    for kind, places in expected.items():
        assert found[kind].keys() == places.keys()
        differing = [place for place, value in places.items() if found[kind][place] != value]
        is_own = kind in CHANGED_BY[source]
        # Images follow from the sample and the augmentation.
        is_own |= kind == "images" and source in ("order", "augmentation")
        # Two shuffled orders may have a batch in common.
        least = 0.7 if "ids" in kind else 1
        share = len(differing) / len(places)
        assert (share >= least) if is_own else (share == 0), kind


@pytest.mark.shows("P28")
def test_the_number_of_processes_and_workers_changes_no_draw(tmp_path: Path) -> None:
    setting = make_setting()
    fit(0, tmp_path / "alone", setting)
    run_ranks(fit, 2, tmp_path / "both", dataclasses.replace(setting, num_workers=1))
    assert read(tmp_path / "both") == read(tmp_path / "alone")
    assert ledger(tmp_path / "both") == ledger(tmp_path / "alone")


@pytest.mark.shows("P28")
def test_a_kill_and_another_number_of_processes_change_no_draw(tmp_path: Path) -> None:
    setting = make_setting()
    fit(0, tmp_path / "whole", setting)
    with pytest.raises(RankError):
        run_ranks(fit, 2, tmp_path / "cut", setting, KillRank("on_backward_end", 7, 1))
    assert max(iteration for _, iteration in read(tmp_path / "cut")["hook"]) == 7
    fit(0, tmp_path / "cut", setting)
    assert read(tmp_path / "cut") == read(tmp_path / "whole")
    assert ledger(tmp_path / "cut") == ledger(tmp_path / "whole")


@pytest.mark.full
def test_started_processes_have_the_seeds_too(tmp_path: Path) -> None:
    setting = make_setting()
    fit(0, tmp_path / "alone", setting)
    fit(0, tmp_path / "both", setting, nproc=2)
    assert read(tmp_path / "both") == read(tmp_path / "alone")
    assert ledger(tmp_path / "both") == ledger(tmp_path / "alone")


def _train_gan(folder: Path, seed: int, **options: Any) -> Outcome:
    return train_gan(folder, random_seed=seed, **options)


def _train_small(**fields: Any) -> Callable[..., Outcome]:
    def run(folder: Path, seed: int, **options: Any) -> Outcome:
        return train(folder, Setting(total_steps=8, seed=seed, options=options, **fields))

    return run


@pytest.mark.shows("P29")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "run",
    [_train_small(is_manual=True, num_workers=1), _train_small(), _train_gan],
    ids=["manual steps and a worker", "steps", "YieldLoop"],
)
def test_a_seed_of_a_source_counts_like_that_of_the_run(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    """All seeds together give the bits of a run of that seed; one alone, its own part."""
    whole = run(tmp_path / "whole", 5)
    same = run(tmp_path / "same", 5, seeds=dict.fromkeys(SEEDS, 5))
    assert_equal(same, whole, since=0)
    named = run(tmp_path / "named", 6, seeds=dict.fromkeys(SEEDS, 5))
    first, *_ = whole.records
    assert named.records[first] == whole.records[first]
    for source in SEEDS:
        other = run(tmp_path / source, 5, seeds={source: OTHER}).records
        with_same_ids = [n for n, (ids, _) in whole.records.items() if other[n][0] == ids]
        assert with_same_ids == ([] if source == "order" else list(whole.records))
        assert all(other[n][1] != losses for n, (_, losses) in whole.records.items())


_SETTING = Setting(total_steps=8, valid_frequency=None, validates=False)


def _with(seeds: Any, **changed: Any) -> Setting:
    options = {"seeds": seeds, **changed.pop("options", {})}
    return dataclasses.replace(_SETTING, options=options, **changed)


@pytest.mark.shows("P29")
@pytest.mark.parametrize("none", [None, {}])
def test_a_run_without_seeds_stays_what_it_was(none: Any, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", dataclasses.replace(_SETTING, total_steps=12))
    train(tmp_path / "run", _SETTING)
    resumed = train(tmp_path / "run", _with(none, total_steps=12))
    assert_equal(resumed, whole, since=8)
    files = [tmp_path / name / "small" / FILE_NAME for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    newest = helios.find_last_checkpoint(tmp_path / "run" / "small")
    assert newest is not None
    assert "seeds" not in helios.load_checkpoint(newest)["options"]
    assert '"seeds"' not in newest.with_suffix(".json").read_text()


@pytest.mark.shows("P30")
@pytest.mark.parametrize(
    ("before", "now", "begins_epoch_again"),
    [
        ({}, {"order": 2}, True),
        ({"order": 1, "training": 2}, {"order": 2, "training": 2}, True),
        ({"order": 1}, None, True),
        ({}, {"training": 2}, False),
        ({"augmentation": 1}, {"augmentation": 2}, False),
        # The seed of the run, by its name.
        ({}, {"order": 5}, False),
    ],
)
def test_other_seeds_are_refused_at_a_resume_until_they_are_allowed(
    before: Any, now: Any, begins_epoch_again: bool, tmp_path: Path
) -> None:
    first = train(tmp_path, _with(before))
    with pytest.raises(RunMismatchError) as caught:
        train(tmp_path, _with(now, total_steps=12))
    change = f"seeds: {before} -> {now or {}}"
    assert f"since its checkpoint: {change}. Undo" in str(caught.value)
    assert 'Trainer(allow_changes=("seeds",))' in str(caught.value)
    options = {"allow_changes": ("seeds",)}
    resumed = train(tmp_path, _with(now, total_steps=12, options=options))
    assert sorted(resumed.records) == [9, 10, 11, 12]
    epoch = [i for n in (7, 8) for i in first.records[n][0]]
    epoch += [i for n in (9, 10, 11, 12) for i in resumed.records[n][0]]
    is_over = len(set(epoch[:22])) == 22
    assert is_over is not begins_epoch_again
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert change in newest.with_suffix(".json").read_text()


@pytest.mark.shows("P30")
def test_seeds_are_shown_with_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = (1 << 64) - 1
    train(tmp_path, _with({"training": largest, "init": 0}, chkpt_frequency=8))
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    seeds = {"init": 0, "training": largest}
    assert json.loads(newest.with_suffix(".json").read_text())["options"]["seeds"] == seeds
    capsys.readouterr()
    assert main(["inspect", str(newest)]) == 0
    assert f"seeds: {seeds}" in capsys.readouterr().out
    # The same seeds in another order are the same.
    resumed = train(tmp_path, _with({"init": 0, "training": largest}, total_steps=9))
    assert sorted(resumed.records) == [9]


@pytest.mark.parametrize(
    ("source", "what"), [("init", NUMERICS), ("order", ORDER), ("augmentation", CONTENT)]
)
def test_diff_names_what_another_seed_changes_first(source: str, what: str, tmp_path: Path) -> None:
    plans = [Plan(steps=3), Plan(steps=3, options={"seeds": {source: OTHER}})]
    found = diff(*(run_plan(tmp_path / str(n), plan) for n, plan in enumerate(plans)))
    assert (found.what[0], found.iteration) == (what, 1)
    assert any("seeds" in text or source in text for text in found.causes)


def test_hooks_between_epochs_draw_from_the_source_that_was_last(tmp_path: Path) -> None:
    """A loader of the user that has a length fetches once more at the end of an epoch."""

    def drawn(**seeds: int) -> list[list[float]]:
        log = _Epochs()
        data = _OwnLoader()
        options: dict[str, Any] = {"total_steps": 2, "use_cpu": True, "print_banner": False}
        helios.Trainer(plugins=[log], seeds=seeds, **options).fit(Linear("linear"), data)
        return log.drawn

    whole = drawn()
    for source, changed in (
        ("init", [0]),
        ("order", []),
        ("augmentation", [1, 2, 3]),
        ("training", []),
    ):
        other = drawn(**{source: OTHER})
        assert [n for n, found in enumerate(other) if found != whole[n]] == changed


class _Epochs(Quiet):
    def __init__(self) -> None:
        super().__init__("epochs")
        self.drawn: list[list[float]] = []

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.drawn.append(draw())

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.drawn.append(draw())


class _OwnLoader(helios.DataModule):
    def setup(self) -> None:
        """Nothing to prepare."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)


def test_the_ledger_begins_with_the_seeds(tmp_path: Path) -> None:
    heads = set()
    for number, seeds in enumerate((None, {"init": 5}, {"init": 6}, {"order": 5})):
        train(tmp_path / str(number), _with(seeds, total_steps=1))
        heads.add((tmp_path / str(number) / "small" / FILE_NAME).read_text().split("\n")[0])
    assert len(heads) == 4
