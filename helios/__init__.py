"""Helios trains PyTorch models so that a killed run, started again, gives the same bits."""

from helios.checkpoint.options import KeepBest
from helios.checkpoint.store import CheckpointStore, load_checkpoint
from helios.data.datamodule import DataLoaderParams, DataModule
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.startup.signals import Signals
from helios.startup.weights import load_weights
from helios.state import Phase, TrainingState, TrainingUnit
from helios.trainer import Trainer, find_last_checkpoint
from helios.version import __version__

__all__ = [
    "CheckpointStore",
    "DataLoaderParams",
    "DataModule",
    "KeepBest",
    "Model",
    "Phase",
    "Plugin",
    "Signals",
    "Trainer",
    "TrainingState",
    "TrainingUnit",
    "__version__",
    "find_last_checkpoint",
    "load_checkpoint",
    "load_weights",
]
