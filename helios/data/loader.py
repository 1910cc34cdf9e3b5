"""Creates PyTorch DataLoaders whose batches have keys.

In a user's own loop, such a loader behaves like any DataLoader; a trainer uses it through
:mod:`helios.data.source`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from helios.core import rng
from helios.core.registry import Registry
from helios.data.keyed import Keyed, KeyedBatchSampler, KeyedDataset, ReadingCollate, Walk
from helios.data.mixture import Mixture, MixtureSampler, check_mixture
from helios.data.order import Order, Position, PositionalOrder, is_positional
from helios.data.params import DataLoaderParams
from helios.data.replayed_sampler import ReplayedOrder
from helios.data.samplers import (
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
)
from helios.data.source import run_on_one_thread
from helios.data.stream import Stream, StreamLoader
from helios.data.workers import Failures, WorkerInit, WorkerItems, WorkersLost, end_workers
from helios.distributed.process_groups import is_dist_active
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


@final
class KeyedLoader(DataLoader[Any]):
    """A DataLoader whose batches have keys, and which can start at any position.

    In a user's own loop, it starts where its sampler's ``set_epoch`` and ``start_iter`` say, and
    preserves the generators of the training process.

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
        if not self.num_workers:
            return self._iterate_here(super().__iter__())
        return FetchedBatches(self, iter(self.batches))

    def read_again(self, position: Position, items: Sequence[Keyed]) -> list[Content]:
        """Return what is read of batches beside any pass.

        They come from a worker that ends then, if this loader has workers: what a fetch opens in
        the training process, such as a file, would be shared by all workers.

        Args:
            position: where the pass of the batches began.
            items: the batches, each with its key.
        """
        if not self.num_workers:
            return [run_on_one_thread(self._read, item) for item in items]
        batches = self.alone().start_workers(lambda: iter(items), position, Failures())
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
        params = replace(self.params, **options, persistent_workers=False)
        return KeyedLoader(self.keyed_dataset.dataset, self.batches, params)

    def start_workers(
        self, walk: Walk, position: Position | None, failures: Failures
    ) -> WorkerItems:
        """Start PyTorch's own iteration.

        Args:
            walk: returns what is fetched.
            position: where the pass begins; ``None`` in a user's own loop.
            failures: those of the pass.
        """
        if self.generator is not None and position is not None:
            self.generator.manual_seed(position.worker_key())
        collate = self.collate_fn
        self.collate_fn = ReadingCollate(collate, self.keyed_dataset)
        self.batches.seek(walk)
        try:
            return WorkerItems(super().__iter__, self, self.params.worker_timeout, failures)
        finally:
            self.batches.seek(None)
            self.collate_fn = collate

    def end_workers(self) -> None:
        """End persistent workers; the next iteration starts new ones."""
        end_workers(self)

    def _iterate_here(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            found = rng.read_states()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                rng.load_states(found)
            yield batch


@final
class FetchedBatches(Iterator[Any]):
    """What workers fetch in a pass, in its order, from new workers if some are lost.

    Every batch is known by its key. So what was dealt and not handed out is fetched again, one
    batch at a time by one worker, and then the rest of the same walk; a sampler is never asked
    twice. So the batch is known that a worker dies of, and a worker that dies after a few batches
    gets further each time.

    Args:
        loader: whose workers fetch.
        items: what is fetched; iterated over once.
        position: where the pass begins; ``None`` in a user's own loop.
    """

    def __init__(
        self, loader: KeyedLoader, items: Iterator[Keyed], position: Position | None = None
    ) -> None:
        self._loader, self._items, self._position = loader, items, position
        self._owed: deque[Keyed] = deque()
        self._errors: list[Exception] = []
        self._failures = Failures()
        self._is_mending = False
        self._workers = self._deal()

    def _deal(self) -> WorkerItems:
        """Let workers fetch what follows."""
        # Not this object: its workers end when it is dropped, so nothing may lead back to it.
        items, owed, errors = self._items, self._owed, self._errors
        found = self._loader.start_workers(
            lambda: _walk(items, owed, errors), self._position, self._failures
        )
        if errors:
            found.close()
            raise errors[0]
        return found

    def __next__(self) -> Any:
        while True:
            try:
                item = next(self._workers)
            except WorkersLost as loss:
                self._mend(loss)
            except StopIteration:
                raise
            except Exception:
                self._count_one()
                raise
            else:
                self._count_one()
                if self._errors:
                    self.close()
                    raise self._errors[0]
                return item

    def _count_one(self) -> None:
        self._owed.popleft()
        self._failures.clear()
        if self._is_mending and not self._owed:
            # Now: who hands out batches knows by what is dealt whether the pass goes on.
            self.close()
            self._is_mending = False
            self._workers = self._deal()

    def _mend(self, loss: WorkersLost) -> None:
        """Fetch what is owed from a new worker."""
        self._workers.close()
        count = len(self._owed)
        what = "the batch that was" if count == 1 else f"the {count} batches that were"
        then = f"A new worker fetches {what} under way, one at a time."
        self._failures.add(loss, then, remedy=self._describe_next())
        self._is_mending = True
        owed = [*self._owed]
        self._workers = self._loader.alone().start_workers(
            lambda: iter(owed), self._position, self._failures
        )

    def _describe_next(self) -> str:
        item = self._owed[0]
        return (
            f"They did not fetch the samples {item.indices}. To see why, fetch them yourself: "
            f"helios.core.rng.reseed({item.key}), then dataset[i] for each, under python -X "
            "faulthandler. If it just takes long, raise worker_timeout."
        )

    def close(self) -> None:
        """End the pass; persistent workers stay for the next one."""
        self._workers.close()


def _walk(items: Iterator[Keyed], owed: deque[Keyed], errors: list[Exception]) -> Iterator[Keyed]:
    """Deal up to an error, and note what is dealt.

    The error is not raised here: PyTorch's iterator would be left to the garbage collector, which
    closes the pipes of its queues before their threads do so once more.
    """
    try:
        for item in items:
            owed.append(item)
            yield item
    except Exception as error:
        errors.append(error)


def create_dataloader(
    dataset: Any,
    random_seed: int = rng.get_default_seed(),
    batch_size: int | None = 1,
    shuffle: bool = False,
    num_workers: int = 0,
    pin_memory: bool = True,
    drop_last: bool = False,
    debug_mode: bool = False,
    is_distributed: bool | None = None,
    sampler: ResumableSamplerType | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    batch_sampler: Any = None,
    worker_timeout: float | None = 300.0,
    num_replicas: int | None = None,
) -> LoaderPair:
    """Create a loader for a data set, and the sampler that determines its order.

    The options are those of :class:`DataLoaderParams`. ``num_replicas`` is the number of replicas
    that share the data, as in ``DataModule.num_replicas``; the size of the process group if None.

    Returns:
        The loader and its sampler; ``None`` instead of a sampler for an ``IterableDataset`` or a
        ``batch_sampler``.

    Raises:
        ArgumentError: if an option is invalid, or if the data set is empty or too small for a
            batch.
        ArgumentTypeError: if a sampler does not derive from ``ResumableSampler`` or
            ``ResumableDistributedSampler``.
    """
    params = DataLoaderParams(
        random_seed=random_seed,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
        debug_mode=debug_mode,
        is_distributed=is_distributed,
        sampler=sampler,
        collate_fn=collate_fn,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
        worker_init_fn=worker_init_fn,
        batch_sampler=batch_sampler,
        worker_timeout=worker_timeout,
    )
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
    params.warn_of_idle_options()
    if params.debug_mode or not params.num_workers:
        params = params.without_workers()
    if isinstance(dataset, IterableDataset):
        return _build_streaming(dataset, params, name), None
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ArgumentError(
            f"The {name} must contain at least one sample, got an empty {type(dataset).__name__}. "
            "Check its path and filters."
        )
    if isinstance(dataset, Mixture):
        is_ordered = params.sampler is not None or params.batch_sampler is not None
        is_by_rank = bool(params.is_distributed) and num_replicas is None
        check_mixture(name, is_ordered=is_ordered, is_by_rank=is_by_rank)
    if params.batch_sampler is not None:
        batches = KeyedBatchSampler(ReplayedOrder(params.batch_sampler, yields_batches=True))
        return KeyedLoader(dataset, batches, params), None
    sampler = params.sampler or _choose_sampler(dataset, params, name, num_replicas)
    order: Order = PositionalOrder(sampler) if is_positional(sampler) else ReplayedOrder(sampler)
    batches = KeyedBatchSampler(order, batch_size=params.batch_size, drop_last=params.drop_last)
    # With several replicas, the number of batches is known only when the data is sharded.
    is_whole = num_replicas is None or num_replicas == 1
    if is_whole and order.length is not None and batches.num_batches == 0:
        raise ArgumentError(
            f"The {name} must have at least one batch, got {order.length} samples for "
            f"batch_size={params.batch_size} with drop_last={params.drop_last}. Reduce the batch "
            "size or remove drop_last."
        )
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
        if num_replicas is None and not is_dist_active():
            raise ArgumentError(
                "DataLoaderParams(is_distributed=True) requires a process group, but there is "
                "none. Remove it, pass create_dataloader(num_replicas=self.num_replicas) in a data "
                "module, or pass a ResumableDistributedSampler with num_replicas and rank."
            )
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
    given = [
        option
        for option, value in (
            ("shuffle", params.shuffle),
            ("sampler", params.sampler is not None),
            ("batch_sampler", params.batch_sampler is not None),
        )
        if value
    ]
    if given:
        raise ArgumentError(
            f"The {name} is an IterableDataset, which determines its order itself, so it must not "
            f"have the option {' and '.join(given)}. Shuffle inside the data set."
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
    """Whether there is an accelerator that supports pinned memory; MPS does not."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"
