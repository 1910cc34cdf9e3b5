"""Which checkpoint an evaluation loads: an argument of ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from helios.checkpoint.options import KeepBest
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.early_stopping import EarlyStopping
from helios.plugins.plugin import Plugin
from helios.startup.options.checkpoint_options import CheckpointOptions

Choice: TypeAlias = Literal["best", "newest"] | str | Path | None
"""``"best"``, ``"newest"``, a file, or ``None`` for the newest one if there is any."""


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint an evaluation loads.

    Attributes:
        path: this file; ``None`` for one in the run's folder.
        rule: the best one by this score; ``None`` for the newest.
        is_required: whether it is an error if there is none.
    """

    path: Path | None = None
    rule: KeepBest | None = None
    is_required: bool = False


def choose_checkpoint(
    asked: Choice, options: CheckpointOptions, plugins: Iterable[Plugin], *, has_fitted: bool
) -> CheckpointChoice:
    """Return what the argument means.

    Args:
        asked: the argument.
        options: where checkpoints are, and how they are kept.
        plugins: those of the trainer.
        has_fitted: whether the trainer has trained: its newest checkpoint comes from
            ``resume=<path>`` then, otherwise that file itself is meant.

    Raises:
        ArgumentTypeError: if it is neither a string nor a path.
        ArgumentError: if there is no folder to look in, or no score that decides.
    """
    if asked is None and isinstance(options.resume, Path) and not has_fitted:
        asked = options.resume
    if asked is None:
        return CheckpointChoice()
    if not isinstance(asked, str | Path):
        raise ArgumentTypeError(
            f'Trainer.test(checkpoint=...) must be "best", "newest" or a file, got {asked!r}. Omit '
            "it for the newest one."
        )
    if asked not in ("best", "newest"):
        return CheckpointChoice(Path(asked), is_required=True)
    if options.chkpt_root is None:
        raise ArgumentError(
            f"Trainer.test(checkpoint={asked!r}) must be used with a folder of checkpoints, got "
            "none. Pass Trainer(chkpt_root=...), or the path of a file."
        )
    rule = find_monitored(options, plugins) if asked == "best" else None
    if asked == "best" and rule is None:
        raise ArgumentError(
            'Trainer.test(checkpoint="best") must be used with one score that decides, got none, '
            'or several. Pass Trainer(store=CheckpointStore(keep_best=KeepBest(1, "loss", '
            'mode="min"))), as for the training.'
        )
    return CheckpointChoice(rule=rule, is_required=True)


def find_monitored(options: CheckpointOptions, plugins: Iterable[Plugin]) -> KeepBest | None:
    """Return the score that decides which checkpoint is the best, and how.

    That is the one of ``KeepBest``, or else of ``EarlyStopping``; ``None`` if there is neither, or
    if several plugins watch different scores.
    """
    if options.store is not None and options.store.keep_best is not None:
        return options.store.keep_best
    watched = {each.monitored for each in plugins if isinstance(each, EarlyStopping)}
    if len(watched) != 1:
        return None
    ((metric, mode),) = watched
    return KeepBest(1, metric, mode)
