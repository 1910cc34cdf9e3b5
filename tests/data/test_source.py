"""Sources of our loaders: the same batches from any place, fetched by whatever process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from helios.core import rng
from helios.core.memory import same
from helios.data import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import ByPosition, Shard, Source
from helios.errors import UsageError
from helios.storage.content_hash import fingerprint, hash_content
from tests.data.datasets import (
    FETCH,
    Augmented,
    Indices,
    Lone,
    as_lists,
    collate_noisily,
    draw,
    join,
    walk,
)

LENGTH = 11


def open_with(
    dataset: Any, *, run_seed: int = 6691, purpose: str = FETCH, **options: Any
) -> Source:
    loader, sampler = create_dataloader(dataset, **options)
    return open_source(loader, sampler, run_seed=run_seed, purpose=purpose)


@pytest.mark.shows("H12", "H13")
@pytest.mark.parametrize("stop_epoch", [0, 1, 2])
@pytest.mark.parametrize("how", [{"shuffle": True}, {}, {"shuffle": True, "drop_last": True}])
def test_a_joined_order_equals_the_undisturbed_one(stop_epoch: int, how: dict[str, Any]) -> None:
    # H11-H14: stopped in any epoch at any batch; the later epochs lose nothing.
    options = {"batch_size": 3, **how}
    undisturbed = open_with(Indices(LENGTH), **options)
    full = [as_lists(walk(undisturbed, epoch)) for epoch in range(4)]
    assert how == {} or full[0] != full[1]
    for batch in range(len(full[0]) + 1):
        resumed = open_with(Indices(LENGTH), **options)
        joined = full[stop_epoch][:batch]
        joined += as_lists(walk(resumed, stop_epoch, batch=batch, sample=batch * 3))
        assert joined == full[stop_epoch]
        for later in range(stop_epoch + 1, 4):
            assert as_lists(walk(resumed, later)) == full[later]


def test_the_order_follows_the_seed_of_the_run_and_of_the_data() -> None:
    orders = [
        as_lists(walk(open_with(Indices(50), run_seed=a, random_seed=b, shuffle=True), 0))
        for a, b in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert len({str(order) for order in orders}) == 4


_WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.shows("H15")
@pytest.mark.parametrize("workers", _WORKERS)
def test_augmentation_does_not_depend_on_who_fetches(workers: dict[str, Any]) -> None:
    # DESIGN R2, H15: torch, random and NumPy, in the data set and in collate, mid-epoch too.
    how = {"batch_size": 3, "shuffle": True, "collate_fn": collate_noisily}
    here = open_with(Augmented(LENGTH), **how)
    there = open_with(Augmented(LENGTH), **how, **workers)
    assert torch.equal(torch.cat(walk(here, 0)), torch.cat(walk(there, 0)))
    full = walk(here, 1)
    walk(there, 1, limit=1)
    assert torch.equal(torch.cat(full[2:]), torch.cat(walk(there, 1, batch=2, sample=6)))
    there.close()


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_augmentation_does_not_depend_on_how_workers_start(method: str) -> None:
    how = {"batch_size": 3, "shuffle": True, "collate_fn": collate_noisily}
    here = open_with(Augmented(LENGTH), **how)
    there = open_with(Augmented(LENGTH), **how, num_workers=1, multiprocessing_context=method)
    assert torch.equal(torch.cat(walk(here, 0)), torch.cat(walk(there, 0)))


def test_what_is_drawn_between_fetches_changes_nothing() -> None:
    how = {"batch_size": 3, "shuffle": True, "collate_fn": collate_noisily}
    quiet = walk(open_with(Augmented(LENGTH), **how), 0)
    loud = []
    for number, batch in enumerate(Lone(open_with(Augmented(LENGTH), **how).batches(0))):
        loud.append(batch)
        torch.rand(number + 1)
        draw()
    assert torch.equal(torch.cat(loud), torch.cat(quiet))


def test_each_purpose_and_each_epoch_has_streams_of_its_own() -> None:
    drawn = [
        torch.cat(walk(open_with(Augmented(4), purpose=purpose), epoch))[:, 1:]
        for purpose in (FETCH, "fetch-validation")
        for epoch in (0, 1)
    ]
    numbers = torch.cat(drawn).flatten()
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_before_the_place_is_fetched(num_workers: int) -> None:
    data = Indices(LENGTH)
    source = open_with(data, batch_size=2, shuffle=True, num_workers=num_workers)
    rest = join(as_lists(walk(source, 1, batch=3, sample=6)))
    assert len(rest) == 5
    assert data.counts.nonzero().flatten().tolist() == sorted(rest)
    assert data.counts.sum() == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_iterator_tells_samples_and_the_last_batch(num_workers: int) -> None:
    source = open_with(Indices(LENGTH), batch_size=4, num_workers=num_workers)
    batches = Lone(source.batches(0, batch=1, sample=4))
    told = [(batches.num_samples, batches.is_last) for _ in batches]
    assert told == [(4, False), (3, True)]
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_single_samples_are_not_collated(num_workers: int) -> None:
    how = {"batch_size": None, "shuffle": True, "num_workers": num_workers}
    source = open_with(Augmented(4), **how)
    assert source.num_batches() == 4
    full = walk(source, 0)
    assert [item.shape for item in full] == [(4,)] * 4
    batches = Lone(source.batches(0, batch=2, sample=2))
    told = [(item.tolist(), batches.num_samples, batches.is_last) for item in batches]
    assert told == [(full[2].tolist(), 1, False), (full[3].tolist(), 1, True)]
    alone = walk(open_with(Augmented(4), batch_size=1, shuffle=True), 0)
    assert torch.equal(torch.stack(full), torch.cat(alone))


class TwoWays(Augmented):
    """Fetches a whole batch at once, in reverse."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_fetches_batches_is_asked_for_batches(num_workers: int) -> None:
    source = open_with(TwoWays(4), batch_size=4, num_workers=num_workers)
    (batch,) = walk(source, 0)
    assert batch[:, 0].tolist() == [3, 2, 1, 0]


class Threads(Dataset):
    """Samples that are the number of threads of the process that fetches them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fetch_runs_under_one_thread_and_the_others_come_back(num_workers: int) -> None:
    # DESIGN section 1: workers have one, and the number of threads changes the bits of sums.
    torch.set_num_threads(2)
    try:
        source = open_with(Threads(), num_workers=num_workers)
        assert as_lists(walk(source, 0)) == [[1], [1]]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_threads_come_back_after_an_error_in_the_fetch() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            walk(open_with(Failing(ZeroDivisionError())), 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


class Failing(Indices):
    """Raises at its third sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__(6)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_from_the_data_set_does_not_end_the_epoch(num_workers: int) -> None:
    source = open_with(Failing(StopIteration()), num_workers=num_workers)
    with pytest.raises(UsageError, match="must not raise StopIteration, but did in batch 2"):
        walk(source, 0)


@pytest.mark.shows("R47")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_worker_is_left_on_any_way_out(is_persistent: bool) -> None:
    how = {"num_workers": 1, "persistent_workers": is_persistent}
    source = open_with(Failing(ZeroDivisionError()), **how)
    batches = Lone(source.batches(0))
    next(batches)
    workers = multiprocessing.active_children()
    batches.close()
    batches.close()
    assert multiprocessing.active_children() == (workers if is_persistent else [])
    assert len(workers) == 1
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(ZeroDivisionError):
        walk(source, 0)
    assert walk(source, 1, batch=3, sample=3) == [3, 4, 5]
    assert multiprocessing.active_children() == (workers if is_persistent else [])
    source.close()
    source.close()
    assert multiprocessing.active_children() == []


def test_workers_follow_the_resumed_batches_in_their_seeds() -> None:
    # What a worker is seeded with at its start is a function of the epoch, not of earlier passes.
    def seeds(source: Source, epoch: int) -> list[list[int]]:
        return as_lists(walk(source, epoch))

    undisturbed = open_with(WorkerSeeds(), num_workers=1)
    assert seeds(undisturbed, 0) != (second := seeds(undisturbed, 1))
    assert seeds(open_with(WorkerSeeds(), num_workers=1), 1) == second


class WorkerSeeds(Dataset):
    """Samples that are the seed of their worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.seed


def test_opening_a_pass_draws_from_no_generator() -> None:
    rng.seed_rngs(3)
    expected = draw()
    for num_workers in (0, 1):
        rng.seed_rngs(3)
        source = open_with(Indices(5), shuffle=True, num_workers=num_workers)
        batches = Lone(source.batches(0))
        assert draw() == expected
        batches.close()


def test_a_changed_batch_size_goes_on_at_the_stored_sample() -> None:
    order = join(as_lists(walk(open_with(Indices(LENGTH), batch_size=2, shuffle=True), 0)))
    source = open_with(Indices(LENGTH), batch_size=5, shuffle=True)
    assert source.num_batches(batch=2, sample=4) == 4
    assert as_lists(walk(source, 0, batch=2, sample=4)) == [order[4:9], order[9:]]


def test_the_description_names_what_defines_the_data() -> None:
    source = open_with(Indices(LENGTH), random_seed=4, batch_size=2, shuffle=True)
    assert source.description == {
        "length": LENGTH,
        "batch_size": 2,
        "shuffle": True,
        "drop_last": False,
        "seed": 4,
        "sampler": "ResumableRandomSampler",
        "dataset": "Indices",
        "fingerprint": None,
        "num_workers": 0,
    }
    listed = open_with(Indices(4), batch_sampler=[[0, 1], [2, 3]]).description
    assert (listed["sampler"], listed["batch_size"]) == ("list", None)
    assert source.resumes_by == ByPosition()
    assert source.state_dict() == {}


def test_a_closed_pass_gives_nothing_more() -> None:
    batches = Lone(open_with(Indices(4)).batches(0))
    next(batches)
    batches.close()
    assert list(batches) == []


class Noisy(TensorDataset):
    """Derives from the data set that cannot draw, and draws."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), *draw())


class Marked(torch.Tensor):
    """A tensor whose indexing may do anything."""


_ROWS = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("dataset", "options", "is_seeded"),
    [
        (TensorDataset(_ROWS, _ROWS), {}, False),
        (TensorDataset(_ROWS), {"shuffle": True}, False),
        (TensorDataset(_ROWS), {"batch_size": None}, True),
        (TensorDataset(_ROWS), {"collate_fn": list}, True),
        (TensorDataset(_ROWS.as_subclass(Marked)), {}, True),
        (Noisy(_ROWS), {}, True),
        (Indices(6), {}, True),
    ],
)
def test_a_fetch_is_seeded_unless_it_cannot_draw(
    dataset: Any, options: dict[str, Any], is_seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    rng.seed_rngs(0)
    monkeypatch.setattr("helios.data.keyed_source.rng.reseed", seeds.append)
    batches = open_with(dataset, **{"batch_size": 2, **options}).batches(0)
    next(batches)
    batches.close()
    assert bool(seeds) is is_seeded


_IMAGES = torch.arange(96.0).view(6, 4, 2, 2)


class Rows(Dataset[Any]):
    """The samples of a data set of tensors, whose type Helios does not know."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


@pytest.mark.parametrize(
    "tensors",
    [
        (_ROWS, torch.arange(6), torch.arange(6) % 2 == 0),
        (_ROWS.T.contiguous().T, _ROWS.to(torch.complex64).conj()),
        (_IMAGES.to(memory_format=torch.channels_last),),
        (_IMAGES.transpose(1, 3), _ROWS.expand(2, 6, 2).transpose(0, 1)),
        (_ROWS[:, :0], _ROWS.to(torch.bfloat16) / 0),
        (torch.zeros(6, 2, requires_grad=True),),
    ],
)
def test_rows_of_tensors_are_fetched_as_a_collate_of_samples(
    tensors: tuple[torch.Tensor, ...],
) -> None:
    dataset = TensorDataset(*tensors)
    for batch_size in (1, 2, 4):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
        found = [*Lone(open_with(dataset, **options).batches(1))]
        expected = [*Lone(open_with(Rows(dataset), **options).batches(1))]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (type(one), len(one)) == (type(other), len(other))
            for left, right in zip(one, other, strict=True):
                assert left.requires_grad == right.requires_grad
                assert left.stride() == right.stride()
                assert left.is_conj() == right.is_conj()
                assert same(left, right)


def test_a_changed_table_of_default_collate_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(batch: list[torch.Tensor], **_: Any) -> torch.Tensor:
        return torch.stack(batch) / 2

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, halve)
    options: dict[str, Any] = {"batch_size": 2}
    found = [*Lone(open_with(TensorDataset(_ROWS), **options).batches(0))]
    assert same([each for (each,) in found], [*(_ROWS / 2).split(2)])


@pytest.mark.shows("P70")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_are_read_where_they_are_fetched_with_equal_results(num_replicas: int) -> None:
    found = []
    for num_workers in (0, 2):
        loader, sampler = create_dataloader(
            Augmented(LENGTH), batch_size=2, shuffle=True, num_workers=num_workers
        )
        share = Shard(num_replicas, range(num_replicas), pads=True)
        source = open_source(loader, sampler, run_seed=3, purpose=FETCH, share=share)
        batches = source.batches(0, reads_content=True)
        hashes = []
        for batch in batches:
            contents = batches.contents
            assert contents is not None
            hashes.append([hash_content(each, 5) for each in contents])
            assert hashes[-1] == [fingerprint(each, 5).value for each in batch]
        found.append(hashes)
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) == len(found[0]) > 1


@pytest.mark.shows("P70")
def test_only_a_run_that_asks_gets_what_was_read() -> None:
    options = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    loader, sampler = create_dataloader(Indices(4), **options)
    source = open_source(loader, sampler, run_seed=3, purpose=FETCH)
    try:
        for reads_content in (True, False, True):
            batches = source.batches(0, reads_content=reads_content)
            assert [each[0].tolist() for each in batches] == [[0, 1], [2, 3]]
            assert (batches.contents is not None) is reads_content
            assert [each.tolist() for each in loader] == [[0, 1], [2, 3]]
    finally:
        source.close()


@pytest.mark.shows("P70")
def test_workers_that_a_users_own_loop_has_started_make_way_for_those_of_the_run() -> None:
    options = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    loader, sampler = create_dataloader(Indices(4), **options)
    assert [each.tolist() for each in loader] == [[0, 1], [2, 3]]
    (own,) = loader._iterator._workers
    source = open_source(loader, sampler, run_seed=3, purpose=FETCH)
    try:
        batches = source.batches(0, reads_content=True)
        assert not own.is_alive()
        assert [each[0].tolist() for each in batches] == [[0, 1], [2, 3]]
        assert batches.contents is not None
    finally:
        source.close()
