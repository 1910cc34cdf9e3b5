"""Creates PyTorch DataLoaders whose batches have keys.

A key is sent with the indices of each batch, and the data set seeds all generators from it before
the fetch. So the random numbers of a batch depend on its position, not on the process that fetches
it. The collate function runs in the same process right afterwards, so it draws from the same
stream. In a user's own loop, such a loader behaves like any DataLoader; a trainer uses it through
:mod:`helios.data.source`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from helios.core import rng
from helios.core.registry import Registry
from helios.data.mixture import Mixture, MixtureSampler
from helios.data.order import Order, Position, PositionalOrder, ReplayedOrder, is_positional
from helios.data.params import DataLoaderParams
from helios.data.samplers import (
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
)
from helios.data.source import run_on_one_thread
from helios.data.stream import Stream, StreamLoader
from helios.data.workers import Parcel, WorkerInit, WorkerItems
from helios.errors import ArgumentError
from helios.storage.content_hash import Content, read_safely

LoaderPair: TypeAlias = tuple[DataLoader[Any], ResumableSamplerType | None]

DATASET_REGISTRY = Registry("dataset")
COLLATE_FN_REGISTRY = Registry("collate_fn")
COLLATE_FN_REGISTRY.register(default_collate)


def create_dataset(type_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create a registered data set by the name of its class.

    Raises:
        KeyError: if the name is not registered.
    """
    return DATASET_REGISTRY.get(type_name)(*args, **kwargs)


def create_collate_fn(type_name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a registered function, or create a registered class with the arguments.

    Raises:
        KeyError: if the name is not registered.
    """
    found = COLLATE_FN_REGISTRY.get(type_name)
    collate_fn: Callable[[Any], Any] = found(*args, **kwargs) if isinstance(found, type) else found
    return collate_fn


class Keyed(NamedTuple):
    """The request for a batch that is sent to the process that fetches it.

    Attributes:
        key: the key to seed from.
        indices: the indices of a batch; a single index if batches are not collated.
        reads_content: whether the process that fetches the batch reads its content.
    """

    key: int
    indices: Any
    reads_content: bool = False


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that fetches all samples of a batch at once."""

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the samples of a batch."""
        ...


@final
class KeyedDataset(Dataset[Any]):
    """A user's data set, seeded before each fetch.

    Args:
        dataset: the user's data set; also available as an attribute.

    Attributes:
        dataset: as given.
        reads_content: whether the worker reads the content of the last batch.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._getitems = dataset.__getitems__ if isinstance(dataset, BatchedDataset) else None
        self.reads_content = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Keyed):
            return self.dataset[index]
        self.reads_content = index.reads_content
        rng.reseed(index.key)
        return self.dataset[index.indices]

    def __getitems__(self, indices: Any) -> Any:
        if isinstance(indices, Keyed):
            self.reads_content = indices.reads_content
            rng.reseed(indices.key)
            indices = indices.indices
        if self._getitems is not None:
            return self._getitems(indices)
        return [self.dataset[index] for index in indices]


class ReadBatch(NamedTuple):
    """The answer of a worker.

    Attributes:
        batch: the batch.
        content: its content, as it was read.
    """

    batch: Any
    content: Content


@final
class ReadingCollate:
    """Collates a batch in a worker, and reads its content if the key of the batch demands it.

    Args:
        collate: the user's function.
        dataset: the data set of the same worker, which gets the keys.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: KeyedDataset) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """Return the batch, with its content if demanded."""
        batch = self._collate(samples)
        if not self._dataset.reads_content:
            return Parcel(batch)
        return Parcel(ReadBatch(batch, read_safely(batch)))


def data_sets_of(loader: object) -> list[Any]:
    """Return the data set that a PyTorch loader reads, and the user's data set inside of it."""
    if not isinstance(loader, DataLoader):
        return []
    outer = loader.dataset
    return [outer, outer.dataset] if isinstance(outer, KeyedDataset) else [outer]


Walk: TypeAlias = Callable[[], Iterator[Keyed]]


@final
class KeyedBatchSampler(Sampler[Any]):
    """The batches of a pass: each with its key in a run, without one in a user's own loop.

    Args:
        order: the order of the samples.
        batch_size: samples per batch; ``None`` to fetch single samples.
        drop_last: whether to drop an incomplete last batch.
    """

    def __init__(
        self, order: Order, *, batch_size: int | None = 1, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.order = order
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._walk: Walk | None = None

    @property
    def is_batched(self) -> bool:
        """Whether an item is a list of indices."""
        return self.order.yields_batches or self._batch_size is not None

    def seek(self, walk: Walk | None) -> None:
        """Set the function that iterates over the next pass; ``None`` for the user's sampler."""
        self._walk = walk

    @property
    def num_batches(self) -> int | None:
        """The number of batches of a whole pass; ``None`` if unknown."""
        length = self.order.length
        if length is None or self.order.yields_batches:
            return length
        size = self._batch_size or 1
        return length // size if self._drop_last else -(-length // size)

    def __len__(self) -> int:
        count = self.num_batches
        if count is None:
            raise TypeError(f"{type(self.order.sampler).__name__} has no length.")
        return count

    def __iter__(self) -> Iterator[Any]:
        # The function is chosen now, and called at the first step: torch calls iter() twice when it
        # starts workers, and only uses the second iterator.
        if self._walk is not None:
            return self._walk()
        sampler = self.order.sampler
        if self.order.yields_batches or self._batch_size is None:
            return iter(sampler)
        return iter(BatchSampler(sampler, self._batch_size, self._drop_last))


def ask_twice(position: Position, ask: Callable[[], Any]) -> Any:
    """Return the result of iterating over a copy of a user's sampler, if it is the same twice.

    The result differs if the order depends on more than the position, such as a counter of the
    sampler. Only the copy is changed.

    Args:
        position: determines the random stream of the sampler.
        ask: iterates over the copy from the position.
    """
    try:
        with rng.stream(position.order_key()):
            first, second = ask(), ask()
    except Exception:  # a copy of a user's sampler may be incomplete
        return None
    return first if first == second else None


def split_into_batches(blocks: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    """Split blocks into lists of equal size, several at once; the last one may be shorter."""
    rest: list[Any] = []
    for block in blocks:
        joined = rest + block if rest else block
        end = len(joined) - len(joined) % size
        if end:
            yield [joined[first : first + size] for first in range(0, end, size)]
        rest = joined[end:]
    if rest:
        yield [rest]


@final
class KeyedLoader(DataLoader[Any]):
    """A DataLoader whose batches have keys, and which can start at any position.

    In a user's own loop, it starts where its sampler's ``set_epoch`` and ``start_iter`` say, and
    is seeded as any DataLoader.

    Args:
        dataset: the user's data set.
        batches: the batches of a pass.
        params: the validated options.

    Attributes:
        batches: as given.
        keyed_dataset: the data set that workers fetch from; its ``dataset`` is the user's one.
        params: as given.
    """

    def __init__(self, dataset: Any, batches: KeyedBatchSampler, params: DataLoaderParams) -> None:
        how: dict[str, Any] = {"batch_sampler": batches}
        if not batches.is_batched:
            how = {"batch_size": None, "sampler": batches}
        keyed_dataset = KeyedDataset(dataset)
        super().__init__(keyed_dataset, **how, **_loader_options(params))
        self.batches = batches
        self.keyed_dataset = keyed_dataset
        self.params = params

    @property
    def is_pure(self) -> bool:
        """Whether a fetch is known to draw no random numbers, and to leave nothing behind."""
        dataset = self.keyed_dataset.dataset
        return (
            type(dataset) is TensorDataset
            and vars(dataset).keys() == {"tensors"}
            and all(type(tensor) is Tensor for tensor in dataset.tensors)
            and self.collate_fn is default_collate
            and self.batches.is_batched
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.start_workers(None) if self.num_workers else super().__iter__()

    def read_again(self, position: Position, items: Sequence[Keyed]) -> list[Content]:
        """Fetch batches outside of any pass and return what is read of them.

        They come from a worker that ends then, if this loader has workers: what a fetch opens in
        the training process, such as a file, would be shared by all workers.

        Args:
            position: where the pass of the batches began.
            items: the batches, each with its key.
        """
        if not self.num_workers:
            return [run_on_one_thread(self._read, item) for item in items]
        batches = self.alone().start_workers(lambda: iter(items), position)
        try:
            return [each.content for each in batches]
        finally:
            batches.close()

    def _read(self, item: Keyed) -> Content:
        dataset = self.keyed_dataset
        samples = dataset.__getitems__(item) if self.batches.is_batched else dataset[item]
        return read_safely(self.collate_fn(samples))

    def alone(self) -> KeyedLoader:
        """Return a loader of the same data with one worker, which fetches one batch at a time."""
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1}
        params = dataclasses.replace(self.params, **options, persistent_workers=False)
        return KeyedLoader(self.keyed_dataset.dataset, self.batches, params)

    def start_workers(self, walk: Walk | None, position: Position | None = None) -> WorkerItems:
        """Start PyTorch's own iteration.

        Args:
            walk: returns what is fetched; ``None`` in a user's own loop.
            position: where the pass begins; ``None`` in a user's own loop.
        """
        if self.generator is not None and position is not None:
            self.generator.manual_seed(position.worker_key())
        collate = self.collate_fn
        self.collate_fn = ReadingCollate(collate, self.keyed_dataset)
        self.batches.seek(walk)
        try:
            return WorkerItems(super().__iter__, self, self.params.worker_timeout)
        finally:
            self.batches.seek(None)
            self.collate_fn = collate


def create_dataloader(
    dataset: Any,
    *positional: Any,
    num_replicas: int | None = None,
    **options: Any,
) -> LoaderPair:
    """Create a loader for a data set, and the sampler that determines its order.

    Args:
        dataset: a map-style or iterable data set.
        *positional: options of :class:`DataLoaderParams`, in their order.
        num_replicas: the number of replicas that share the data, as in ``DataModule.num_replicas``;
            the size of the process group if ``None``.
        **options: options of :class:`DataLoaderParams` as keywords.

    Returns:
        The loader and its sampler; ``None`` instead of a sampler for an ``IterableDataset`` or a
        ``batch_sampler``.

    Raises:
        ArgumentError: if an option is invalid, or if the data set is empty or too small for a
            batch.
        ArgumentTypeError: if a sampler does not derive from ``ResumableSampler`` or
            ``ResumableDistributedSampler``.
    """
    params = DataLoaderParams(*positional, **options)
    return build_loader(dataset, params, num_replicas=num_replicas)


def build_loader(
    dataset: Any,
    params: DataLoaderParams,
    *,
    name: str = "dataset",
    num_replicas: int | None = None,
) -> LoaderPair:
    """Create a loader and its sampler, as :func:`create_dataloader` does.

    Args:
        dataset: a map-style or iterable data set.
        params: the options.
        name: name of the data set in messages.
        num_replicas: the replicas that share the data; ``None`` for those of the process group.
    """
    params.check()
    if params.debug_mode or not params.num_workers:
        params = params.without_workers()
    if isinstance(dataset, IterableDataset):
        return _build_streaming(dataset, params, name), None
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ArgumentError(
            f"The {name} must contain at least one sample, got an empty {type(dataset).__name__}. "
            "Check its path and filters."
        )
    is_ordered = params.sampler is not None or params.batch_sampler is not None
    if isinstance(dataset, Mixture) and is_ordered:
        raise ArgumentError(
            f"The {name} is a Mixture, which determines the order of its samples, so it must not "
            "have a sampler or batch_sampler. Remove it, or use torch.utils.data.ConcatDataset."
        )
    if params.batch_sampler is not None:
        batches = KeyedBatchSampler(ReplayedOrder(params.batch_sampler, yields_batches=True))
        return KeyedLoader(dataset, batches, params), None
    sampler = params.sampler or _choose_sampler(dataset, params, name, num_replicas)
    order: Order = PositionalOrder(sampler) if is_positional(sampler) else ReplayedOrder(sampler)
    batches = KeyedBatchSampler(order, batch_size=params.batch_size, drop_last=params.drop_last)
    return KeyedLoader(dataset, batches, params), sampler


def _choose_sampler(
    dataset: Any, params: DataLoaderParams, name: str, num_replicas: int | None
) -> ResumableSamplerType:
    """Return a distributed sampler for shared data, otherwise a random or sequential one."""
    if not isinstance(dataset, Sized):
        raise ArgumentError(
            f"The {name} must have a length, got a {type(dataset).__name__} without __len__. "
            "Give it one, pass a sampler or a batch_sampler, or let helios.data.Stream read it."
        )
    batch_size = params.batch_size or 1
    if isinstance(dataset, Mixture):
        # Several replicas share its order like that of a user's sampler.
        return MixtureSampler(dataset, params.random_seed, batch_size, shuffle=params.shuffle)
    if params.is_distributed:
        return ResumableDistributedSampler(
            dataset,
            num_replicas=num_replicas,
            # If the number of replicas is given, the sharding plan assigns samples to ranks.
            rank=None if num_replicas is None else 0,
            shuffle=params.shuffle,
            seed=params.random_seed,
            drop_last=params.drop_last,
            batch_size=batch_size,
        )
    if params.shuffle:
        return ResumableRandomSampler(dataset, params.random_seed, batch_size)
    return ResumableSequentialSampler(dataset, batch_size)


def _build_streaming(
    dataset: IterableDataset[Any], params: DataLoaderParams, name: str
) -> DataLoader[Any]:
    if params.shuffle or params.sampler is not None or params.batch_sampler is not None:
        raise ArgumentError(
            f"The {name} is an IterableDataset, which determines its order itself, so it must not "
            "have the options shuffle, sampler and batch_sampler. Shuffle inside the data set."
        )
    if isinstance(dataset, Stream):
        return StreamLoader(dataset, params, _loader_options(params))
    return DataLoader(
        dataset,
        batch_size=params.batch_size,
        drop_last=params.drop_last,
        **_loader_options(params),
    )


def _loader_options(params: DataLoaderParams) -> dict[str, Any]:
    """Return the options that do not affect the order, under PyTorch's names."""
    return {
        "num_workers": params.num_workers,
        "collate_fn": params.collate_fn,
        "pin_memory": params.pin_memory and _can_pin(),
        "worker_init_fn": WorkerInit(params.worker_init_fn),
        "multiprocessing_context": params.multiprocessing_context,
        "prefetch_factor": params.prefetch_factor,
        "persistent_workers": params.persistent_workers,
        # Without one, iter(loader) would draw from the default generator and advance it.
        "generator": torch.Generator().manual_seed(rng.key("workers", params.random_seed)),
    }


def _can_pin() -> bool:
    """Return whether there is an accelerator that supports pinned memory; MPS does not."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"
