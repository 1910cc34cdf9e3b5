"""``helios.WeightedLoss`` in one process: what is logged and skipped, and what is an error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.model import BatchProcessor
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.models import OneLayer
from tests.support.quiet import Quiet

_LENGTH = 24


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=1)
        self._train_dataset = self._create_dataset(torch.arange(_LENGTH), params)
        self._valid_dataset = self._create_dataset(torch.arange(5), params)


def _weight_of(index: int) -> int:
    return index % 4


class _Model(helios.Model):
    """Its loss is a sum, and its gradient the index of the sample times the weight."""

    unsaved = ("committed", "make", "seen")

    def __init__(self, make: Any = helios.WeightedLoss) -> None:
        super().__init__("weights")
        self.make = make
        self.seen: list[int] = []
        self.committed: list[bool] = []

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def total(self, index: int) -> Tensor:
        return self.net(torch.full((1, 1), float(index)))[0, 0] * _weight_of(index)

    def train_step(self, batch: Tensor, state: TrainingState) -> Any:
        index = int(batch)
        self.seen.append(index)
        return self.make(self.total(index), _weight_of(index))

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self.committed.append(committed)


class _Logged(Quiet):
    """Keeps what is logged, by iteration."""

    def __init__(self) -> None:
        super().__init__("logged")
        self.found: dict[int, float] = {}

    def on_log(self, scalars: Any, state: TrainingState) -> None:
        self.found[state.global_iteration] = scalars.get("train/loss")


def _fit(model: helios.Model, *plugins: Plugin, **options: Any) -> None:
    given: dict[str, Any] = {
        "train_unit": "iteration",
        "total_steps": 8,
        "use_cpu": True,
        "print_banner": False,
        "plugins": plugins,
        **options,
    }
    helios.Trainer(**given).fit(model, _Data())


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_is_logged_is_the_sum_over_the_weight_also_after_a_resume(
    num_replicas: int, tmp_path: Path
) -> None:
    totals: list[tuple[float, int]] = []

    class Model(_Model):
        def train_step(self, batch: Tensor, state: TrainingState) -> Any:
            loss = super().train_step(batch, state)
            totals.append((loss.sum.item(), int(loss.weight)))
            return loss

    found: dict[int, float] = {}
    options: dict[str, Any] = {"num_replicas": num_replicas, "print_frequency": 3}
    options |= {"chkpt_root": tmp_path, "chkpt_frequency": 1}
    for total_steps in (4, 9):
        logged = _Logged()
        _fit(Model(), logged, total_steps=total_steps, **options)
        found |= logged.found
    assert len(found) >= 3
    begin = 0
    for end, mean in found.items():
        group = totals[begin * num_replicas : end * num_replicas]
        assert mean == math.fsum(total for total, _ in group) / sum(weight for _, weight in group)
        begin = end


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_update_without_weight_is_skipped(num_replicas: int, tmp_path: Path) -> None:
    class Model(_Model):
        def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
            super().on_training_batch_end(state, should_log)
            shown.append(float(self._loss_items["loss"]))

    shown: list[float] = []
    # Samples 0 and 1 of four have no weight, and two replicas share them.
    model = Model(lambda total, weight: helios.WeightedLoss(total * (weight > 1), weight // 2))
    logged = _Logged()
    _fit(model, logged, num_replicas=num_replicas, print_frequency=1, total_steps=4)
    assert model.net.weight.isfinite().all()
    is_one = num_replicas == 1
    assert model.committed == ([False, False, True, True] if is_one else [False, True]) * (
        2 if is_one else 4
    )
    assert shown[0] == 0.0
    assert [*logged.found] == [n for n, committed in enumerate(model.committed, 1) if committed]


def _process(model: Any, batch: Tensor) -> Any:
    total = model.net(batch[:, None].float()).sum()
    return batch, helios.WeightedLoss(total * 6, weight=6 + int(batch) % 2)


def test_a_batch_processor_may_return_one_in_training_and_validation() -> None:
    model = OneLayer(BatchProcessor.from_callable(_process))
    _fit(model, valid_frequency=8)
    scores = [_process(model, torch.tensor([index]))[1] for index in range(5)]
    expected = sum(each.sum.double() for each in scores) / sum(each.weight for each in scores)
    assert model.metrics["loss"] == float(expected.detach())


_BAD = {
    "negative": (
        lambda total, _: helios.WeightedLoss(total, -1),
        ArgumentError,
        "at least 0, got -1",
    ),
    "infinite": (
        lambda t, _: helios.WeightedLoss(t, torch.tensor(math.inf)),
        ArgumentError,
        "finite",
    ),
    "a sum of several": (
        lambda t, _: helios.WeightedLoss(t.expand(3), 1),
        ArgumentTypeError,
        "one element",
    ),
    "no graph": (lambda t, _: helios.WeightedLoss(t.detach(), 1), UsageError, "do not detach"),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_sum_or_a_weight_that_is_none_is_an_error(name: str) -> None:
    make, kind, text = _BAD[name]
    with pytest.raises(kind, match=text):
        _fit(_Model(make))


class _WithOwnBackward(_Model):
    def backward(self, losses: dict[str, Tensor]) -> None:
        losses["loss"].backward()


def test_a_loss_with_a_weight_is_not_lost_under_another_name() -> None:
    model = _WithOwnBackward(lambda t, _: {"loss": t, "other": helios.WeightedLoss(t, 1)})
    with pytest.raises(UsageError, match="under 'loss', got it under 'other'"):
        _fit(model)


@pytest.mark.parametrize(("num_replicas", "first"), [(1, 0), (1, 1), (2, 2)])
def test_losses_with_and_without_weights_do_not_mix(num_replicas: int, first: int) -> None:
    calls = []

    def make(total: Tensor, weight: int) -> Any:
        calls.append(weight)
        return total if (len(calls) > 1) is (first > 0) else helios.WeightedLoss(total, weight)

    with pytest.raises(UsageError, match="must all be a WeightedLoss, or none"):
        _fit(_Model(make), num_replicas=num_replicas, accumulation_steps=1 + first % 2)
