"""Converts the loaders that a data module returns for a phase to a list of sources.

A data module may return a loader, a pair of loader and sampler, or a list or dict of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from helios.data.external_loader import ExternalSource
from helios.data.keyed_source import KeyedSource
from helios.data.loader import KeyedLoader
from helios.data.order import Position
from helios.data.source import LONE, Shard, Source
from helios.data.steps import Steps, StepsSource
from helios.data.stream import StreamLoader, StreamSource
from helios.errors import ArgumentError, ArgumentTypeError


def open_sources(
    found: Any,
    *,
    label: str,
    run_seed: int,
    purpose: str,
    limit: int | None = None,
    share: Shard = LONE,
) -> list[Source]:
    """Return the sources for the loaders of a phase, in order.

    Args:
        found: a loader, a tuple ``(loader, sampler)``, or a list or dict of these.
        label: the name of the phase, for messages.
        run_seed: seed of the run.
        purpose: name of the random streams of the first loader; the others derive their own.
        limit: maximum number of batches of each pass; ``None`` for all.
        share: the part of this process.

    Raises:
        ArgumentError: if there is no loader, if one has no batch, or if a loader or sampler cannot
            be shared by the replicas of the run.
        ArgumentTypeError: if a tuple is not ``(loader, sampler)``.
    """
    is_several = isinstance(found, list | Mapping)
    sources = []
    for number, (name, loader, sampler) in enumerate(_entries(found, f"loaders of {label}")):
        own = f"{purpose}-{number}" if number else purpose
        source = open_source(loader, sampler, run_seed=run_seed, purpose=own, share=share)
        if source.num_batches() == 0:
            where = f" in loader {name!r}" if is_several else ""
            raise ArgumentError(
                f"The data of {label} must contain at least one batch for each replica, got "
                f"none{where}. Check the data set's length, the batch size and drop_last."
            )
        source.name, source.limit = name, limit
        sources.append(source)
    if not sources:
        raise ArgumentError(
            f"The data of {label} must have at least one loader, got {found!r}. Use None if there "
            "is no data."
        )
    return sources


def open_source(
    loader: Iterable[Any],
    sampler: object = None,
    *,
    run_seed: int,
    purpose: str,
    share: Shard = LONE,
) -> Source:
    """Return the source for a loader.

    Args:
        loader: the loader that a data module returned.
        sampler: the sampler that it returned with the loader.
        run_seed: seed of the run.
        purpose: name of the random streams of fetching: ``"fetch"`` for training, another one for
            each other phase, so that evaluation and training use different random numbers.
        share: the part of this process.

    Raises:
        ArgumentError: if the replicas of the run cannot share the loader or sampler.
    """
    begin = Position(run_seed, purpose)
    if isinstance(loader, Steps):
        return StepsSource(loader, share)
    if isinstance(loader, StreamLoader):
        return StreamSource(loader, begin, share)
    if isinstance(loader, KeyedLoader):
        return KeyedSource(loader, begin, share)
    return ExternalSource(loader, sampler, begin, share)


def _entries(found: Any, what: str) -> list[tuple[str, Any, Any]]:
    """Return name, loader and sampler of each loader."""
    if isinstance(found, Mapping):
        named = [(str(name), item) for name, item in found.items()]
    elif isinstance(found, list):
        named = [(str(number), item) for number, item in enumerate(found)]
    else:
        return [("", *_as_pair(found, what))]
    return [(name, *_as_pair(item, f"{what}, {name!r},")) for name, item in named]


def _as_pair(found: Any, what: str) -> tuple[Any, Any]:
    if isinstance(found, tuple):
        is_pair = len(found) == 2 and not isinstance(found[0], tuple)
        if is_pair and not isinstance(found[1], DataLoader):
            return found[0], found[1]
    elif isinstance(found, Iterable):
        return found, None
    raise ArgumentTypeError(
        f"The {what} must be a loader, a tuple (loader, sampler), or a list or dict of these, got "
        f"{found!r}. Return the result of create_dataloader, or [pair, pair]."
    )
