"""Helios trains PyTorch models so that a killed run, started again, gives the same bits."""

from helios.checkpoint.options import KeepBest
from helios.checkpoint.retention import find_best_checkpoint
from helios.checkpoint.store import CheckpointStore, load_checkpoint
from helios.data.datamodule import DataLoaderParams, DataModule
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuditError,
    CheckpointError,
    DamagedCheckpointError,
    DuplicateError,
    FolderInUseError,
    HeliosError,
    IncompatibleCheckpointError,
    LossNotProvidedError,
    MovedModuleError,
    RankError,
    RunMismatchError,
    SaveError,
    StateError,
    UsageError,
)
from helios.hooks.context import Context
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.startup.building.warm_start import load_weights
from helios.startup.options.audit_options import Audit
from helios.startup.runs.signal_policy import Signals
from helios.state import Phase, TrainingState, TrainingUnit
from helios.trainer import Trainer, find_last_checkpoint
from helios.version import __version__

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Audit",
    "AuditError",
    "CheckpointError",
    "CheckpointStore",
    "Context",
    "DamagedCheckpointError",
    "DataLoaderParams",
    "DataModule",
    "DuplicateError",
    "Engine",
    "FolderInUseError",
    "HeliosError",
    "IncompatibleCheckpointError",
    "KeepBest",
    "LossNotProvidedError",
    "Model",
    "MovedModuleError",
    "Phase",
    "Plugin",
    "Precision",
    "RankError",
    "RunMismatchError",
    "SaveError",
    "Signals",
    "StateError",
    "Trainer",
    "TrainingState",
    "TrainingUnit",
    "UsageError",
    "__version__",
    "find_best_checkpoint",
    "find_last_checkpoint",
    "load_checkpoint",
    "load_weights",
]
