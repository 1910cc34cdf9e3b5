"""Totals of scores and losses are those of float64, and each sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import helios
from helios.data import Stream
from helios.model.processor import BatchProcessor
from helios.state import TrainingState
from tests.support.models import OneLayer

_CLASSES = 5


def _trainer(**options: Any) -> helios.Trainer:
    given = {"train_unit": "iteration", "total_steps": 2, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **options})


class _Batches(Dataset[Tensor]):
    """Answers of a classifier, the first of five classes being right."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(1.0, _CLASSES + 1) * (index % 97 + 1))


class _Classes(helios.DataModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=10)
        self._train_dataset = self._create_dataset(_Batches(20), params)
        self._valid_dataset = self._create_dataset(_Batches(self.length), params)


class _Coarse(helios.Model):
    """Returns sums and weights of a coarse type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("coarse")
        self.dtype = dtype

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Identity()

    def valid_step(self, batch: Tensor, step: int) -> Any:
        logits = batch.to(self.dtype)
        right = torch.zeros(len(batch), dtype=torch.long)
        loss = nn.functional.cross_entropy(logits, right, reduction="sum")
        hits = (batch.argmax(1) == 0).sum()
        count = torch.tensor(float(len(batch)), dtype=self.dtype)
        return {"nll": (loss, count), "hits": (hits, 1), "flag": (hits > 0, count)}


@pytest.mark.shows("P118")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_of_a_coarse_type_are_added_in_float64(dtype: torch.dtype) -> None:
    from sklearn.metrics import log_loss  # imported slowly, in each process that collects tests

    length = 4_000
    model = _Coarse(dtype)
    _trainer().validate(model, _Classes(length), checkpoint=None)
    scores = model.metrics
    rows = torch.stack([_Batches(length)[index] for index in range(length)])
    chances = rows.softmax(1).double()
    expected = log_loss([0] * length, chances / chances.sum(1, keepdim=True), labels=range(5))
    # What is left is the rounding of single batches.
    assert scores["nll"] == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 2e-3)
    assert scores["hits"] == int((rows.argmax(1) == 0).sum()) / (length / 10)
    assert scores["flag"] == pytest.approx(1 / 10, rel=0.2)


@pytest.mark.shows("P118")
def test_running_losses_are_added_in_float64() -> None:
    class Model(helios.Model):
        def __init__(self) -> None:
            super().__init__("running")
            self.sums: list[Any] = []

        unsaved = ("sums",)

        def setup(self, fast_init: bool = False) -> None:
            self.net = nn.Linear(_CLASSES, 1)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

        def train_step(self, batch: Tensor, state: TrainingState) -> Tensor:
            return (self.net(batch).sum() * 0.0 + 1.0).bfloat16()

        def valid_step(self, batch: Tensor, step: int) -> None:
            return None

        def on_validation_end(self, validation_cycle: int) -> None:
            self.sums.append(self._running_losses["loss"])
            super().on_validation_end(validation_cycle)

    model = Model()
    _trainer(total_steps=520, valid_frequency=260).fit(model, _Classes(10))
    assert [float(total) for total in model.sums] == [260.0, 260.0]


# Batch processors

_LENGTH = 11
_DATA = torch.arange(1.0, _LENGTH + 1).square().unsqueeze(1)


class _Squares(helios.DataModule):
    """Eleven numbers; the last batch is smaller than the others."""

    def __init__(self, make: Callable[[_Squares], Any]) -> None:
        super().__init__()
        self.make = make

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=3)
        self._train_dataset = self._create_dataset(_DATA, params)
        self._valid_dataset = self.make(self)


class _Parts:
    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_DATA[self.index :: self.count])


_SOURCES = {
    "batches": lambda module: module._create_dataset(_DATA, helios.DataLoaderParams(batch_size=4)),
    "workers": lambda module: module._create_dataset(
        _DATA, helios.DataLoaderParams(batch_size=4, num_workers=1)
    ),
    "single samples": lambda module: module._create_dataset(
        _DATA, helios.DataLoaderParams(batch_size=None)
    ),
    "lists": lambda module: module._create_dataset(
        _DATA, helios.DataLoaderParams(batch_sampler=[[4], [0, 1, 2, 3], [7, 5, 6], [8, 9, 10]])
    ),
    "stream": lambda module: module._create_dataset(
        Stream(_Parts), helios.DataLoaderParams(batch_size=4)
    ),
}


def _score(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model.net(batch)
    return outputs, nn.functional.mse_loss(outputs, batch)


class _Processed(OneLayer):
    rate = 0.0

    def __init__(self) -> None:
        super().__init__(BatchProcessor.from_callable(_score))


def _error(model: _Processed, data: Tensor) -> float:
    from torchmetrics import MeanSquaredError

    metric = MeanSquaredError()
    with torch.no_grad():
        metric.update(model.net(data), data)
    return float(metric.compute())


@pytest.mark.shows("P119")
@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [("batches", 3), ("workers", 1), ("single samples", 1), ("lists", 3), ("stream", 3)],
)
def test_scores_of_a_processor_count_each_sample_once(
    name: str, num_replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _Processed()
    trainer = _trainer(valid_frequency=1, num_replicas=num_replicas)
    trainer.fit(model, _Squares(_SOURCES[name]))
    assert model.metrics["loss"] == pytest.approx(_error(model, _DATA), rel=1e-6)
    assert "how many samples a batch has" not in capsys.readouterr().err
