"""The best validations of a run before a start: those of its checkpoint, or of its score file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helios.ledger.timing as timing
from helios.best import BestRule, BestSoFar, Validation
from helios.errors import LedgerError
from helios.replicas.replicas import Replicas
from helios.startup.launching.on_all_ranks import on_first

_LOGGER = logging.getLogger(__name__)


def continue_best(
    stored: Mapping[str, Any] | None,
    rule: BestRule | None,
    *,
    after: int,
    folder: Path | None,
    replicas: Replicas,
) -> BestSoFar:
    """Return the best validations before a start, by the rule of this start.

    The checkpoint has them, so that those which a rewind undid are forgotten. Under another rule
    they are found again in the scores that the run has written.

    Args:
        stored: what the checkpoint says; ``None`` if an earlier version wrote it.
        rule: what decides in this start; ``None`` if nothing does.
        after: the iteration of the checkpoint.
        folder: the run's folder; ``None`` if its files are not those of this run.
        replicas: the processes; rank 0 reads.
    """
    if rule is None:
        return BestSoFar()
    before = BestSoFar() if stored is None else BestSoFar.from_plain(stored)
    former = before.rule
    is_alike = former is not None and former.is_alike(rule)
    if former is not None and is_alike and rule.count <= former.count:
        return BestSoFar(rule, before.validations[: rule.count], before.since)
    if stored is not None and not is_alike:
        _LOGGER.info(
            "From here on %s decides which validation is the best; before, %s did.",
            rule,
            former or "nothing",
        )
    found = BestSoFar(rule)
    found.since, validations = on_first(replicas, lambda: _read_scores(folder, after))
    for validation, has_improved in validations:
        found.judge(validation, has_improved=has_improved)
    return found


def _read_scores(folder: Path | None, after: int) -> tuple[int, list[tuple[Validation, bool]]]:
    """Return the iteration after which validations are known, and those until a checkpoint."""
    if folder is None:
        return after, []
    try:
        found = timing.read_timing(folder)
        validations = [
            (
                Validation(line["iteration"], line["scores"], line.get("step")),
                bool(line.get("improved")),
            )
            for line in found.scores
            if line["iteration"] <= after
        ]
    except (LedgerError, TypeError):
        # A file that somebody has edited is as good as none.
        return after, []
    return (found.starts[0]["iteration"] if found.starts else after), validations
