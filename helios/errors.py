"""Every error that Helios raises on purpose.

Each class is also the built-in exception that users of the historical API expect, so that
``except ValueError`` keeps working. A message names the thing, the rule, the value and a remedy::

    HeliosError
    ├── ArgumentError (ValueError)            an argument breaks a documented rule
    ├── ArgumentTypeError (TypeError)         an argument has the wrong type
    ├── DuplicateError (KeyError)             a name is taken already
    ├── UsageError (RuntimeError)             a call or a result that the contract forbids
    │   └── LossNotProvidedError              a step that needs a loss gave none
    ├── MovedModuleError (ModuleNotFoundError) a module of helios-ml that something else replaces
    ├── RankError (RuntimeError)              another process of the training failed, or ended
    ├── SaveError (OSError)                   the disk refused the last checkpoint of a run
    ├── StateError (RuntimeError)             state that cannot be saved, is missing or left over
    └── CheckpointError (RuntimeError)        a checkpoint that cannot be used
        ├── DamagedCheckpointError            its bytes or its sidecar are not what was written
        ├── FolderInUseError                  another run is writing to the folder
        ├── IncompatibleCheckpointError       it is sound, but of another format or version
        └── RunMismatchError                  it belongs to another run, or the run was changed
"""

from __future__ import annotations


class HeliosError(Exception):
    """Base of every error that Helios raises on purpose."""


class ArgumentError(HeliosError, ValueError):
    """An argument breaks a documented rule."""


class ArgumentTypeError(HeliosError, TypeError):
    """An argument has a type that the contract does not accept."""


class DuplicateError(HeliosError, KeyError):
    """A name that must be unique is taken already."""

    def __str__(self) -> str:
        """Return the message itself; ``KeyError`` would show it in quotes."""
        return str(self.args[0])


class UsageError(HeliosError, RuntimeError):
    """User code did something, or returned something, that the contract forbids."""


class LossNotProvidedError(UsageError):
    """A training step gave no loss, and backward was needed (R29)."""


class MovedModuleError(HeliosError, ModuleNotFoundError):
    """A module of helios-ml was imported, and something else has taken its place."""


class RankError(HeliosError, RuntimeError):
    """Another process of the training failed, or ended without a word."""


class SaveError(HeliosError, OSError):
    """The disk refused a checkpoint, and no later one was saved."""


class StateError(HeliosError, RuntimeError):
    """A part of the training state cannot be saved, is missing or is left over."""


class CheckpointError(HeliosError, RuntimeError):
    """A checkpoint cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """The bytes of a checkpoint or of its sidecar are not those that were written."""


class FolderInUseError(CheckpointError):
    """Another run is writing to the folder of checkpoints."""


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint is sound, but its format is newer than this version or not migrated."""


class RunMismatchError(CheckpointError):
    """A checkpoint belongs to another run, or what defines the run was changed."""
