"""Batch processors: a step as one function of model and batch (R6, R27-R33)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helios
from helios.errors import ArgumentError, ArgumentTypeError, LossNotProvidedError, UsageError
from helios.model.processor import BatchProcessor, Processed
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


# Alone


@pytest.mark.shows("R28")
def test_a_processor_must_say_how_it_goes_forward() -> None:
    """R28."""
    with pytest.raises(TypeError, match="forward"):
        BatchProcessor()


@pytest.mark.shows("R27")
def test_a_processor_returns_outputs_and_loss() -> None:
    """R27, R28."""

    class Doubling(BatchProcessor):
        def forward(self, model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
            return model, batch * 2

    model = object()
    assert Doubling()._process(model, 4, is_evaluating=False) == Processed(model, 8)
    assert Doubling()._process(model, 4, is_evaluating=True) == Processed(model, 8)


@pytest.mark.shows("R30")
def test_a_function_is_a_processor() -> None:
    """R30."""
    processor = BatchProcessor.from_callable(lambda model, batch: (model, batch))
    assert processor.need_backward is True
    assert processor._process(1, 2, is_evaluating=False) == Processed(1, 2)
    processor = BatchProcessor.from_callable(forward, False, abs)
    assert processor.need_backward is False
    assert processor._transform(-3) == 3


@pytest.mark.shows("R29")
def test_a_missing_loss_is_an_error_where_backward_needs_it() -> None:
    """R29; evaluations and steps without backward need none."""

    def lossless(model: Any, batch: Any) -> tuple[Any, None]:
        return batch, None

    processor = BatchProcessor.from_callable(lossless)
    with pytest.raises(LossNotProvidedError, match="must return a loss in training"):
        processor._process(None, 1, is_evaluating=False)
    assert processor._process(None, 1, is_evaluating=True) == Processed(1, None)
    manual = BatchProcessor.from_callable(lossless, need_backward=False)
    assert manual._process(None, 1, is_evaluating=False) == Processed(1, None)


@pytest.mark.shows("R6")
def test_without_backward_training_has_no_loss() -> None:
    """R6: what forward returns as a loss is for evaluations."""
    processor = BatchProcessor.from_callable(lambda model, batch: (batch, 5), need_backward=False)
    assert processor._process(None, 1, is_evaluating=False) == Processed(1, None)
    assert processor._process(None, 1, is_evaluating=True) == Processed(1, 5)


@pytest.mark.shows("R6")
@pytest.mark.parametrize("need_backward", [True, False])
def test_an_evaluation_needs_no_backward(need_backward: bool) -> None:
    """R6: forward can ask; after an error too it is as before."""
    seen: list[bool] = []

    class Asking(BatchProcessor):
        def forward(self, model: Any, batch: Any) -> tuple[Any, Any]:
            seen.append(self.need_backward)
            return batch, 1 / batch

    processor = Asking(need_backward=need_backward)
    processor._process(None, 1, is_evaluating=True)
    processor._process(None, 1, is_evaluating=False)
    with pytest.raises(ZeroDivisionError):
        processor._process(None, 0, is_evaluating=True)
    assert seen == [False, need_backward, False]
    assert processor.need_backward is need_backward


@pytest.mark.shows("R28")
@pytest.mark.parametrize("result", [None, (1, 2, 3)])
def test_what_is_no_pair_is_an_error(result: Any) -> None:
    """R28."""
    processor = BatchProcessor.from_callable(lambda model, batch: result)
    with pytest.raises(UsageError, match=r"must return \(outputs, loss\)"):
        processor._process(None, 1, is_evaluating=False)


@pytest.mark.shows("R31")
def test_transforms_are_one_or_several_in_their_order() -> None:
    """R31."""

    def plus(batch: int) -> int:
        return batch + 1

    def twice(batch: int) -> int:
        return batch * 2

    for transforms, expected in ((None, 3), (plus, 4), ([plus, twice], 8), ((twice, plus), 7)):
        processor = BatchProcessor.from_callable(forward, transforms=transforms)
        assert processor._transform(3) == expected
    assert BatchProcessor.from_callable(forward, transforms=[])._transform(3) == 3


@pytest.mark.parametrize("transforms", [3, [abs, "neg"]])
def test_what_is_no_transform_is_an_error(transforms: Any) -> None:
    """R31."""
    with pytest.raises(ArgumentTypeError, match=r"transforms=\.\.\.\) must be a function or"):
        BatchProcessor.from_callable(forward, transforms=transforms)


@pytest.mark.shows("R30")
@pytest.mark.parametrize("need_backward", [None, [abs]])
def test_what_is_no_answer_to_need_backward_is_an_error(need_backward: Any) -> None:
    """R30: as transforms that were passed in its place."""
    with pytest.raises(ArgumentTypeError, match=r"need_backward=\.\.\.\) must be True or False"):
        BatchProcessor.from_callable(forward, need_backward)


@pytest.mark.shows("R33")
def test_a_processor_neither_steps_nor_clears_gradients() -> None:
    """R33: nor does it do backward."""
    model = OneLayer(BatchProcessor.from_callable(forward))
    model.setup()
    before = [weight.clone() for weight in weights_of(model)]
    model.net.weight.grad = torch.ones(1, 1)
    model.batch_processor._process(model, torch.ones(1, 1), is_evaluating=False)
    assert are_equal(weights_of(model), before)
    assert torch.equal(model.net.weight.grad, torch.ones(1, 1))
    assert model.net.bias.grad is None


# In a run


@pytest.mark.shows("R33", "C12")
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


@pytest.mark.shows("R28")
def test_a_loss_that_is_no_scalar_is_an_error() -> None:
    """R28."""
    model = OneLayer(
        BatchProcessor.from_callable(lambda model, batch: (batch, model.net(batch).repeat(2, 1)))
    )
    with pytest.raises(UsageError, match="scalar loss"):
        make_trainer().fit(model, Numbers())


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


@pytest.mark.shows("R48")
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
    """C12."""

    class Both(Stepping):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.batch_processor = BatchProcessor.from_callable(forward)

    with pytest.raises(ArgumentError, match="must define its training step once"):
        make_trainer().fit(Both(), Numbers())
    with pytest.raises(ArgumentError, match="must be None or a BatchProcessor"):
        make_trainer().fit(OneLayer(forward), Numbers())


class Counting(BatchProcessor):
    """Counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return forward(model, batch)


class Saving(Counting):
    """The same; the count is state."""

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


def unreduced(model: Any, batch: Any) -> Any:
    return model.net(batch), model.net(batch)


def forgetful(batch: Any) -> None:
    batch + 1


def test_a_transform_that_returns_nothing_is_named() -> None:
    processor = BatchProcessor.from_callable(unreduced, transforms=[torch.neg, forgetful])
    with pytest.raises(UsageError, match="forgetful, a transform of unreduced, must return the b"):
        processor._transform(torch.ones(1))
