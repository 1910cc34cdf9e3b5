"""Data as users bring it, through whole runs: samplers, foreign loaders, workers, odd sizes.

What resumes is restarted from every checkpoint and compared on bits; what cannot resume is refused
where checkpoints are asked for (issue, "Data"; DESIGN R1, R2).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import helios
from helios.core import rng
from helios.data.samplers import ResumableSampler
from helios.errors import ArgumentError
from helios.plugins import Plugin
from tests.data.datasets import join
from tests.support.resume import copy_checkpoint, iteration_of, restarts_of
from tests.support.runs import (
    NUM_SAMPLES,
    WIDTH,
    IndexData,
    Setting,
    SmallModel,
    digest,
    noisy_collate,
)

_SETTING = Setting(scheduler="none")


class Data(helios.DataModule):
    """A training set with the options under test; ``loader`` takes the place of both."""

    def __init__(self, dataset: Any, loader: Any = None, **options: Any) -> None:
        super().__init__()
        self.dataset, self.loader, self.options = dataset, loader, options

    def setup(self) -> None:
        if self.loader is None:
            options = {"collate_fn": noisy_collate, **self.options}
            params = helios.DataLoaderParams(**options)
            self._train_dataset = self._create_dataset(self.dataset, params)

    def train_dataloader(self) -> Any:
        return super().train_dataloader() if self.loader is None else (self.loader, None)


def fit(data: Data, folder: Path | None = None, **options: Any) -> SmallModel:
    """Train eight steps, with a checkpoint after each where there is a folder."""
    given = {"train_unit": "iteration", "total_steps": 8, "random_seed": 5}
    if folder is not None:
        given |= {"chkpt_root": folder, "chkpt_frequency": 1}
    given |= {"use_cpu": True, "print_banner": False}
    model = SmallModel(_SETTING)
    helios.Trainer(**{**given, **options}).fit(model, data)
    return model


def ids_of(model: SmallModel) -> list[list[int]]:
    """Return the samples of each batch."""
    return [ids for _, (ids, _) in sorted(model.records.items())]


def check_resumes(make_data: Callable[[], Data], folder: Path, **options: Any) -> SmallModel:
    """Restart from the checkpoints, and compare ids, losses and weights on bits."""
    whole = fit(make_data(), folder / "whole", **options)
    weights = digest(whole.discovery.capture()["objects"])
    checkpoints = sorted((folder / "whole").glob("*/*.pth"))
    unfinished = sorted(checkpoints, key=iteration_of)[:-1]
    assert len(unfinished) >= 2
    for path in restarts_of(unfinished):
        number = iteration_of(path)
        root = copy_checkpoint(path, folder / f"from-{number}")
        resumed = fit(make_data(), root, **options)
        tail = {n: record for n, record in whole.records.items() if n > number}
        assert resumed.records == tail, f"resumed after iteration {number}"
        assert digest(resumed.discovery.capture()["objects"]) == weights
    return whole


class Stream(IterableDataset):
    """Samples that come one after another, with noise."""

    def __iter__(self) -> Iterator[Any]:
        data = IndexData(10)
        return (data[index] for index in range(10))


def test_a_stream_trains_without_checkpoints() -> None:
    model = fit(Data(Stream(), batch_size=4))
    assert ids_of(model)[:6] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    assert model.records == fit(Data(Stream(), batch_size=4)).records
    by_epochs = fit(Data(Stream(), batch_size=4), train_unit="epoch", total_steps=2)
    assert ids_of(by_epochs) == ids_of(model)[:6]


def test_a_stream_with_checkpoints_is_refused(tmp_path: Path) -> None:
    message = (
        r"neither seek nor be saved.* Give the Stream state_dict and load_state_dict and set "
        r"num_workers=0, .* omit chkpt_frequency"
    )
    with pytest.raises(ArgumentError, match=message):
        fit(Data(Stream(), batch_size=4), tmp_path)
    assert not list(tmp_path.rglob("*.pth"))


class StatefulStream(Stream):
    """The same with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        data = IndexData(10)
        while self.position < 10:
            self.position += 1
            yield data[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


@pytest.mark.shows("S65")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_stream_with_state_resumes_from_every_step(unit: str, tmp_path: Path) -> None:
    options = {"train_unit": unit, "total_steps": 8 if unit == "iteration" else 4}
    whole = check_resumes(lambda: Data(StatefulStream(), batch_size=4), tmp_path, **options)
    assert ids_of(whole)[:6] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2


@pytest.mark.shows("S65")
def test_a_stream_with_state_behind_workers_names_the_loader_that_resumes(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"torchdata\.stateful_dataloader\.StatefulDataLoader"):
        fit(Data(StatefulStream(), batch_size=4, num_workers=1), tmp_path)


def _plain_loader() -> DataLoader[Any]:
    return DataLoader(IndexData(), batch_size=4, shuffle=True, collate_fn=noisy_collate)


class DrawingBetween(Plugin):
    """Draws where a loader of the user's own begins its next pass."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_epoch_end(self, current_epoch: int) -> None:
        torch.rand(3)


def test_a_loader_of_the_users_own_trains_without_checkpoints() -> None:
    model = fit(Data(None, _plain_loader()))
    first, second = ids_of(model)[:6], ids_of(model)[6:]
    assert sorted(join(first)) == list(range(NUM_SAMPLES))
    assert second != first[:2]
    again = fit(Data(None, _plain_loader()), plugins=[DrawingBetween("drawing")])
    assert again.records == model.records


def test_a_loader_of_the_users_own_with_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"collate_fn=loader\.collate_fn"):
        fit(Data(None, _plain_loader()), tmp_path)
    assert not list(tmp_path.rglob("*.pth"))


def test_a_root_that_only_loads_does_not_refuse_it(tmp_path: Path) -> None:
    model = fit(Data(None, _plain_loader()), chkpt_root=tmp_path)
    assert len(model.records) == 8


class Rewinding:
    """A loader with state: five batches, shuffled by a generator of its own."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(3)
        self.start = self.generator.get_state()

    def __iter__(self) -> Iterator[Any]:
        data = IndexData(20)
        self.generator.set_state(self.start)
        order = torch.randperm(20, generator=self.generator).view(5, 4)
        while self.position < 5:
            self.position += 1
            yield noisy_collate([data[int(index)] for index in order[self.position - 1]])
        self.position, self.start = 0, self.generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.start = state_dict["position"], state_dict["start"]


class SizedRewinding(Rewinding):
    def __len__(self) -> int:
        return 5


_UNITS = {
    "by steps": {"total_steps": 13},
    "by epochs": {"train_unit": "epoch", "total_steps": 3},
}


@pytest.mark.parametrize("unit", _UNITS)
@pytest.mark.parametrize("kind", [Rewinding, SizedRewinding])
def test_a_loader_with_state_resumes_exactly(
    kind: type[Rewinding], unit: str, tmp_path: Path
) -> None:
    whole = check_resumes(lambda: Data(None, kind()), tmp_path, **_UNITS[unit])
    ids = ids_of(whole)
    assert sorted(join(ids[:5])) == sorted(join(ids[5:10])) == list(range(20))
    assert ids[:5] != ids[5:10]
    (sidecar, *_) = (tmp_path / "whole").glob("*/*_iter_*.json")
    assert '"level": "restart"' in sidecar.read_text()


class EvenFirst(ResumableSampler):
    """A user's sampler: steps, and draws a random tail."""

    def __init__(self) -> None:
        super().__init__(batch_size=4)

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.epoch % 2, NUM_SAMPLES, 2), *torch.randperm(9).tolist()]
        return iter(order[self.start_iter * 4 :])

    def __len__(self) -> int:
        return 20


class Pairs:
    """A user's batch sampler, which fills one list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for start in torch.randperm(NUM_SAMPLES - 1).tolist()[:5]:
            batch[:] = [start, start + 1]
            yield batch

    def __len__(self) -> int:
        return 5


@pytest.mark.shows("H11", "L17")
def test_a_users_sampler_resumes_exactly(tmp_path: Path) -> None:
    whole = check_resumes(
        lambda: Data(IndexData(), batch_size=4, sampler=EvenFirst()), tmp_path, total_steps=12
    )
    first = join(ids_of(whole)[:5])
    assert first[:11] == list(range(0, NUM_SAMPLES, 2))
    assert join(ids_of(whole)[5:10])[:11] == list(range(1, NUM_SAMPLES, 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_users_batch_sampler_resumes_exactly(num_workers: int, tmp_path: Path) -> None:
    whole = check_resumes(
        lambda: Data(IndexData(), batch_sampler=Pairs(), num_workers=num_workers),
        tmp_path,
        total_steps=7 if num_workers == 0 else 3,
    )
    assert all(second == first + 1 for first, second in ids_of(whole))


class Batched(Dataset):
    """Samples that are batches already; or, with ``__getitems__``, a data set fetched at once."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        data = IndexData()
        return noisy_collate([data[4 * index + number] for number in range(4)])


class AtOnce(IndexData):
    """Fetches all samples of a batch at once, and refuses single ones."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a single sample was asked for")

    def __getitems__(self, indices: list[int]) -> Any:
        data, noise = IndexData(), torch.rand(WIDTH)
        samples = [data[index] for index in indices]
        return [(index, features + noise) for index, features in samples]


def test_samples_that_are_batches_resume_exactly(tmp_path: Path) -> None:
    def make_data() -> Data:
        return Data(Batched(), batch_size=None, collate_fn=None, shuffle=True)

    whole = check_resumes(make_data, tmp_path)
    assert sorted(join(ids_of(whole)[:5])) == list(range(20))


def test_a_data_set_that_fetches_whole_batches_resumes_exactly(tmp_path: Path) -> None:
    whole = check_resumes(lambda: Data(AtOnce(), batch_size=5, shuffle=True), tmp_path)
    assert [len(ids) for ids in ids_of(whole)[:5]] == [5, 5, 5, 5, 2]


def test_no_data_and_no_batch_are_errors() -> None:
    with pytest.raises(ValueError, match="The training data set must contain at least one sample"):
        fit(Data(IndexData(0)))
    with pytest.raises(ValueError, match=r"at least one batch, got 22 samples .*drop_last=True"):
        fit(Data(IndexData(), batch_size=30, drop_last=True))


def test_the_last_partial_batch_is_left_out_on_request() -> None:
    kept = fit(Data(IndexData(), batch_size=5))
    dropped = fit(Data(IndexData(), batch_size=5, drop_last=True))
    assert [len(ids) for ids in ids_of(kept)] == [5, 5, 5, 5, 2, 5, 5, 5]
    assert [len(ids) for ids in ids_of(dropped)] == [5] * 8
    assert ids_of(kept)[:4] == ids_of(dropped)[:4] == ids_of(dropped)[4:]


def test_the_order_of_the_data_is_kept_without_shuffling() -> None:
    model = fit(Data(IndexData(), batch_size=4))
    assert join(ids_of(model)[:6]) == list(range(NUM_SAMPLES))
    assert ids_of(model)[6:] == ids_of(model)[:2]


class Noted(IndexData):
    """Counts every fetch in shared memory, so that those in workers count too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(self.length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        return super().__getitem__(index)


@pytest.mark.shows("H15")
def test_workers_fetch_nothing_that_was_trained_on(tmp_path: Path) -> None:
    """But the last batch, where there is a ledger to compare it with."""
    whole, options = Noted(), {"total_steps": 6, "ledger": "off"}
    trained = fit(Data(whole, batch_size=4, shuffle=True), tmp_path / "whole", **options)
    assert whole.counts.tolist() == [1] * NUM_SAMPLES
    (path,) = (tmp_path / "whole").glob("*/*_iter_3.pth")
    root = copy_checkpoint(path, tmp_path / "again")
    resumed = Noted()
    model = fit(Data(resumed, batch_size=4, shuffle=True, num_workers=2), root, **options)
    expected = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    expected[join(ids_of(trained)[3:])] = 1
    assert resumed.counts.tolist() == expected.tolist()
    assert ids_of(model) == ids_of(trained)[3:]


@pytest.mark.shows("H8")
def test_the_users_function_for_workers_runs_after_ours() -> None:
    """H8: it finds the generators seeded, and what it sets stays."""
    numbers = torch.zeros(2, 2, dtype=torch.float64).share_memory_()

    def begin(worker_id: int) -> None:
        numbers[worker_id, 0] = 1
        numbers[worker_id, 1] = rng.get_default_numpy_rng().generator.random()

    data = Data(
        IndexData(),
        batch_size=11,
        num_workers=2,
        worker_init_fn=begin,
        multiprocessing_context="fork",
    )
    fit(data, total_steps=2)
    assert numbers[:, 0].tolist() == [1, 1]
    assert numbers[0, 1] != numbers[1, 1]


def test_workers_that_are_spawned_change_no_bit() -> None:
    """How workers start is free to change; one that is spawned imports everything anew."""
    here = fit(Data(IndexData(), batch_size=4, shuffle=True))
    spawned = fit(
        Data(
            IndexData(),
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            prefetch_factor=3,
            multiprocessing_context="spawn",
        )
    )
    assert spawned.records == here.records


def test_memory_is_not_pinned_where_no_accelerator_is(recwarn: pytest.WarningsRecorder) -> None:
    class Model(SmallModel):
        def train_step(self, batch: Any, state: helios.TrainingState) -> Any:
            assert not any(part.is_pinned() for part in batch)
            return super().train_step(batch, state)

    trainer = helios.Trainer("", "iteration", 2, use_cpu=True, print_banner=False)
    trainer.fit(Model(_SETTING), Data(IndexData(), batch_size=4, pin_memory=True))
    assert not recwarn.list


@pytest.mark.shows("H3")
def test_a_run_leaves_numpys_legacy_generator_alone() -> None:
    """H3."""
    before = np.random.get_state()
    fit(Data(IndexData(), batch_size=4, shuffle=True))
    after = np.random.get_state()
    assert before[0] == after[0]
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]


class Wrapped(Sampler[int]):
    """A sampler around a stock one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class PythonShuffle(ResumableSampler):
    """Shuffles by a generator of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(4)
        self.length = length
        self.shuffler = random.Random(7)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        self.shuffler.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length


def _own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _stock_batches() -> Any:
    return BatchSampler(RandomSampler(range(22), generator=_own_generator()), 4, drop_last=False)


def _weighted_batches() -> Any:
    weights = [1.0 + index % 3 for index in range(22)]
    sampler = WeightedRandomSampler(weights, 22, generator=_own_generator())
    return BatchSampler(sampler, 4, drop_last=False)


def _drawn_with_replacement() -> Any:
    sampler = RandomSampler(range(22), replacement=True, generator=_own_generator())
    return BatchSampler(Wrapped(sampler), 4, drop_last=False)


@pytest.mark.shows("S66")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [_stock_batches, _weighted_batches, _drawn_with_replacement])
def test_a_stock_sampler_with_a_generator_of_its_own_resumes_exactly(
    make: Callable[[], Any], num_workers: int, tmp_path: Path
) -> None:
    def data() -> Data:
        return Data(IndexData(), batch_sampler=make(), num_workers=num_workers)

    whole = check_resumes(data, tmp_path, total_steps=14, chkpt_frequency=3 if num_workers else 1)
    first, second = ids_of(whole)[:6], ids_of(whole)[6:12]
    assert first != second


@pytest.mark.shows("S66")
def test_a_sampler_with_a_generator_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    whole = check_resumes(
        lambda: Data(IndexData(), sampler=PythonShuffle(22), batch_size=4), tmp_path, total_steps=14
    )
    assert ids_of(whole)[:6] != ids_of(whole)[6:12]
