"""What of a run's definition may change between two starts, where the user allows it."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Change: TypeAlias = Literal[
    "dataset",
    "length",
    "batch_size",
    "shuffle",
    "drop_last",
    "seed",
    "sampler",
    "random_seed",
    "train_unit",
    "accumulation_steps",
    "limit_batches",
    "is_distributed",
    "precision",
]
CHANGEABLE: tuple[str, ...] = get_args(Change)
