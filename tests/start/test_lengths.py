"""``max_epochs`` and ``max_steps``: how long a run is, and what is done by default."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.errors import ArgumentError, UsageError
from helios.start.writers import SaveTimer
from helios.state import TrainingState

NUMBERS = TensorDataset(torch.arange(24.0).reshape(12, 2))
"""Six batches of two samples."""


def make_data(*, validates: bool = True) -> helios.DataModule:
    valid = {"valid": NUMBERS} if validates else {}
    return helios.DataModule.from_datasets(train=NUMBERS, **valid, batch_size=2)


class Net(helios.Model):
    unsaved = ("validated", "counters")

    def __init__(self) -> None:
        super().__init__("net")
        self.validated: list[int] = []
        self.counters = TrainingState()

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.counters = state
        return self.net(batch[0]).square().mean()

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.validated.append(self.counters.global_step)

    def valid_step(self, batch: Any, step: int) -> dict[str, Any]:
        return {"error": (self.net(batch[0]).double().square().sum(), len(batch[0]))}


def fit(folder: Path | None, *, validates: bool = True, **options: Any) -> Net:
    model = Net()
    trainer = helios.Trainer(chkpt_root=folder, use_cpu=True, print_banner=False, **options)
    assert trainer.fit(model, make_data(validates=validates))
    return model


def saved(folder: Path) -> list[int]:
    paths = (folder / "net").glob("*.pth")
    return sorted(int(path.stem.rpartition("_")[2]) for path in paths)


def weights(model: Net) -> bytes:
    return bytes(model.net.weight.detach().numpy().tobytes())


def test_max_epochs_is_a_run_of_epochs_that_validates_and_saves_each(tmp_path: Path) -> None:
    model = fit(tmp_path, max_epochs=4)
    assert model.counters.global_step == 24
    assert model.validated == [6, 12, 18, 24]
    assert saved(tmp_path) == [12, 18, 24], "the newest three"
    other = fit(None, total_steps=4)
    assert weights(other) == weights(model)
    assert other.validated == []


def test_max_steps_counts_steps_and_does_the_rest_once_an_epoch(tmp_path: Path) -> None:
    model = fit(tmp_path, max_steps=15)
    assert model.counters.global_step == 15
    assert model.validated == [6, 12, 15]
    assert saved(tmp_path) == [6, 12, 15]
    assert fit(None, max_steps=4).validated == [4], "the last step is validated, too"
    assert weights(fit(None, train_unit="step", total_steps=15)) == weights(model)


@pytest.mark.parametrize(("epochs", "steps", "last"), [(2, 15, 12), (4, 15, 15), (4, 12, 12)])
def test_what_comes_first_ends_a_run_with_both(
    epochs: int, steps: int, last: int, tmp_path: Path
) -> None:
    model = fit(tmp_path, max_epochs=epochs, max_steps=steps)
    assert model.counters.global_step == last
    assert saved(tmp_path)[-1] == last
    # It goes on from the middle of an epoch, with the bits of a run that was never stopped.
    longer = fit(tmp_path, max_epochs=4, max_steps=23)
    assert longer.counters.global_step == 23
    assert weights(longer) == weights(fit(None, max_epochs=4, max_steps=23))


def test_a_number_counts_epochs_or_steps_and_none_is_never(tmp_path: Path) -> None:
    epochs: dict[str, Any] = {"max_epochs": 4, "valid_frequency": 2, "chkpt_frequency": 2}
    assert fit(tmp_path / "a", **epochs).validated == [12, 24]
    assert saved(tmp_path / "a") == [12, 24]
    steps: dict[str, Any] = {"max_steps": 9, "valid_frequency": 4, "chkpt_frequency": 3}
    assert fit(tmp_path / "b", **steps).validated == [4, 8]
    assert saved(tmp_path / "b") == [3, 6, 9]
    never: dict[str, Any] = {"valid_frequency": None, "chkpt_frequency": None}
    assert fit(tmp_path / "c", max_epochs=1, **never).validated == []
    assert saved(tmp_path / "c") == []
    assert fit(None, max_epochs=1, **never).validated == []
    assert fit(tmp_path / "d", max_epochs=1, validates=False).validated == []


@pytest.mark.parametrize("frequency", ["10min", "auto"])
def test_a_save_is_due_after_ten_minutes_inside_an_epoch_too(
    frequency: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes: Iterator[int] = iter(range(1000))
    timer = functools.partial(SaveTimer, clock=lambda: 160.0 * next(minutes))
    monkeypatch.setattr("helios.start.training.SaveTimer", timer)
    store = helios.CheckpointStore(is_async=False)
    fit(tmp_path, max_epochs=5, chkpt_frequency=frequency, store=store)
    inside = [number for number in saved(tmp_path) if number % 6]
    assert inside
    if frequency == "auto":
        assert {6, 12, 18, 24, 30} <= {*saved(tmp_path)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "must say how long a run is"),
        ({"max_epochs": 1, "total_steps": 1}, "max_epochs"),
        ({"max_steps": 1, "train_unit": "step"}, "max_steps"),
        ({"max_epochs": 1, "chkpt_frequency": "often"}, "chkpt_frequency"),
    ],
)
def test_no_length_and_two_of_them_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        fit(Path("runs") if "chkpt_frequency" in options else None, **options)


def test_the_same_run_twice_in_one_script_is_a_mistake(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(UsageError, match="save_name"):
        fit(tmp_path, max_epochs=1)
    assert fit(tmp_path, max_epochs=2).counters.global_step == 12


def test_an_evaluation_returns_its_scores_as_a_mapping_that_is_true(tmp_path: Path) -> None:
    model = fit(tmp_path, max_epochs=1)
    trainer = helios.Trainer(max_epochs=1, chkpt_root=tmp_path, use_cpu=True)
    scores = trainer.validate(model, make_data())
    assert dict(scores) == {"error": float(model.metrics["error"])}
    nothing = trainer.test(model, make_data())
    assert nothing
    assert not len(nothing)
