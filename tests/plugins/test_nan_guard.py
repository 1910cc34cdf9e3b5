"""A planted NaN is found, named and kept out of the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.plugins.nan_guard import NaNGuard
from tests.loops.recorded import record
from tests.support.resume import resume_everywhere
from tests.support.runs import (
    IndexData,
    IndexModule,
    Outcome,
    Requester,
    Setting,
    SmallModel,
    noisy_collate,
)

BAD = 13


class NanData(IndexData):
    """Some samples are not finite."""

    def __init__(self, bad: dict[int, float], **options: Any) -> None:
        super().__init__(**options)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        number, features = super().__getitem__(index)
        return number, features * self.bad.get(index, 1.0)


class NanModule(IndexModule):
    """The data of a setting, with planted samples."""

    def __init__(self, setting: Setting, bad: dict[int, float] | None = None) -> None:
        super().__init__(setting)
        self.bad = {BAD: math.nan} if bad is None else bad

    def setup(self) -> None:
        super().setup()
        setting = self.setting
        params = helios.DataLoaderParams(
            batch_size=setting.batch_size,
            shuffle=setting.shuffle,
            num_workers=setting.num_workers,
            collate_fn=noisy_collate,
        )
        self._train_dataset = self._create_dataset(NanData(self.bad), params)


def _train(
    folder: Path | None,
    setting: Setting,
    *plugins: Plugin,
    model: SmallModel | None = None,
    data: NanModule | None = None,
) -> Outcome:
    return record(
        folder,
        model or SmallModel(setting),
        data or NanModule(setting),
        *plugins,
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        valid_frequency=setting.valid_frequency,
        accumulation_steps=setting.accumulation,
        random_seed=setting.seed,
    )


def _order(setting: Setting) -> dict[int, list[int]]:
    """Return the samples of each iteration, as a run without planted samples has them."""
    outcome = _train(None, setting, data=NanModule(setting, {}))
    return {number: ids for number, (ids, _) in outcome.records.items()}


def _bad_iterations(setting: Setting) -> list[int]:
    return [number for number, ids in _order(setting).items() if BAD in ids]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checks", ["loss", "gradients", "both"])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(num_workers=2),
        Setting(unit="epoch", total_steps=2, accumulation=3, valid_frequency=1),
    ],
    ids=["workers", "epoch"],
)
def test_the_error_names_the_planted_sample(setting: Setting, checks: str) -> None:
    order = _order(setting)
    bad = _bad_iterations(setting)[0]
    size = setting.accumulation
    window = range((bad - 1) // size * size + 1, (bad - 1) // size * size + size + 1)
    model = SmallModel(setting)
    with pytest.raises(UsageError) as caught:
        _train(None, setting, NaNGuard(checks=checks), model=model)
    text = str(caught.value)
    ids = ", ".join(map(str, order[bad]))
    assert "in epoch 1, iteration" in text
    # Without bad losses, each batch of the window is named.
    assert f"nan of batch {bad - 1} (from 0) of epoch 1, samples {ids}" in text
    assert sum(f"batch {n - 1} (from 0)" in text for n in window) == 1
    names = "Gradients: net.1.bias, net.1.weight, net.4.bias, net.4.weight."  # net.0 is frozen
    assert (names in text) == (checks != "loss")
    assert all(p.isfinite().all() for p in model.net.parameters())


_SKIPPING = [
    Setting(total_steps=6, accumulation=3, valid_frequency=2),
    Setting(unit="epoch", total_steps=3, accumulation=3, valid_frequency=1, scheduler="epoch"),
    Setting(total_steps=12, num_workers=1, scheduler="plateau"),
]
_IDS = ["window", "epoch", "workers"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", _SKIPPING, ids=_IDS)
def test_a_run_that_skips_resumes_exactly_everywhere(setting: Setting, tmp_path: Path) -> None:
    skipped: list[int] = []

    def make_run(folder: Path) -> Outcome:
        guard = NaNGuard("skip")
        # A checkpoint at every safe point: also right behind a step that was left out.
        outcome = _train(folder, setting, guard, Requester())
        skipped.append(guard.num_skipped if outcome.has_ended else skipped[0])
        return outcome

    whole = resume_everywhere(make_run, tmp_path)
    assert set(skipped) == {skipped[0]}
    assert skipped[0] >= 2
    assert len(whole.saves) >= len(whole.records) // setting.accumulation
    finite = whole.model["objects"]["net"]
    assert all(weight.isfinite().all() for weight in finite.values())


def test_too_many_skips_in_a_row_are_an_error() -> None:
    setting = Setting(total_steps=9)
    data = NanModule(setting, dict.fromkeys(range(22), math.nan))
    with pytest.raises(UsageError, match=r"NaNGuard\(limit=3\) allows no more"):
        _train(None, setting, guard := NaNGuard("skip", limit=3), data=data)
    assert guard.num_skipped == 3


def test_stopping_saves_a_clean_state_and_is_the_regular_end(tmp_path: Path) -> None:
    setting = Setting(total_steps=14)
    bad = _bad_iterations(setting)[0]
    guard = NaNGuard("stop")
    outcome = _train(tmp_path, setting, guard)
    assert outcome.has_ended
    assert max(outcome.records) == bad
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    content = helios.load_checkpoint(newest)
    assert content["training_state"].global_iteration == bad
    assert content["training_state"].current_iteration == bad - 1
    network = content["model"]["objects"]["net"]
    assert all(weight.isfinite().all() for weight in network.values())
    assert f"iteration {bad}" in content["cursor"]["stop_reason"]
    again = _train(tmp_path, setting, NaNGuard("stop"))
    assert not again.has_ended


def test_a_model_that_makes_its_own_updates_cannot_be_guarded() -> None:
    with pytest.raises(UsageError, match="train_step that returns the loss"):
        _train(None, Setting(total_steps=8, is_manual=True), NaNGuard())
