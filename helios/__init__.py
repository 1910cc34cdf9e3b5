"""Helios trains PyTorch models so that a killed run, started again, gives the same bits."""

import importlib
from typing import TYPE_CHECKING

from helios.version import __version__

if TYPE_CHECKING:
    from helios.exports import *
else:
    # To import PyTorch takes seconds, for which `helios --help` would wait.
    def __getattr__(name: str) -> object:
        names = globals()
        # Probes of other libraries for special attributes must not import PyTorch.
        if not name.startswith("__"):
            found = vars(importlib.import_module("helios.exports"))
            # While that module is being imported, it has only a part of the names.
            names.update({known: found[known] for known in __all__ if known in found})
            if name in names:
                return names[name]
        raise AttributeError(f"module 'helios' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
