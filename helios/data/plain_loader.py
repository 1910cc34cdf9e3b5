"""Takes a plain PyTorch loader apart: the options with which Helios loads the same batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from helios.data.params import DataLoaderParams
from helios.errors import ArgumentTypeError


def take_apart(loader: DataLoader[Any], attribute: str) -> DataLoaderParams:
    """Return the options of a loader.

    A random order is that of Helios, which a resumed run repeats.

    Args:
        loader: the loader.
        attribute: what it was assigned to, such as ``"train_dataset"``.

    Raises:
        ArgumentTypeError: if no options stand for the loader.
    """
    obstacle = _find_obstacle(loader)
    if obstacle:
        raise ArgumentTypeError(
            f"{attribute} must be created by create_dataset, or be a plain DataLoader, but got one "
            f"with {obstacle}, which could not resume exactly. Write "
            f"{write_replacement(loader, attribute)}."
        )
    return DataLoaderParams(
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        collate_fn=None if _has_default_collate(loader) else loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        worker_timeout=loader.timeout or DataLoaderParams.worker_timeout,
    )


def write_replacement(loader: DataLoader[Any], attribute: str = "train_dataset") -> str:
    """Return the statement that takes the place of a loader in a data module's ``setup``."""
    options = [f"batch_size={loader.batch_size}", "shuffle=..."]
    if isinstance(loader.dataset, IterableDataset):
        del options[1]
    elif not _has_own_batch_sampler(loader) and loader.drop_last:
        options.append("drop_last=True")
    if _has_own_batch_sampler(loader):
        options = ["batch_sampler=loader.batch_sampler"]
    if loader.num_workers:
        options.append(f"num_workers={loader.num_workers}")
    if not _has_default_collate(loader):
        options.append("collate_fn=loader.collate_fn")
    return f"self.{attribute} = self.create_dataset(dataset, {', '.join(options)})"


def _has_own_batch_sampler(loader: DataLoader[Any]) -> bool:
    # PyTorch makes one for each batch size.
    return loader.batch_size is None and loader.batch_sampler is not None


def _has_default_collate(loader: DataLoader[Any]) -> bool:
    is_batched = loader.batch_sampler is not None
    return loader.collate_fn is (default_collate if is_batched else default_convert)


def _find_obstacle(loader: DataLoader[Any]) -> str:
    """Return what of a loader has no option; empty if there is nothing."""
    if type(loader) is not DataLoader:
        return f"the class {type(loader).__name__}"
    batches = loader.batch_sampler
    if _has_own_batch_sampler(loader) or type(batches) not in (BatchSampler, type(None)):
        return f"a batch_sampler of its own, a {type(batches).__name__}"
    if loader.generator is not None:
        return "a generator of its own"
    if not loader.in_order:
        return "in_order=False"
    if isinstance(loader.dataset, IterableDataset):
        return ""
    sampler = loader.sampler
    return "" if _is_plain(sampler, loader.dataset) else f"a {type(sampler).__name__} of its own"


def _is_plain(sampler: object, dataset: object) -> bool:
    if type(sampler) is SequentialSampler:
        return sampler.data_source is dataset
    return (
        type(sampler) is RandomSampler
        and sampler.data_source is dataset
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )
