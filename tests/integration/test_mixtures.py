"""Runs on mixtures: resumed anywhere, and bound to the sources that they were started with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.data import Mixture
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexData, IndexModule, Outcome, Setting, noisy_collate, train


class MixtureModule(IndexModule):
    """Two sources, of which the first is used up sooner."""

    def __init__(self, setting: Setting, weights: tuple[float, ...] = (3, 1)) -> None:
        super().__init__(setting)
        self.weights = weights

    def setup(self) -> None:
        super().setup()
        pairs = zip("ab", map(IndexData, (5, 17)), self.weights, strict=False)
        mixture = Mixture({name: (data, weight) for name, data, weight in pairs}, length=22)
        params = helios.DataLoaderParams(
            batch_size=4,
            shuffle=True,
            collate_fn=noisy_collate,
            num_workers=self.setting.num_workers,
        )
        self._train_dataset = self._create_dataset(mixture, params)


def run(folder: Path, weights: tuple[float, ...] = (3, 1), **more: Any) -> Outcome:
    make_data = partial(MixtureModule, weights=weights)
    setting = Setting(**{"total_steps": 9, "make_data": make_data, **more})
    return train(folder, setting)


@pytest.mark.shows("P56")
def test_a_run_on_a_mixture_resumes_everywhere(tmp_path: Path) -> None:
    whole = resume_everywhere(run, tmp_path)
    ids = [i for batch, _ in whole.records.values() for i in batch]
    assert len(set(ids)) > 5
    assert len(ids) == 22 + 3 * 4
