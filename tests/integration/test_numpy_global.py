"""NumPy's global generator inside a call of a trainer: from keys, wherever torch and random are.

What is drawn is compared with generators that are seeded by hand, from the page on reproducibility.
That no number depends on kills, workers and processes is shown with all other generators by
`test_resume`, `test_kills`, `test_data` and `test_elastic`, whose runs draw from this one, too.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import helios

SEED = 31
LENGTH = 6
BATCH_SIZE = 2


def numpy_of(*fields: int | str) -> np.random.RandomState:
    """Return a generator as the page says it is seeded: the XOR of the halves of a key."""
    low, high = struct.unpack("<2I", blake2b(repr(fields).encode(), digest_size=8).digest())
    return np.random.RandomState(low ^ high)


class Drawing(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return np.random.normal()


def draw_more(samples: list[float]) -> list[float]:
    """Append what the collate function draws."""
    return [*samples, np.random.normal()]


class DrawingModel(helios.Model):
    """Writes down what each event draws, by its name and iteration."""

    unsaved = ("drawn",)

    def __init__(self) -> None:
        super().__init__("drawing")
        self.drawn: dict[tuple[Any, ...], Any] = {}

    def _draw(self, *place: Any) -> float:
        self.drawn[place] = np.random.normal()
        return float(self.drawn[place])

    def setup(self, fast_init: bool = False) -> None:
        self._draw("setup")
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_training_batch_start(self, state: helios.TrainingState) -> None:
        super().on_training_batch_start(state)
        self._draw("before", state.global_iteration)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        place = state.global_iteration, self.trainer._parts.runner.replica
        self.drawn[("fetched", *place)] = batch
        noise = self._draw("step", *place)
        return (self.net(torch.ones(1)) * noise + batch[0]).square().mean()

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self._draw("after", state.global_iteration)

    def valid_step(self, batch: Any, step: int) -> None:
        place = self.trainer._parts.run.state.validation_cycles, step
        self.drawn[("fetched for validation", *place)] = batch
        self._draw("validation step", *place)

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        self._draw("validation end", validation_cycle)

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self._draw("epoch", current_epoch)

    def test_step(self, batch: Any, step: int) -> None:
        self.drawn["fetched for testing", step] = batch
        self._draw("test step", step)


class DrawingData(helios.DataModule):
    def __init__(self, *, num_workers: int = 0, validates: bool = True) -> None:
        super().__init__()
        self.num_workers, self.validates = num_workers, validates

    def setup(self) -> None:
        params = helios.DataLoaderParams(
            batch_size=BATCH_SIZE, num_workers=self.num_workers, collate_fn=draw_more
        )
        self._train_dataset = self._create_dataset(Drawing(), params)
        params = helios.DataLoaderParams(batch_size=LENGTH, collate_fn=draw_more)
        if self.validates:
            self._valid_dataset = self._create_dataset(Drawing(), params)
        self._test_dataset = self._create_dataset(Drawing(), params)


def make_trainer(folder: Path | None = None, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        **{
            "train_unit": "iteration",
            "total_steps": 7,
            "valid_frequency": 2,
            "chkpt_frequency": None if folder is None else 1,
            "chkpt_root": folder,
            "random_seed": SEED,
            "use_cpu": True,
            "print_banner": False,
            "store": helios.CheckpointStore(is_async=False),
            **options,
        }
    )


def fit(
    folder: Path | None = None, data: DrawingData | None = None, **options: Any
) -> dict[tuple[Any, ...], Any]:
    """Train; returns what was drawn."""
    model = DrawingModel()
    make_trainer(folder, **options).fit(model, data or DrawingData())
    return model.drawn


def normals(generator: np.random.RandomState, number: int) -> list[float]:
    return [generator.normal() for _ in range(number)]


@pytest.mark.shows("P128")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_number_is_that_of_a_generator_seeded_by_hand(num_workers: int) -> None:
    drawn = fit(data=DrawingData(num_workers=num_workers))
    assert drawn["setup",] == np.random.RandomState(SEED).normal()
    for iteration in range(1, 8):
        epoch, batch = divmod(iteration - 1, LENGTH // BATCH_SIZE)
        fetched = numpy_of(SEED, "fetch", epoch, batch, 0)
        assert drawn["fetched", iteration, 0] == normals(fetched, BATCH_SIZE + 1)
        keys = [("before", iteration), ("step", iteration, 0), ("after", iteration)]
        assert [drawn[key] for key in keys] == normals(numpy_of(SEED, "train", iteration, 0), 3)
    for cycle in range(3):
        fetched = numpy_of(SEED, "fetch-validation", cycle, 0, 0)
        assert drawn["fetched for validation", cycle, 0] == normals(fetched, LENGTH + 1)
        step = numpy_of(SEED, "validation", cycle, 0)
        keys = [("validation step", cycle, 0), ("validation end", cycle)]
        assert [drawn[key] for key in keys] == normals(step, 2)


@pytest.mark.shows("P128")
def test_validations_have_no_influence_on_what_training_draws() -> None:
    with_validations = fit(valid_frequency=1)
    without = fit(data=DrawingData(validates=False), valid_frequency=None)
    assert {key: with_validations[key] for key in without} == without
    assert len(with_validations) > len(without)


@pytest.mark.shows("H3", "P128")
@pytest.mark.parametrize("call", ["fit", "test", "an error"])
def test_it_is_the_same_before_and_after_a_call(call: str) -> None:
    class Failing(DrawingModel):
        def on_training_batch_end(self, *args: Any) -> None:
            raise LookupError("in a hook")

    expected = np.random.RandomState(8)
    np.random.seed(8)
    assert np.random.normal() == expected.normal()  # the second half of a pair waits
    if call == "an error":
        with pytest.raises(LookupError, match="in a hook"):
            make_trainer().fit(Failing(), DrawingData())
    else:
        chosen = {} if call == "fit" else {"checkpoint": None}
        getattr(make_trainer(), call)(DrawingModel(), DrawingData(), **chosen)
    assert normals(np.random, 3) == normals(expected, 3)


@pytest.mark.shows("P128")
def test_what_a_script_draws_before_has_no_influence() -> None:
    np.random.seed(1)
    first = fit()
    np.random.seed(2)
    np.random.set_state(np.random.RandomState(5).get_state())
    assert fit() == first
