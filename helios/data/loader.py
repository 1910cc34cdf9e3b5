"""Loaders: a data set and its options in, a PyTorch DataLoader whose batches carry keys out.

Iterated by hand it behaves as any DataLoader; :mod:`helios.data.source` drives it for a trainer.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sized
from multiprocessing.context import BaseContext, Process
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from helios.core import rng
from helios.core.registry import Registry
from helios.core.signal_watch import ignore_signals, noted_signals
from helios.data.keyed import KeyedBatchSampler, KeyedDataset, Walk
from helios.data.order import Order, Position, PositionalOrder
from helios.data.params import DataLoaderParams
from helios.data.replayed_sampler import ReplayedOrder
from helios.data.samplers import (
    ResumableDistributedSampler,
    ResumableRandomSampler,
    ResumableSamplerType,
    ResumableSequentialSampler,
    is_positional,
)
from helios.distributed.process_groups import is_dist_active
from helios.errors import ArgumentError

LoaderPair: TypeAlias = tuple[DataLoader[Any], ResumableSamplerType | None]

DATASET_REGISTRY = Registry("dataset")
COLLATE_FN_REGISTRY = Registry("collate_fn")
COLLATE_FN_REGISTRY.register(default_collate)


@runtime_checkable
class _HasWorkers(Protocol):
    """The iterator of a DataLoader with workers, PyTorch's or a relative of it."""

    _workers: list[BaseProcess]

    def _shutdown_workers(self) -> None: ...


def create_dataset(type_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create a registered data set by the name of its class.

    Raises:
        KeyError: for a name that is not registered.
    """
    return DATASET_REGISTRY.get(type_name)(*args, **kwargs)


def create_collate_fn(type_name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a registered function as it is, or build a registered class with the arguments.

    Raises:
        KeyError: for a name that is not registered.
    """
    found = COLLATE_FN_REGISTRY.get(type_name)
    collate_fn: Callable[[Any], Any] = found(*args, **kwargs) if isinstance(found, type) else found
    return collate_fn


@final
class WorkerInit:
    """Seeds ``random`` and the package's NumPy generator in a worker (H8), then calls the user's.

    In a worker that is started while the training process notes signals, these do nothing: they are
    often sent to all processes of a job, and the training needs its workers until it has saved.

    Args:
        user_init: the user's function; gets the worker's number.
    """

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self._user_init = user_init
        self._ignored: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker gets that is started afresh and inherits no handlers."""
        return vars(self) | {"_ignored": noted_signals()}

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker that this runs in."""
        _end_without_parent()
        ignore_signals(self._ignored or noted_signals())
        rng.seed_rngs(torch.initial_seed() % 2**32, skip_torch=True)
        if self._user_init is not None:
            self._user_init(worker_id)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            info.dataset.begin_worker()


@final
class KeyedLoader(DataLoader[Any]):
    """A DataLoader whose batches carry keys, and which can begin at any position.

    By hand it begins where its sampler's ``set_epoch`` and ``start_iter`` say, and leaves the
    generators of the training process as it finds them.

    Args:
        dataset: the user's data set.
        batches: the batches of a pass.
        params: options, complete and checked.

    Attributes:
        batches: as given.
        keyed_dataset: what workers fetch from; its ``dataset`` is the one of the user.
        params: as given.
        flag: one byte that workers set when NumPy's legacy generator moved; ``None`` without.
    """

    def __init__(self, dataset: Any, batches: KeyedBatchSampler, params: DataLoaderParams) -> None:
        flag = _make_shared_flag() if params.num_workers else None
        how: dict[str, Any] = {"batch_sampler": batches}
        if not batches.is_batched:
            how = {"batch_size": None, "sampler": batches}
        keyed_dataset = KeyedDataset(dataset, flag)
        super().__init__(keyed_dataset, **how, **_loader_options(params))
        self.batches = batches
        self.keyed_dataset = keyed_dataset
        self.params = params
        self.flag = flag

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return super().__iter__() if self.num_workers else self._iterate_here(super().__iter__())

    def start(self, position: Position, walk: Walk) -> Iterator[Any]:
        """Start PyTorch's own iteration; persistent workers are used again.

        Args:
            position: where it begins.
            walk: gives the batches from there on, each with its key.
        """
        if self.generator is not None:
            self.generator.manual_seed(rng.key("workers", position.run_seed, position.epoch))
        self.batches.seek(walk)
        try:
            return super().__iter__()
        finally:
            self.batches.seek(None)

    def end_workers(self) -> None:
        """End persistent workers; the next iteration starts new ones."""
        end_workers(self._iterator)
        self._iterator = None

    def _iterate_here(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            found = rng.get_rng_state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                rng.load_rng_state_dict(found)
            yield batch


def end_workers(iterator: object) -> None:
    """End the workers of PyTorch's iterator now, and wait for it; does nothing for others.

    Otherwise they end when the iterator is collected, which a traceback can put off for long.
    """
    if isinstance(iterator, _HasWorkers):
        iterator._shutdown_workers()  # noqa: SLF001 - PyTorch has no public way
        for worker in iterator._workers:  # noqa: SLF001
            # One that stands still may ignore the SIGTERM that it got.
            if worker.is_alive():
                worker.kill()


def _end_without_parent() -> None:
    """End this worker if the training was killed while it was starting.

    PyTorch's own watch begins later, and would take whatever process has adopted the worker for the
    training; the worker would then wait for ever, and hold what it has inherited.
    """
    parent, kind = multiprocessing.parent_process(), type(multiprocessing.current_process())
    method = multiprocessing.get_start_method(allow_none=True) if kind is Process else ""
    # Under forkserver its server starts the worker, and ends with the training.
    is_served = method == "forkserver" or kind.__name__ == "ForkServerProcess"
    if parent is not None and not is_served and os.getppid() != parent.pid:
        os._exit(1)


def create_dataloader(  # noqa: PLR0913 - the signature that existing users rely on (API section 14)
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
    num_replicas: int | None = None,
) -> LoaderPair:
    """Create a loader for a data set, and the sampler that decides its order (H9).

    The options are those of :class:`DataLoaderParams`. ``num_replicas`` is what a data module says
    under that name; it is asked for where there may be no process group to ask.

    Returns:
        The loader, and its sampler; no sampler for an ``IterableDataset`` or a ``batch_sampler``.

    Raises:
        ArgumentError: for an option that breaks its rule, and for a data set that is empty or
            gives no batch.
        ArgumentTypeError: for a sampler that does not derive from one of the bases (H10).
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
    )
    return build_loader(dataset, params, num_replicas=num_replicas)


def build_loader(
    dataset: Any,
    params: DataLoaderParams,
    *,
    name: str = "dataset",
    num_replicas: int | None = None,
) -> LoaderPair:
    """Create what :func:`create_dataloader` does.

    Args:
        dataset: a map-style or iterable data set.
        params: the options.
        name: what messages call the data set.
        num_replicas: the replicas that share the data; ``None`` to ask the process group.
    """
    params.check()
    params.warn_of_idle_options()
    if params.debug_mode or not params.num_workers:
        params = params.without_workers()
    if isinstance(dataset, IterableDataset):
        return _build_streaming(dataset, params, name), None
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ArgumentError(
            f"The {name} must hold at least one sample, got an empty {type(dataset).__name__}. "
            "Check its path and filters."
        )
    if params.batch_sampler is not None:
        batches = KeyedBatchSampler(ReplayedOrder(params.batch_sampler, yields_batches=True))
        return KeyedLoader(dataset, batches, params), None
    sampler = params.sampler or _choose_sampler(dataset, params, name, num_replicas)
    order: Order = PositionalOrder(sampler) if is_positional(sampler) else ReplayedOrder(sampler)
    batches = KeyedBatchSampler(order, batch_size=params.batch_size, drop_last=params.drop_last)
    # What many replicas get is checked where they share it: an evaluation pads and cuts nothing.
    is_whole = num_replicas is None or num_replicas == 1
    if is_whole and order.length is not None and batches.num_batches == 0:
        raise ArgumentError(
            f"The {name} must give at least one batch, got {order.length} samples for "
            f"batch_size={params.batch_size} with drop_last={params.drop_last}. Lower the batch "
            "size or leave out drop_last."
        )
    return KeyedLoader(dataset, batches, params), sampler


def _choose_sampler(
    dataset: Any, params: DataLoaderParams, name: str, num_replicas: int | None
) -> ResumableSamplerType:
    """Choose as H9 says: shared data, else a random order, else that of the data set."""
    if not isinstance(dataset, Sized):
        raise ArgumentError(
            f"The {name} must have a length, got a {type(dataset).__name__} without __len__. "
            "Give it one, or pass a sampler or a batch_sampler."
        )
    batch_size = params.batch_size or 1
    if params.is_distributed:
        if num_replicas is None and not is_dist_active():
            raise ArgumentError(
                "DataLoaderParams(is_distributed=True) must come with a process group, and there "
                "is none. Leave it out, pass create_dataloader(num_replicas=self.num_replicas) in "
                "a data module, or pass a ResumableDistributedSampler with num_replicas and rank."
            )
        return ResumableDistributedSampler(
            dataset,
            num_replicas=num_replicas,
            # Whoever knows the replicas deals the whole order out to them: no rank is asked for.
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
            f"The {name} is an IterableDataset, which decides its order itself, and must come "
            f"without {' and '.join(given)}; shuffle inside the data set."
        )
    return DataLoader(
        dataset,
        batch_size=params.batch_size,
        drop_last=params.drop_last,
        **_loader_options(params),
    )


def _loader_options(params: DataLoaderParams) -> dict[str, Any]:
    """Return the options that do not touch the order, as PyTorch names them."""
    return {
        "num_workers": params.num_workers,
        "collate_fn": params.collate_fn,
        "pin_memory": params.pin_memory and _can_pin(),
        "worker_init_fn": WorkerInit(params.worker_init_fn),
        "multiprocessing_context": params.multiprocessing_context,
        "prefetch_factor": params.prefetch_factor,
        "persistent_workers": params.persistent_workers,
        # Without one, iter(loader) draws from the default generator, and shifts what follows.
        "generator": torch.Generator().manual_seed(rng.key("workers", params.random_seed)),
    }


def _make_shared_flag() -> torch.Tensor:
    flag = torch.zeros(1, dtype=torch.uint8)
    return flag.share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def _can_pin() -> bool:
    """Whether there is an accelerator that pinned memory helps; Apple's takes none."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"
