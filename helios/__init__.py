"""Helios trains PyTorch models so that a killed run, started again, gives the same bits."""

from typing import TYPE_CHECKING

from helios.version import __version__

if TYPE_CHECKING:
    from helios.exports import *
else:
    from helios.deferred import defer

    __getattr__, __dir__ = defer(__name__)

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
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
    "Interrupted",
    "KeepBest",
    "LossNotProvidedError",
    "Model",
    "Phase",
    "Plugin",
    "Precision",
    "RankError",
    "ReadOnlyError",
    "RunMismatchError",
    "SaveError",
    "Scores",
    "Signals",
    "StateError",
    "Trainer",
    "TrainingState",
    "TrainingUnit",
    "Unit",
    "UsageError",
    "WeightedLoss",
    "__version__",
    "find_best_checkpoint",
    "find_last_checkpoint",
    "load_checkpoint",
    "load_weights",
    "run",
]
