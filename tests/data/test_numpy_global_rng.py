"""NumPy's legacy generator: training that moves it is told, once, and told what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from helios.data import create_dataloader
from helios.data.source import Source, open_source
from tests.data.datasets import FETCH, Indices, Lone, walk


class Careless(Indices):
    """Draws from the legacy generator, at one sample."""

    def __init__(self, length: int, culprit: int) -> None:
        super().__init__(length)
        self.culprit = culprit

    def __getitem__(self, index: int) -> int:
        if index == self.culprit:
            np.random.rand()
        return super().__getitem__(index)


def collate_carelessly(samples: list[int]) -> list[int]:
    np.random.rand()
    return samples


def open_with(dataset: Any, purpose: str = FETCH, **options: Any) -> Source:
    loader, sampler = create_dataloader(dataset, **options)
    return open_source(loader, sampler, run_seed=0, purpose=purpose)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("options", "where"),
    [({}, "in the training process"), ({"num_workers": 2}, "in a loader worker")],
)
def test_a_data_set_that_moves_it_is_told_once(
    options: dict[str, Any], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_with(Careless(4, culprit=1), **options)
    for epoch in range(3):
        walk(source, epoch)
    (text,) = warnings_of(caplog)
    assert text.startswith(f"NumPy's global generator (numpy.random) was used {where}")
    assert "get_default_numpy_rng().generator" in text


def test_a_later_draw_in_a_worker_that_lives_on_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    source = open_with(Careless(3, culprit=2), num_workers=1, persistent_workers=True)
    walk(source, 0)
    assert warnings_of(caplog) == []
    walk(source, 1)
    assert len(warnings_of(caplog)) == 1
    source.close()


def test_a_collate_function_in_a_worker_is_watched_too(caplog: pytest.LogCaptureFixture) -> None:
    walk(open_with(Indices(4), num_workers=1, collate_fn=collate_carelessly), 0)
    assert len(warnings_of(caplog)) == 1


def test_a_training_step_that_moves_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    batches = Lone(open_with(Indices(4)).batches(0))
    next(batches)
    np.random.rand()
    assert warnings_of(caplog) == []
    batches.close()
    batches.close()
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("draws", [(), (0,), (1,), (2,)], ids=str)
def test_a_validation_within_a_pass_is_named_itself(
    draws: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    batches = Lone(open_with(Indices(8)).batches(0))
    validation = open_with(Careless(4, culprit=1), purpose="fetch-validation")
    for number in range(3):
        next(batches)
        if number in draws:
            np.random.rand()
        walk(validation, number)
    batches.close()
    purposes = [text.partition("purpose '")[2].partition("'")[0] for text in warnings_of(caplog)]
    assert purposes == ["fetch-validation", *([FETCH] if draws else [])]


def test_a_foreign_loader_is_watched_in_the_training_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = open_source(DataLoader(Careless(4, culprit=1)), run_seed=0, purpose=FETCH)
    walk(source, 0)
    walk(source, 1)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_said_while_it_stays_and_it_stays(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    # H3: neither seeded nor drawn from by Helios.
    before = np.random.get_state()[1].tolist()
    source = open_with(Indices(70), shuffle=True, num_workers=num_workers)
    walk(source, 0)
    walk(source, 1)
    assert np.random.get_state()[1].tolist() == before
    np.random.rand()  # between passes: none of the training's business
    walk(source, 2)
    assert warnings_of(caplog) == []


def test_a_worker_may_seed_it_in_its_initialisation(caplog: pytest.LogCaptureFixture) -> None:
    walk(open_with(Indices(4), num_workers=1, worker_init_fn=np.random.seed), 0)
    assert warnings_of(caplog) == []
