"""The rules by which Helios computes what surrounds a training, as each run has begun with them.

Rules are no arguments: a new run has all of them, and its checkpoints name them. A run that an
earlier version began is told once, at its next start, which ones hold from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LOGGER = logging.getLogger(__name__)
KEY = "rules"
"""The entry of the options of a checkpoint that holds the rules."""


@dataclass(frozen=True)
class Rule:
    """A rule that earlier versions did not have.

    Attributes:
        name: its name in checkpoints.
        news: what changes in a run that began without it, as a clause for the log; if it is kept
            out, what stays as it was.
        is_kept_out: whether such a run stays without it, because its bits would change.
    """

    name: str
    news: str
    is_kept_out: bool = False


NUMPY_GLOBAL = "numpy_global"
"""The rule that keys seed NumPy's global generator, too."""
LATE_OPENING = "late_opening"
"""The rule that an epoch's data is opened, and its workers start, after the hooks before it."""

RULES = (
    Rule(
        "exact_totals",
        "totals of scores and losses are added in float64, the scores of a batch processor weigh "
        "each batch by its samples, and training metrics leave out the padding of an epoch",
    ),
    Rule(
        "one_best",
        "the best validation is the one with the best finite score, the earlier one at a tie, and "
        "one that enters the best of KeepBest is saved, whatever chkpt_frequency says",
    ),
    Rule(
        "mean_losses",
        "training losses that are logged and shown are means over the iterations since they were "
        "logged or shown before, no longer those of one iteration",
    ),
    Rule(
        "compared_values",
        "declared parameters, arguments of constructors and settings of optimizers are compared "
        "(unknown before iteration {place})",
    ),
    Rule(
        NUMPY_GLOBAL,
        "NumPy's global generator (numpy.random) is neither seeded nor saved",
        is_kept_out=True,
    ),
    Rule(
        LATE_OPENING,
        "the order of an epoch is fixed, and its loader workers start, before "
        "on_training_epoch_start",
        is_kept_out=True,
    ),
)


def adopt_rules(options: Mapping[str, Any] | None, *, place: str = "0") -> dict[str, bool]:
    """Return which rules hold in a run, by name, and log once what is new in one under way.

    Args:
        options: those of the checkpoint that the run continues from; ``None`` for a new run.
        place: the iteration of that checkpoint, as messages have it.
    """
    fresh = [] if options is None else _fresh_rules(options)
    sentences = []
    for begin, is_kept_out in (("From here on", False), ("As before", True)):
        rules = [rule for rule in fresh if rule.is_kept_out is is_kept_out]
        if rules:
            news = "; ".join(rule.news.format(place=place) for rule in rules)
            sentences.append(f"{begin}: {news}.")
    if sentences:
        _LOGGER.info("An earlier version of Helios began this run. %s", " ".join(sentences))
    return find_rules(options)


def find_rules(options: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return which rules hold in a run, by name.

    Args:
        options: those of one of its checkpoints; ``None`` for a new run.
    """
    if options is None:
        return {rule.name: True for rule in RULES}
    fresh = {rule.name: not rule.is_kept_out for rule in _fresh_rules(options)}
    return {**options.get(KEY, {}), **fresh}


def _fresh_rules(options: Mapping[str, Any]) -> list[Rule]:
    return [rule for rule in RULES if rule.name not in options.get(KEY, {})]
