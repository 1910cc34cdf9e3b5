"""Options of checkpoints: where they are, how they are kept, and which one a run resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from helios.checkpoint.store import CheckpointStore
from helios.startup.options.validators import as_folder, check_count, refusal
from helios.storage.local_paths import as_local_path

Change: TypeAlias = Literal[
    "dataset",
    "length",
    "batch_size",
    "shuffle",
    "drop_last",
    "seed",
    "sampler",
    "random_seed",
    "seeds",
    "train_unit",
    "accumulation_steps",
    "accumulation_order",
    "norm",
    "init",
    "limit_batches",
    "is_distributed",
    "mixture",
    "precision",
    "command",
    "program",
    "options",
    "versions",
    "libraries",
    "environment",
    "switches",
    "data",
    "parameters",
    "code",
    "params",
    "optimizer",
]
CHANGEABLE: tuple[str, ...] = get_args(Change)
"""What ``allow_changes`` may name, besides single parameters."""

PARAMS = "params."
"""What stands before the name of a parameter in ``allow_changes``."""


def allows(allowed: str, param: str) -> bool:
    """Whether a name in ``allow_changes`` allows another value of a parameter, or of its group."""
    return f"{PARAMS}{param}.".startswith(f"{allowed}.")


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints are, and which one is resumed; see ``Trainer`` for each field.

    Attributes:
        chkpt_root: a ``Path`` once checked, if any.
        resume: ``"auto"``, ``"never"`` or a ``Path``.
        skip_batches: different iterations in ascending order, once checked.
    """

    chkpt_root: Any
    chkpt_frequency: int | None
    store: CheckpointStore | None
    resume: Any
    allow_changes: Sequence[str]
    on_incomplete: str
    ledger: str
    reproducibility: str
    rewind_to: int | None = None
    skip_batches: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chkpt_root", as_folder("chkpt_root", self.chkpt_root))
        if self.chkpt_frequency is not None and self.chkpt_root is None:
            rule = "a folder with chkpt_frequency set"
            raise refusal("chkpt_root", rule, None, "Pass chkpt_root=Path(...).")
        if self.resume not in ("auto", "never"):
            self._check_path()
        if self.on_incomplete not in ("warn", "raise"):
            rule = '"warn" or "raise"'
            raise refusal("on_incomplete", rule, self.on_incomplete, "Omit it for a warning.")
        if self.ledger not in ("steps", "full", "off"):
            rule = '"steps", "full" or "off"'
            raise refusal("ledger", rule, self.ledger, "Omit it for a line per iteration.")
        if self.reproducibility not in ("warn", "strict"):
            rule = '"warn" or "strict"'
            raise refusal("reproducibility", rule, self.reproducibility, "Omit it for a warning.")
        if self.reproducibility == "strict" and self.ledger == "off":
            rule = '"warn" with ledger="off": without evidence there is nothing to compare with'
            raise refusal("reproducibility", rule, "strict", "Omit ledger.")
        object.__setattr__(self, "skip_batches", _as_iterations(self.skip_batches))
        self._check_rewind()
        object.__setattr__(self, "allow_changes", _as_changes(self.allow_changes))
        if self.store is not None and not isinstance(self.store, CheckpointStore):
            raise refusal("store", "a CheckpointStore", self.store, "Pass CheckpointStore(...).")

    def _check_path(self) -> None:
        if not isinstance(self.resume, str | Path):
            rule = '"auto", "never" or a path'
            raise refusal("resume", rule, self.resume, "Omit it to resume.")
        object.__setattr__(self, "resume", as_local_path("Trainer(resume=...)", self.resume))
        if self.chkpt_root is None:
            rule = "a folder with resume=<path>"
            raise refusal("chkpt_root", rule, None, "Pass the folder for new checkpoints.")

    def _check_rewind(self) -> None:
        check_count("rewind_to", self.rewind_to)
        if self.rewind_to is None:
            if self.skip_batches:
                remedy = "Pass rewind_to=..., an iteration before them."
                raise refusal("skip_batches", "empty without rewind_to", self.skip_batches, remedy)
            return
        if not self.can_save:
            rule, remedy = "None for a run without checkpoints", "Set chkpt_root, chkpt_frequency."
            raise refusal("rewind_to", rule, self.rewind_to, remedy)
        if self.resume != "auto":
            rule = f"None with resume={str(self.resume)!r}"
            raise refusal("rewind_to", rule, self.rewind_to, "Omit one of them.")
        if self.skip_batches and self.ledger == "off":
            rule = 'empty with ledger="off": the ledger says which batches they are'
            raise refusal("skip_batches", rule, self.skip_batches, "Omit ledger.")

    @property
    def writes_ledger(self) -> bool:
        """Whether checkpoints are written, and a ledger beside them."""
        return self.can_save and self.ledger != "off"

    @property
    def uses_store(self) -> bool:
        """Whether ``store`` has an effect: on saves, or on which checkpoint is the best one."""
        is_rule = self.store is not None and self.store.keep_best is not None
        return self.can_save or (self.chkpt_root is not None and is_rule)

    @property
    def can_save(self) -> bool:
        """Whether checkpoints are written: both a folder and a frequency are set."""
        return self.chkpt_root is not None and self.chkpt_frequency is not None


def _as_iterations(given: Any) -> tuple[int, ...]:
    is_series = isinstance(given, list | tuple | set | frozenset | range)
    if not is_series or not all(type(each) is int and each > 0 for each in given):
        rule = "a tuple of positive ints"
        raise refusal("skip_batches", rule, given, "Pass iterations, such as (812, 813).")
    return tuple(sorted(set(given)))


def _as_changes(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset):
        rule = "a tuple of names"
        raise refusal("allow_changes", rule, given, "Omit it for none.")
    unknown = [
        name
        for name in names
        if name not in CHANGEABLE and not (isinstance(name, str) and name.startswith(PARAMS))
    ]
    if unknown:
        rule = f"names among {', '.join(CHANGEABLE)}, or such as params.lr"
        raise refusal("allow_changes", rule, unknown, "Correct the names.")
    return tuple(names)
