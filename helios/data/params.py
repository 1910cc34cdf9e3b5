"""The options of a data loader, and their validation."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from helios.core import rng
from helios.data.samplers import ResumableSamplerType
from helios.errors import ArgumentError, ArgumentTypeError

_LOGGER = logging.getLogger(__name__)
_WORKER_OPTIONS: dict[str, Any] = {
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "worker_init_fn": None,
    "worker_timeout": 300.0,
}


def _is_int(value: Any, *, least: float = -math.inf) -> bool:
    return type(value) is int and value >= least


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 < value < math.inf)


_RULES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("an int", _is_int, ("random_seed",)),
    ("an int of at least 0", lambda value: _is_int(value, least=0), ("num_workers",)),
    (
        "an int of at least 1 or None",
        lambda value: value is None or _is_int(value, least=1),
        ("batch_size", "prefetch_factor"),
    ),
    ("a positive number of seconds or None", _is_seconds, ("worker_timeout",)),
    (
        "True or False",
        lambda value: isinstance(value, bool),
        ("shuffle", "pin_memory", "drop_last", "debug_mode", "persistent_workers"),
    ),
    ("True or False", lambda value: isinstance(value, bool | None), ("is_distributed",)),
)
"""What single options must be; :meth:`DataLoaderParams.check` adds what holds between them."""


@dataclasses.dataclass
class DataLoaderParams:
    """Options of the loader of a data set.

    Attributes:
        random_seed: seed of the order, in addition to that of the run.
        batch_size: samples per batch; ``None`` to load single samples without collating.
        shuffle: whether the order is random.
        num_workers: number of worker processes; 0 to fetch in the training process.
        pin_memory: whether to pin batches, if there is an accelerator.
        drop_last: whether to drop an incomplete last batch.
        debug_mode: whether to fetch in the training process regardless of ``num_workers``.
        is_distributed: whether the data is sharded over replicas; ``None`` for the setting of the
            data module. With several replicas, a trainer shards the data unless this is False, in
            which case each replica trains on all of it. Evaluation data is always sharded.
        sampler: the order, instead of ``shuffle``; derived from ``ResumableSampler`` or
            ``ResumableDistributedSampler``.
        collate_fn: combines samples into a batch; PyTorch's default if ``None``.
        persistent_workers: whether to keep the workers between epochs.
        prefetch_factor: batches that each worker prefetches; 2 if ``None``.
        multiprocessing_context: how workers are started: a name, a context, or the default.
        worker_init_fn: called in each worker with its number, after seeding.
        batch_sampler: lists of indices, instead of all other options of the order.
        worker_timeout: seconds that training waits for a batch before it replaces the workers;
            ``None`` to wait as long as they live.
    """

    random_seed: int = rng.get_default_seed()
    batch_size: int | None = 1
    shuffle: bool = False
    num_workers: int = 0
    pin_memory: bool = True
    drop_last: bool = False
    debug_mode: bool = False
    is_distributed: bool | None = None
    sampler: ResumableSamplerType | None = None
    collate_fn: Callable[[Any], Any] | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | BaseContext | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    worker_timeout: float | None = 300.0

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary; the values are not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> DataLoaderParams:
        """Create the options from a dictionary; unknown keys and ``sampler`` are ignored."""
        known = {field.name for field in dataclasses.fields(cls)} - {"sampler"}
        return cls(**{name: value for name, value in table.items() if name in known})

    def check(self) -> None:
        """Check all options and their combinations.

        Raises:
            ArgumentError: if an option is invalid.
            ArgumentTypeError: if a sampler does not derive from ``ResumableSampler`` or
                ``ResumableDistributedSampler``.
        """
        for rule, fits, names in _RULES:
            for name in names:
                value = getattr(self, name)
                if not fits(value):
                    raise ArgumentError(
                        f"DataLoaderParams({name}=...) must be {rule}, got {value!r}."
                    )
        if self.sampler is not None and not isinstance(self.sampler, ResumableSamplerType):
            raise ArgumentTypeError(
                "DataLoaderParams(sampler=...) must derive from ResumableSampler or "
                f"ResumableDistributedSampler of helios.data.samplers, got {self.sampler!r}. "
                "Derive it from one of them (docs/data.md, Samplers, has one with weights); any "
                "iterable of lists can be the batch_sampler instead."
            )
        if self.sampler is not None and self.shuffle:
            _LOGGER.warning(
                "DataLoaderParams(shuffle=True) has no effect together with a sampler, which "
                "determines the order."
            )
        is_ordered = self.shuffle or self.drop_last or self.sampler is not None
        if self.batch_sampler is not None and (is_ordered or self.batch_size != 1):
            raise ArgumentError(
                "DataLoaderParams(batch_sampler=...) cannot be combined with batch_size, shuffle, "
                "sampler or drop_last, because the batch sampler determines all of these."
            )

    def without_workers(self) -> DataLoaderParams:
        """Return a copy that fetches in the training process."""
        return dataclasses.replace(self, num_workers=0, **_WORKER_OPTIONS)
