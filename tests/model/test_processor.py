"""Batch processors: a step as one function of model and batch (R6, R27-R33)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helios
from helios.errors import ArgumentError, LossNotProvidedError, UsageError
from helios.model.processor import BatchProcessor
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.models import OneLayer, forward


class Stepping(OneLayer):
    """The same, with a training step in the place of the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_processor = None

    def train_step(self, batch: Tensor, state: TrainingState) -> Tensor:
        return forward(self, batch)[1]


class Numbers(helios.DataModule):
    """1, 2, 3 ..., one a batch."""

    def __init__(self, training: int = 4) -> None:
        super().__init__()
        self.training = training

    def setup(self) -> None:
        self._train_dataset = self._make(self.training)
        self._valid_dataset = self._test_dataset = self._predict_dataset = self._make(3)

    def _make(self, length: int) -> Any:
        numbers = torch.arange(1.0, length + 1).unsqueeze(1)
        return self._create_dataset(numbers, helios.DataLoaderParams(batch_size=1))


def make_trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    given = {"train_unit": "iteration", "total_steps": 4, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **options}, plugins=list(plugins))


def weights_of(model: OneLayer) -> list[Tensor]:
    return [parameter.detach() for parameter in model.net.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.shows("R29")
def test_a_missing_loss_is_an_error_where_backward_needs_it() -> None:
    """R29; evaluations and steps without backward need none."""

    def lossless(model: Any, batch: Any) -> tuple[Any, None]:
        return batch, None

    with pytest.raises(LossNotProvidedError, match="must return a loss in training"):
        make_trainer().fit(OneLayer(BatchProcessor.from_callable(lossless)), Numbers())
    manual = OneLayer(BatchProcessor.from_callable(lossless, need_backward=False))
    assert make_trainer(valid_frequency=1).fit(manual, Numbers())


@pytest.mark.shows("R6")
def test_without_backward_training_has_no_loss() -> None:
    """R6: what forward returns as a loss is for evaluations."""

    def stepping(model: OneLayer, batch: Tensor) -> tuple[Tensor, Tensor]:
        model.optimizer.step()
        return batch, torch.tensor(5.0)

    model = OneLayer(BatchProcessor.from_callable(stepping, need_backward=False))
    assert make_trainer(valid_frequency=1).fit(model, Numbers())
    assert (dict(model.loss_items), model.metrics) == ({}, {"loss": 5.0})


@pytest.mark.shows("R28")
@pytest.mark.parametrize("result", [None, (1, 2, 3)])
def test_what_is_no_pair_is_an_error(result: Any) -> None:
    model = OneLayer(BatchProcessor.from_callable(lambda model, batch: result))
    with pytest.raises(UsageError, match=r"must return \(outputs, loss\)"):
        make_trainer().fit(model, Numbers())


@pytest.mark.shows("R31")
def test_transforms_are_one_or_several_in_their_order() -> None:

    def plus(batch: Tensor) -> Tensor:
        return batch + 1

    def twice(batch: Tensor) -> Tensor:
        return batch * 2

    def same(model: Any, batch: Tensor) -> tuple[Tensor, None]:
        return batch, None

    for given, expected in ((None, 1), (plus, 2), ([plus, twice], 4), ((twice, plus), 3), ([], 1)):
        model = OneLayer(BatchProcessor.from_callable(same, transforms=given))
        assert make_trainer().predict(model, Numbers(), checkpoint=None)[0].item() == expected


@pytest.mark.shows("R30", "R33", "C12")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_processor_trains_as_a_step_does(unit: str, accumulation: int) -> None:
    """R33, C12: the same bits; the loss is divided by the window, not by the processor."""
    options = {"train_unit": unit, "total_steps": 2, "accumulation_steps": accumulation}
    models = OneLayer(BatchProcessor.from_callable(forward)), Stepping()
    for model in models:
        make_trainer(**options).fit(model, Numbers(4))
    assert are_equal(*map(weights_of, models))
    assert models[0].loss_items == models[1].loss_items
    assert set(models[0].loss_items) == {"loss"}
    updates = {"iteration": {1: 2, 3: 2}, "epoch": {1: 8, 3: 4}}[unit][accumulation]
    assert [model.scheduler.last_epoch for model in models] == [updates, updates]


@pytest.mark.shows("R48")
@pytest.mark.parametrize("need_backward", [True, False])
def test_evaluations_reuse_the_processor_with_backward_off(need_backward: bool) -> None:
    """R6, R48: in evaluation mode, without gradients, through the transforms."""
    seen: list[tuple[bool, bool, bool, float]] = []

    class Asking(BatchProcessor):
        def forward(self, model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
            modes = self.need_backward, model.net.training, torch.is_grad_enabled()
            seen.append((*modes, batch.item()))
            return forward(model, batch)

    model = OneLayer(Asking(need_backward, torch.neg))
    trainer = make_trainer(total_steps=1, valid_frequency=1)
    trainer.fit(model, Numbers(1))
    evaluation = [(False, False, False, -number) for number in (1.0, 2.0, 3.0)]
    assert seen == [(need_backward, True, True, -1.0), *evaluation]
    for call in (trainer.validate, trainer.test, trainer.predict):
        seen.clear()
        call(model, Numbers(1))
        assert seen == evaluation


@pytest.mark.shows("R27", "R48")
def test_validation_and_test_give_the_loss_as_a_score() -> None:
    """R28: the mean over samples, in float64; predictions are the outputs."""
    model = OneLayer(BatchProcessor.from_callable(forward))
    trainer = make_trainer(total_steps=1, valid_frequency=1)
    trainer.fit(model, Numbers(1))
    with torch.no_grad():
        outputs = [model.net(torch.full((1, 1), number)) for number in (1.0, 2.0, 3.0)]
    losses = [item.square().mean() for item in outputs]
    expected = sum(map(float, losses)) / 3.0
    assert model.metrics == {"loss": expected}
    model.metrics.clear()
    trainer.validate(model, Numbers(1))
    assert model.metrics == {"loss": expected}
    trainer.test(model, Numbers(1))
    assert model.test_scores == {"loss": expected}
    predictions = trainer.predict(model, Numbers(1))
    assert are_equal(predictions, outputs)


@pytest.mark.shows("C12")
def test_a_training_step_has_one_owner() -> None:

    class Both(Stepping):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.batch_processor = BatchProcessor.from_callable(forward)

    with pytest.raises(ArgumentError, match="must define its training step once"):
        make_trainer().fit(Both(), Numbers())
    with pytest.raises(ArgumentError, match="must be None or a BatchProcessor"):
        make_trainer().fit(OneLayer(forward), Numbers())


class Saving(BatchProcessor):
    """Counts its batches; the count is state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return forward(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.shows("R32")
def test_a_processor_with_state_is_saved_as_any_object_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        model = OneLayer(Saving())
        trainer = make_trainer(total_steps=steps, chkpt_root=tmp_path, chkpt_frequency=1)
        trainer.fit(model, Numbers(4))
        assert model.batch_processor.count == steps
    assert "WARNING" not in capsys.readouterr().err
