"""How checkpoints are written and kept: the options of ``Trainer(store=...)``.

The retention rules combine: a checkpoint is kept if any rule keeps it, and without rules all are
kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from helios.best import BestRule, Mode, check_mode
from helios.errors import ArgumentError, UsageError

_ON_SAVE_ERROR = ("continue", "raise")
_FROZEN = ("save", "reference")


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keep the best checkpoints by a validation score: ``CheckpointStore(keep_best=...)``.

    A validation that enters the ``count`` best of the run saves a checkpoint at its safe point,
    whatever ``chkpt_frequency`` says; without a ``chkpt_frequency`` nothing is saved. A checkpoint
    without a validation of its own, or with a score that is not finite, is never among the best; of
    two with the same score the earlier one counts as better. A validation of a training that does
    not compute the score ends the training with a ``UsageError``.

    Attributes:
        count: how many to keep.
        metric: name of the score in the model's ``val_scores``.
        mode: ``"min"`` if small scores are good, ``"max"`` if large ones are; required.

    Raises:
        ArgumentError: if a value is out of range.
    """

    count: int
    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        if not _is_count(self.count):
            raise _fail("KeepBest", "count", "a positive int", self.count, "Pass e.g. 3.")
        if not isinstance(self.metric, str) or not self.metric:
            remedy = "Pass a name that valid_step returns."
            raise _fail("KeepBest", "metric", "the name of a score", self.metric, remedy)
        check_mode(self.mode, "KeepBest")

    @property
    def rule(self) -> BestRule:
        """What decides which validations are the best."""
        return BestRule(self.metric, self.mode, self.count, saves=True)

    def check_scores(self, scores: Mapping[str, float]) -> None:
        """Check that a validation has computed the score.

        Args:
            scores: those that are single numbers, by name.

        Raises:
            UsageError: if it is not among them.
        """
        if self.metric not in scores:
            names = ", ".join(sorted(scores)) or "none"
            raise UsageError(
                f"KeepBest(metric={self.metric!r}) must name a validation score that is a single "
                f"number; there are {names}. Correct the name, or log the score in valid_step: "
                "self.log(name, value)."
            )


@dataclasses.dataclass(frozen=True)
class CheckpointStore:
    """How checkpoints are written and kept: ``Trainer(store=CheckpointStore(...))``.

    Attributes:
        is_async: write in a thread, from a copy of the state, while training continues; if False,
            training waits until the file is on the disk.
        keep_last: number of newest checkpoints to keep; ``None`` for no such rule.
        keep_every: keep checkpoints whose number of completed units (epochs or steps, by
            ``train_unit``) is a multiple of this; ``None`` for no such rule.
        keep_best: keep the best ones by a validation score; ``None`` for no such rule.
        digest: verify the bytes of a checkpoint with SHA-256 when it is loaded.
        on_save_error: what to do if a save fails: ``"continue"`` keeps training, tries again at
            the next due save, and raises at the end if no later save succeeded; ``"raise"`` ends
            the training at the next safe point.
        max_plain_bytes: maximum number of bytes of plain values (numbers, lists, arrays and tensors
            outside modules) in a checkpoint; values beyond that are reported, and the checkpoint is
            incomplete.
        frozen: ``"reference"`` leaves out of checkpoints what is frozen and unchanged since
            ``setup``, and stores its digest: each start must make the same, which it proves.

    Raises:
        ArgumentError: if a value is out of range.
    """

    is_async: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    digest: bool = True
    on_save_error: str = "continue"
    max_plain_bytes: int = 64 * 2**20
    frozen: str = "save"

    def __post_init__(self) -> None:
        name = "CheckpointStore"
        for flag in ("is_async", "digest"):
            value = getattr(self, flag)
            if not isinstance(value, bool):
                raise _fail(name, flag, "True or False", value, "Pass a bool.")
        for rule in ("keep_last", "keep_every"):
            value = getattr(self, rule)
            if value is not None and not _is_count(value):
                remedy = "None disables the rule; without any rule all checkpoints are kept."
                raise _fail(name, rule, "None or a positive int", value, remedy)
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            remedy = 'Pass e.g. KeepBest(3, "accuracy").'
            raise _fail(name, "keep_best", "None or a KeepBest", self.keep_best, remedy)
        if self.on_save_error not in _ON_SAVE_ERROR:
            remedy = "Omit it to continue training."
            raise _fail(name, "on_save_error", '"continue" or "raise"', self.on_save_error, remedy)
        if self.frozen not in _FROZEN:
            remedy = "Omit it to save everything."
            raise _fail(name, "frozen", '"save" or "reference"', self.frozen, remedy)
        if type(self.max_plain_bytes) is not int or self.max_plain_bytes < 0:
            remedy = "Pass e.g. 256 * 2**20; 0 saves no plain values."
            value = self.max_plain_bytes
            raise _fail(name, "max_plain_bytes", "a non-negative int", value, remedy)

    @property
    def keeps_all(self) -> bool:
        """Whether there is no retention rule."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _fail(owner: str, name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"{owner}({name}=...) must be {rule}, got {value!r}. {remedy}")
