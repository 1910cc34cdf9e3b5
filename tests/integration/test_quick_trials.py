"""Limited passes, and a first validation that leaves no trace (C17, K14)."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import helios
from helios.core import rng
from helios.errors import RunMismatchError
from helios.plugins import Plugin
from helios.state import Phase, TrainingState
from tests.loops.recorded import record
from tests.support.quiet import Quiet
from tests.support.resume import copy_checkpoint, resume_everywhere
from tests.support.runs import (
    EventLog,
    IndexModule,
    Outcome,
    Setting,
    SmallModel,
    comparable_state,
    digest,
    train,
)

_SETTING = Setting()


def _trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    return helios.Trainer(use_cpu=True, print_banner=False, plugins=plugins, **options)


def test_evaluations_are_limited_too() -> None:
    log = EventLog()
    limits = {Phase.VALIDATION: 1, Phase.TESTING: 2, Phase.PREDICTION: 1}
    options = {"total_steps": 2, "valid_frequency": 2, "batch_limits": limits}
    trainer = _trainer(log, train_unit="iteration", **options)
    model, data = SmallModel(_SETTING), IndexModule(_SETTING)
    trainer.fit(model, data)
    trainer.validate(model, data)
    trainer.test(model, data)
    assert len(trainer.predict(model, data)) == 1
    ends = [name for name, *_ in log.events if name.endswith("ing_batch_end")]
    assert ends == ["on_training_batch_end"] * 2 + ["on_testing_batch_end"] * 2 + [
        "on_predicting_batch_end"
    ]
    assert [name for name, *_ in log.events].count("on_validation_batch_end") == 2


@pytest.mark.parametrize(
    "setting",
    [
        Setting(accumulation=3, total_steps=6, valid_frequency=2),
        Setting(unit="epoch", total_steps=4, valid_frequency=1, accumulation=2, requests=True),
    ],
    ids=["iteration", "epoch"],
)
def test_a_limited_run_resumes_exactly_everywhere(setting: Setting, tmp_path: Path) -> None:
    limits = {Phase.TRAINING: 4, Phase.VALIDATION: 1}
    setting = dataclasses.replace(setting, options={"batch_limits": limits})
    whole = resume_everywhere(lambda folder: train(folder, setting), tmp_path)
    assert whole.cursor is not None
    assert whole.cursor.epoch >= 2


_CHANGES = [(4, 2, 3), (None, 3, 5)]


@pytest.mark.parametrize(("before", "after", "done"), _CHANGES)
def test_a_changed_limit_stops_a_resume_and_the_epoch_goes_on_where_it_stood_if_allowed(
    before: int | None, after: int | None, done: int, tmp_path: Path
) -> None:
    def make_run(folder: Path, limit: int | None, **options: Any) -> Outcome:
        limits = {} if limit is None else {Phase.TRAINING: limit}
        options["batch_limits"] = limits
        setting = Setting(total_steps=12, validates=False, valid_frequency=None, options=options)
        return train(folder, setting)

    whole = [ids for ids, _ in make_run(tmp_path / "whole", None).records.values()]
    make_run(tmp_path / "first", before)
    (path,) = (tmp_path / "first").glob(f"*/*_iter_{done}.pth")
    with pytest.raises(RunMismatchError, match=f"limit_batches: {before} -> {after}"):
        make_run(copy_checkpoint(path, tmp_path / "refused"), after)
    folder = copy_checkpoint(path, tmp_path / "allowed")
    resumed = make_run(folder, after, allow_changes=("limit_batches",))
    length = max(after or 6, done)
    assert [ids for ids, _ in resumed.records.values()][: length - done + 1] == [
        *whole[done:length],
        whole[6],  # the head of the next epoch
    ]


class Meter:
    """An average without a state_dict."""

    def __init__(self) -> None:
        self.total = 0.0


class Nasty(SmallModel):
    """Validation changes whatever it can reach, and the training computes with all of it."""

    unsaved = ("records", "setting", "alias", "noise")

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.history: list[Any] = []
        self.alias = self.history
        self.total, self.gone = 0, 1.0
        self.sums = torch.zeros(3)
        self.meter = Meter()
        self.tracker = nn.BatchNorm1d(2)
        self.tracker.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.noise = torch.Generator().manual_seed(1)

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.fresh = [len(self.history)]
        vars(self).pop("gone", None)
        self.total += 1

    def valid_step(self, batch: Any, step: int) -> Any:
        self.history.append({"ids": batch[0].tolist()})
        self.sums[1:] += float(batch[1].sum())
        self.meter.total += float(torch.rand(1, generator=self.noise))
        self.tracker.hidden += 1
        with torch.no_grad():
            self.net[4].bias.add_(0.01)
            self.average.update()
        self.optimizer.param_groups[0]["lr"] *= 0.9
        torch.rand(1), random.random(), np.random.rand()
        rng.get_default_numpy_rng().generator.random()
        return super().valid_step(batch, step)

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        self.net[2].p = 0.3 + 0.05 * self.total
        if self.total == 1:
            self.net[3].register_forward_hook(lambda module, args, out: out * 0.9)
        if self.trainer._parts.run.is_sanity_check:
            self.trainer.request_checkpoint()
            self.trainer.request_stop("nobody shall hear this")
            self.trainer._parts.context.interrupt("nor this")

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        ids, features = batch
        shift = self.total + self.meter.total + float(self.sums.sum()) / 100 + len(self.alias)
        shift += float(self.tracker.hidden.sum()) + vars(self).get("gone", 0.5)
        shift += np.random.rand() + float(torch.rand(1, generator=self.noise))
        return super().train_step((ids, features + 0.01 * shift), state)


class Counting(Quiet):
    """Counts validations in an attribute, on which the training depends."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.count = 0

    def on_validation_batch_end(self, step: int) -> None:
        self.count += 1

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch[0], batch[1] + 0.01 * self.count


_TRIAL_EVENTS = ("on_sanity_check_start", "on_sanity_check_end")


def _content(folder: Path) -> dict[str, dict[str, str]]:
    """Return digests of every checkpoint, by part."""
    found = {}
    for path in sorted(folder.glob("*/*.pth")):
        payload = helios.load_checkpoint(path)
        payload["training_state"] = comparable_state(payload["training_state"])
        found[path.stem] = {name: digest(part) for name, part in payload.items()}
    return found


@pytest.mark.shows("K14", "C17")
@pytest.mark.filterwarnings("ignore::UserWarning:helios.*")
def test_a_run_with_a_trial_is_the_run_without(tmp_path: Path) -> None:
    def run(folder: Path, sanity_steps: int) -> Outcome:
        options = {"train_unit": "iteration", "total_steps": 7, "valid_frequency": 2}
        options |= {"random_seed": 5, "sanity_steps": sanity_steps}
        return record(folder, Nasty(_SETTING), IndexModule(_SETTING), Counting(), **options)

    plain, tried = run(tmp_path / "plain", 0), run(tmp_path / "tried", 2)
    assert tried.records == plain.records
    assert tried.bits() == plain.bits()
    assert tried.cursor == plain.cursor
    assert tried.saves.keys() == plain.saves.keys()
    assert _content(tmp_path / "tried") == _content(tmp_path / "plain")
    names = [event[0] for event in tried.events]
    start, end = (names.index(name) for name in _TRIAL_EVENTS)
    assert tried.events[:start] + tried.events[end + 1 :] == plain.events
    assert not set(_TRIAL_EVENTS) & {event[0] for event in plain.events}


@pytest.mark.shows("H57", "K14", "C17")
def test_it_is_skipped_at_resumes_and_without_validation_data(tmp_path: Path) -> None:
    trying = {"sanity_steps": 2}
    setting = Setting(total_steps=2, options=trying)
    train(tmp_path, setting)
    resumed = train(tmp_path, dataclasses.replace(setting, total_steps=4))
    assert resumed.has_ended
    assert "on_sanity_check_start" not in {event[0] for event in resumed.events}
    bare = Setting(total_steps=2, validates=False, valid_frequency=None, options=trying)
    outcome = train(tmp_path / "bare", bare)
    assert "on_sanity_check_start" not in {event[0] for event in outcome.events}


def test_lazy_layers_whose_first_batch_cannot_be_undone_are_refused() -> None:
    model, data = SmallModel(_SETTING), IndexModule(_SETTING)
    model.on_fit_start = lambda: setattr(model, "late", nn.LazyLinear(1))
    with pytest.raises(helios.errors.UsageError, match="'late' has lazy layers"):
        _trainer(sanity_steps=1, total_steps=1, valid_frequency=1).fit(model, data)
