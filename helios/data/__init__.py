"""Samplers, data loaders and data modules, which return the batches of a run by position.

Nothing in this package depends on a model, a checkpoint or a loop.
"""

from helios.data.datamodule import DataModule, DatasetSplit
from helios.data.loader import (
    COLLATE_FN_REGISTRY,
    DATASET_REGISTRY,
    create_collate_fn,
    create_dataloader,
    create_dataset,
)
from helios.data.mixture import Mixture
from helios.data.packed import Packed
from helios.data.params import DataLoaderParams
from helios.data.steps import Steps
from helios.data.stream import Stream

__all__ = [
    "COLLATE_FN_REGISTRY",
    "DATASET_REGISTRY",
    "DataLoaderParams",
    "DataModule",
    "DatasetSplit",
    "Mixture",
    "Packed",
    "Steps",
    "Stream",
    "create_collate_fn",
    "create_dataloader",
    "create_dataset",
]
