"""Kill it anywhere, run it again: equal bits (the promise)."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.core import rng
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.kills import KillAt, run_in_child
from tests.support.resume import assert_equal, copy_checkpoint, resume_everywhere
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel, digest, train

_EPOCHS = {"unit": "epoch", "total_steps": 3, "valid_frequency": 1, "scheduler": "epoch"}


def _check(setting: Setting, folder: Path, *, is_whole: bool = False, **changed: Any) -> None:
    resumed = dataclasses.replace(setting, **changed)
    resume_everywhere(
        lambda run: train(run, setting),
        folder,
        make_resumed=lambda run: train(run, resumed),
        is_whole=is_whole,
    )


_STEPS = {
    "plain": {},
    "accumulation 2": {"accumulation": 2, "total_steps": 8},
    "accumulation 3": {"accumulation": 3, "total_steps": 6},
    "manual": {"is_manual": True},
    "no validation": {"validates": False, "valid_frequency": None},
    "scheduler per epoch": {"scheduler": "epoch"},
    "scheduler on a plateau": {"scheduler": "plateau"},
    "partial batches dropped": {"drop_last": True},
    "one batch an epoch": {"batch_size": 22, "total_steps": 4},
    "early stop": {"early_stop_cycles": 2, "total_steps": 60},
    "clipped by norm": {"options": {"clip_norm": 0.1}},
}


@pytest.mark.shows("H6", "L37", "R44", "P3")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _STEPS)
def test_a_run_by_steps_resumes_everywhere(name: str, tmp_path: Path) -> None:
    _check(Setting(**_STEPS[name]), tmp_path, is_whole=name == "plain")


_BY_EPOCH = {
    "plain": {},
    "accumulation 2 with a partial window": {"accumulation": 2, "batch_size": 5},
    "accumulation 3": {"accumulation": 3},
    "manual": {"is_manual": True, "scheduler": "none"},
    "manual with open gradients": {"is_manual": True, "accumulation": 4, "scheduler": "none"},
    "scheduler per step": {"scheduler": "step"},
    "scheduler on a plateau": {"scheduler": "plateau"},
    "early stop": {"early_stop_cycles": 2, "total_steps": 9},
}


@pytest.mark.shows("H24", "L18", "L29")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _BY_EPOCH)
def test_a_run_by_epochs_resumes_everywhere(name: str, tmp_path: Path) -> None:
    _check(Setting(**{**_EPOCHS, **_BY_EPOCH[name]}), tmp_path, is_whole=name == "plain")


_INSIDE = {
    "plain": {},
    "accumulation 2": {"accumulation": 2},
    "manual with open gradients": {"is_manual": True, "accumulation": 4, "scheduler": "none"},
}


@pytest.mark.shows("H13", "R41", "R44")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _INSIDE)
def test_every_safe_point_inside_an_epoch_resumes(name: str, tmp_path: Path) -> None:
    _check(Setting(**{**_EPOCHS, **_INSIDE[name]}, requests=True), tmp_path)


_WORKERS = {
    "2 workers": ({"num_workers": 2}, {}),
    "2 persistent workers": ({"num_workers": 2, "persistent_workers": True}, {}),
    "from 0 to 2 workers": ({}, {"num_workers": 2}),
    "from 2 to 0 workers": ({"num_workers": 2}, {"num_workers": 0}),
}


@pytest.mark.shows("H15")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _WORKERS)
def test_workers_change_no_bit(name: str, tmp_path: Path) -> None:
    setting, changed = _WORKERS[name]
    _check(Setting(**setting, chkpt_frequency=3), tmp_path, **changed)


@pytest.mark.shows("H12")
def test_nothing_is_fetched_that_was_trained_on(tmp_path: Path) -> None:
    """But the last batch, where there is a ledger to compare it with."""
    setting = Setting(validates=False, valid_frequency=None, options={"ledger": "off"})
    whole = train(tmp_path / "whole", setting)
    for since in (3, 6, 7, 13):
        path = next((tmp_path / "whole").glob(f"*/*_iter_{since}.pth"))
        resumed = train(copy_checkpoint(path, tmp_path / f"from-{since}"), setting)
        expected = [i for n, (ids, _) in whole.records.items() if n > since for i in ids]
        assert resumed.fetched == expected


def test_a_raised_total_goes_on_as_if_it_had_never_ended(tmp_path: Path) -> None:
    for unit, short, long in (("iteration", 8, 14), ("epoch", 2, 3)):
        long_setting = Setting(unit=unit, total_steps=long, valid_frequency=1)
        short_setting = dataclasses.replace(long_setting, total_steps=short)
        whole = train(tmp_path / f"{unit}-whole", long_setting)
        first = train(tmp_path / f"{unit}-raised", short_setting)
        second = train(tmp_path / f"{unit}-raised", long_setting)
        assert_equal(second, whole, since=max(first.records))


@pytest.mark.shows("S53")
@pytest.mark.parametrize(
    ("unit", "stages", "kill_at"), [("iteration", (4, 14), 12), ("epoch", (1, 4), 20)]
)
def test_a_kill_in_the_last_stage_of_a_script_costs_no_bit(
    unit: str, stages: tuple[int, int], kill_at: int, tmp_path: Path
) -> None:
    # In time, so that the kill finds the checkpoint before it committed.
    options = {"store": helios.CheckpointStore(is_async=False)}
    first, last = (
        Setting(unit=unit, total_steps=total, valid_frequency=1, options=options)
        for total in stages
    )

    def train_in_stages(name: str, *kills: Plugin) -> Outcome:
        train(tmp_path / name, first)
        return train(tmp_path / name, last, *kills)

    whole, kill = train_in_stages("whole"), KillAt("on_backward_end", kill_at)
    assert run_in_child(lambda: train_in_stages("run", kill), tmp_path / "outcome") == -9
    assert not train(tmp_path / "run", first).records
    resumed = train_in_stages("run")
    assert_equal(resumed, whole, since=min(resumed.records) - 1)
    ends = [
        {
            path.name
            for path in (tmp_path / name).glob("*/*.json")
            if '"finished": null' in path.read_text()
        }
        for name in ("whole", "run")
    ]
    assert ends[0] == ends[1]


def test_validation_logging_and_saving_change_no_bit(tmp_path: Path) -> None:
    base = Setting(total_steps=14, chkpt_frequency=7, validates=False, valid_frequency=None)
    whole = train(tmp_path / "base", base)
    others = {
        "validation": {"validates": True, "valid_frequency": 2},
        "saving every step": {"chkpt_frequency": 1},
        "printing": {"print_frequency": 1},
        "bars": {"options": {"enable_progress_bar": True}},
        "tensorboard": {
            "print_frequency": 2,
            "options": {"enable_tensorboard": True, "run_path": tmp_path / "runs"},
        },
    }
    for name, changed in others.items():
        other = train(tmp_path / name, dataclasses.replace(base, **changed))
        assert other.records == whole.records, name
        assert digest(other.model["objects"]) == digest(whole.model["objects"]), name


def test_threads_are_those_of_the_first_start_and_one_for_several_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Watcher(Plugin):
        def setup(self) -> None:
            seen.append(torch.get_num_threads())

        def on_training_batch_start(self, state: TrainingState) -> None:
            seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        train(tmp_path / "run", Setting(total_steps=4))
        for variable in ("3", ""):
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
            setting = Setting(total_steps=1, options={"num_replicas": 2})
            train(tmp_path / variable, setting, Watcher("watcher"))
        trainer = helios.Trainer(num_replicas=2, plugins=[Watcher("watcher")], use_cpu=True)
        trainer.validate(SmallModel(setting), IndexModule(setting), checkpoint=None)
    finally:
        torch.set_num_threads(1)
    train(tmp_path / "run", Setting(total_steps=6), Watcher("watcher"))
    assert seen == [3, 3, 1, 1, 1, 2, 2, 2]
    assert torch.get_num_threads() == 1


@pytest.mark.shows("K10")
def test_a_hook_behind_the_safe_point_draws_the_same_numbers(tmp_path: Path) -> None:

    class Drawing(Plugin):
        unsaved = ("drawn",)

        def __init__(self) -> None:
            super().__init__("drawing")
            self.drawn: list[tuple[float, float, float]] = []

        def setup(self) -> None:
            torch.rand(3)

        def on_training_start(self) -> None:
            random.random()

        def should_training_stop(self) -> bool:
            numpy = rng.get_default_numpy_rng().generator
            self.drawn.append((torch.rand(1).item(), random.random(), numpy.normal()))
            return False

    setting = Setting(total_steps=8, valid_frequency=3)
    whole = Drawing()
    train(tmp_path / "whole", setting, whole)
    (path,) = (tmp_path / "whole").glob("*/*_iter_3.pth")
    resumed = Drawing()
    train(copy_checkpoint(path, tmp_path / "resumed"), setting, resumed)
    assert resumed.drawn == whole.drawn[-len(resumed.drawn) :]
    assert len(resumed.drawn) == 7


_MATRIX = [
    pytest.param(unit, workers, accumulation, is_manual, validates, scheduler)
    for unit in ("iteration", "epoch")
    for workers in (0, 2)
    for accumulation in (1, 2, 3)
    for is_manual in (False, True)
    for validates in (False, True)
    for scheduler in ("step", "epoch", "plateau")
    if not (is_manual and scheduler != "step") and (validates or scheduler != "plateau")
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("unit", "workers", "accumulation", "is_manual", "validates", "scheduler"), _MATRIX
)
def test_the_whole_matrix_resumes_everywhere(
    unit: str,
    workers: int,
    accumulation: int,
    is_manual: bool,
    validates: bool,
    scheduler: str,
    tmp_path: Path,
) -> None:
    setting = Setting(
        unit=unit,
        total_steps=3 if unit == "epoch" else 12,
        num_workers=workers,
        accumulation=accumulation,
        is_manual=is_manual,
        validates=validates,
        valid_frequency=(1 if unit == "epoch" else 2) if validates else None,
        scheduler=scheduler,
        requests=unit == "epoch",
        chkpt_frequency=3 if workers and unit == "iteration" else 1,
    )
    _check(setting, tmp_path)
