"""The exceptions that Helios raises.

Each class also derives from the built-in exception that callers expect, so ``except ValueError``
works. A message says what was wrong, what was found and what to do::

    HeliosError
    ├── ArgumentError (ValueError)            an argument has an invalid value
    ├── ArgumentTypeError (TypeError)         an argument has the wrong type
    ├── DuplicateError (KeyError)             a name is already in use
    ├── UsageError (RuntimeError)             an invalid call, or an invalid result of user code
    │   └── LossNotProvidedError              a step returned no loss, but one is needed
    ├── LedgerError (RuntimeError)            a ledger is missing, damaged or of another format
    ├── ReadOnlyError (AttributeError)        an assignment to a read-only object
    ├── RankError (RuntimeError)              another process of the run failed or exited
    ├── SaveError (OSError)                   the last checkpoint of a run could not be written
    ├── StateError (RuntimeError)             state that cannot be saved, is missing or unexpected
    ├── WorkerError (RuntimeError)            a worker of a loader does not start, or dies
    └── CheckpointError (RuntimeError)        a checkpoint cannot be used
        ├── DamagedCheckpointError            its file or its sidecar is damaged
        ├── FolderInUseError                  another run is writing to the folder
        ├── IncompatibleCheckpointError       it is intact, but of another format or version
        └── RunMismatchError                  it belongs to another run, or the run was changed

    Interrupted (SystemExit)                  a signal or a time limit has ended a call
"""

from __future__ import annotations


class HeliosError(Exception):
    """Base class of the exceptions of this module."""


class ArgumentError(HeliosError, ValueError):
    """An argument has an invalid value."""


class ArgumentTypeError(HeliosError, TypeError):
    """An argument has the wrong type."""


class DuplicateError(HeliosError, KeyError):
    """A name that must be unique is already in use."""

    def __str__(self) -> str:
        """Return the message; ``KeyError`` would return its repr."""
        return str(self.args[0])


class UsageError(HeliosError, RuntimeError):
    """User code made an invalid call, or returned an invalid result."""


class LossNotProvidedError(UsageError):
    """A training step returned no loss, but backward needs one."""


class LedgerError(HeliosError, RuntimeError):
    """A ledger is missing, damaged or of another format."""


class ReadOnlyError(HeliosError, AttributeError):
    """Something was assigned to a read-only object, such as the context of hooks."""


class RankError(HeliosError, RuntimeError):
    """Another process of the run failed, or exited unexpectedly."""


class SaveError(HeliosError, OSError):
    """A checkpoint could not be written, and no later one was saved."""


class StateError(HeliosError, RuntimeError):
    """A part of the state of the run cannot be saved, is missing or is unexpected."""


class WorkerError(HeliosError, RuntimeError):
    """A worker of a loader does not start, or dies repeatedly."""


class CheckpointError(HeliosError, RuntimeError):
    """A checkpoint cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint or its sidecar is damaged: it differs from what was written."""


class FolderInUseError(CheckpointError):
    """Another run is writing to the checkpoint folder."""


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint is intact, but newer than this version of Helios, or not migrated yet."""


class RunMismatchError(CheckpointError):
    """A checkpoint belongs to another run, or an option that defines the run was changed."""


class Interrupted(SystemExit):
    """A signal or a time limit has ended a call of the trainer early.

    It ends the script, with the exit code of the trainer. In an interactive session, a
    ``KeyboardInterrupt`` is raised instead.

    Attributes:
        code: 75 if the same command would resume from a checkpoint; otherwise 128 plus the number
            of the signal, such as 130 for SIGINT, or 1 without a signal.
        reason: why the call ended.
    """

    code: int

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code)
        self.reason = reason
