"""Which checkpoint an evaluation loads: an argument of ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from helios.best import BestRule
from helios.errors import ArgumentError, ArgumentTypeError
from helios.plugins.plugin import Plugin
from helios.startup.options.best_rule import find_declared_rule, require_one_mode
from helios.startup.options.checkpoint_options import CheckpointOptions
from helios.storage.local_paths import as_local_path

Choice: TypeAlias = Literal["best", "newest"] | str | Path | None
"""``"best"``, ``"newest"``, a file, or ``None`` for the newest one if there is any."""


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint an evaluation loads.

    Attributes:
        path: this file; ``None`` for one in the run's folder.
        is_best: whether it is the best one, or else the newest.
        rule: what decides which one is the best; ``None`` for what the run was trained with.
        is_required: whether it is an error if there is none.
    """

    path: Path | None = None
    is_best: bool = False
    rule: BestRule | None = None
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
        ArgumentError: for a URL, if there is no folder to look in, or for two modes of one score.
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
        path = as_local_path("Trainer.test(checkpoint=...)", asked)
        return CheckpointChoice(path, is_required=True)
    if options.chkpt_root is None:
        raise ArgumentError(
            f"Trainer.test(checkpoint={asked!r}) must be used with a folder of checkpoints, got "
            "none. Pass Trainer(chkpt_root=...), or the path of a file."
        )
    if asked == "newest":
        return CheckpointChoice(is_required=True)
    plugins = list(plugins)
    require_one_mode(options, plugins)
    rule = find_declared_rule(options, plugins)
    return CheckpointChoice(is_best=True, rule=rule, is_required=True)
