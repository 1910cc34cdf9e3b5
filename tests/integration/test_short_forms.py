"""Short forms of steps, setup and data give the bits of the long ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helios import DataLoaderParams, DataModule, Model
from tests.typed.short_script import (
    DATA,
    Batch,
    Line,
    LineOfTwoSteps,
    Numbers,
    make_data,
    make_trainer,
)


class LongNumbers(DataModule):
    """Gives its data by the names of helios-ml."""

    def setup(self) -> None:
        params = DataLoaderParams(batch_size=4)
        self._valid_dataset = self._create_dataset(DATA, params)
        self._train_dataset = self._create_dataset(DATA, {"batch_size": 4, "shuffle": True})


def fitted(model: Model, data: DataModule | None = None, **options: Any) -> dict[str, Tensor]:
    trainer = make_trainer(**options)
    assert trainer.fit(model, data or make_data())
    return {
        f"{name}.{path}": tensor
        for name, network in model.discovery.modules().items()
        for path, tensor in network.state_dict().items()
    }


def test_data_gives_the_same_bits_by_any_of_its_names() -> None:
    weights = fitted(Line("net"), LongNumbers(), num_replicas=2)
    for data in (make_data(), Numbers()):
        found = fitted(Line("net"), data, num_replicas=2)
        torch.testing.assert_close(found, weights, rtol=0, atol=0)


class Prepared(Line):
    """Counts in its events of a validation what its step needs."""

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.num_batches = 0

    def valid_step(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        self.num_batches += 1
        return super().valid_step(batch)


@pytest.mark.parametrize(
    ("kind", "scores", "said"),
    [
        (
            Line,
            {"error"},
            "Testing of the model as it is now, after fit, by valid_step (Line has no",
        ),
        (LineOfTwoSteps, {"tested"}, ""),
        (Prepared, set(), "Prepared has no test_step, and its valid_step needs its on_validation_"),
    ],
)
def test_a_model_without_a_test_step_is_tested_by_its_valid_step(
    kind: type[Line], scores: set[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, trainer = kind(), make_trainer()
    assert trainer.fit(model, make_data())
    validated = dict(model.val_scores)
    with caplog.at_level("INFO", logger="helios"):
        assert trainer.test(model, make_data())
    assert model.test_scores.keys() == scores
    assert model.val_scores == validated
    assert said in caplog.text
    assert ("no test_step" in caplog.text) is bool(said)
    assert all(score == validated["error"] for score in model.test_scores.values())
