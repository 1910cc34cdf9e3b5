"""Positions in, batches out: samplers, keyed loaders and data modules.

Nothing here may know a model, a checkpoint or a loop.
"""

from helios.data.datamodule import DataModule, DatasetSplit
from helios.data.loader import (
    COLLATE_FN_REGISTRY,
    DATASET_REGISTRY,
    create_collate_fn,
    create_dataloader,
    create_dataset,
)
from helios.data.params import DataLoaderParams

__all__ = [
    "COLLATE_FN_REGISTRY",
    "DATASET_REGISTRY",
    "DataLoaderParams",
    "DataModule",
    "DatasetSplit",
    "create_collate_fn",
    "create_dataloader",
    "create_dataset",
]
