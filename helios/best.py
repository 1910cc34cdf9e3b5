"""The best validation of a run: the rule, the order of scores, and the best so far.

Everything that names a best validation or checkpoint uses this module. The best score is the best
finite one as the validation computed it, the earlier one at a tie, never NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from helios.errors import ArgumentError
from helios.text import number_text, with_step

Mode: TypeAlias = Literal["min", "max"]
Item = TypeVar("Item")


class Scores(dict[str, float]):
    """The scores of an evaluation that are single numbers, by name; always true, even if empty."""

    def __bool__(self) -> bool:
        """Return True: ``assert trainer.test(...)`` holds, as in helios-ml."""
        return True


def is_better(score: float, than: float | None, mode: Mode) -> bool:
    """Return whether a score is finite, and better than the other, which may be ``None``."""
    if not math.isfinite(score):
        return False
    return than is None or (score < than if mode == "min" else score > than)


def rank_by_score(scored: Iterable[tuple[float, Item]], mode: Mode) -> list[Item]:
    """Return the items with a finite score, the best first; of equal ones the earlier one first."""
    finite = [(score, item) for score, item in scored if math.isfinite(score)]
    sign = 1 if mode == "min" else -1
    return [item for _, item in sorted(finite, key=lambda pair: sign * pair[0])]


def check_mode(mode: object, owner: str) -> None:
    """Check that a mode is ``"min"`` or ``"max"``; there is no default.

    Args:
        mode: what was passed.
        owner: what was called, for the message.

    Raises:
        ArgumentError: for anything but the two modes.
    """
    if mode not in ("min", "max"):
        raise ArgumentError(
            f'{owner}(mode=...) must be "min" if small scores are good, or "max" if large ones '
            f"are, got {mode!r}."
        )


@dataclass(frozen=True)
class BestRule:
    """The rule that decides which validations of a run are the best.

    Attributes:
        metric: name of the score; ``None`` if the model's ``have_metrics_improved`` decides.
        mode: whether small or large scores are good; ``None`` without a metric.
        count: how many best ones there are.
        saves: whether a validation that is one of them saves a checkpoint.
    """

    metric: str | None = None
    mode: Mode | None = None
    count: int = 1
    saves: bool = False

    def __str__(self) -> str:
        return "have_metrics_improved" if self.metric is None else f"{self.metric} ({self.mode})"

    def is_alike(self, other: BestRule | BestValidation) -> bool:
        """Return whether both judge by the same score, in the same way."""
        return (self.metric, self.mode) == (other.metric, other.mode)


@dataclass(frozen=True)
class Validation:
    """A validation in a training run.

    Attributes:
        iteration: after which iteration it took place.
        scores: those that are single numbers, by name.
        step: how many optimizer steps were made by then; ``None`` if unknown.
    """

    iteration: int
    scores: Mapping[str, float]
    step: int | None = None


@dataclass(frozen=True)
class BestValidation:
    """The best validation of a run, as files and readers have it.

    Attributes:
        metric: as in :class:`BestRule`.
        mode: as in :class:`BestRule`.
        iteration: after which iteration it took place.
        scores: its scores, by name.
        since: earlier validations than after this iteration are unknown; 0 if all are known.
        step: as in :class:`Validation`.
    """

    metric: str | None
    mode: Mode | None
    iteration: int
    scores: Mapping[str, float]
    since: int = 0
    step: int | None = None

    @classmethod
    def from_plain(cls, plain: Any) -> BestValidation | None:
        """Return what was written as JSON; ``None`` for anything else."""
        try:
            scores = {name: float(score) for name, score in plain["scores"].items()}
            return cls(**plain | {"scores": scores})
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def __str__(self) -> str:
        scores = ", ".join(f"{name} {number_text(score)}" for name, score in self.deciding.items())
        since = f", of those since iteration {self.since}" if self.since else ""
        return f"{scores} (iteration {with_step(self.iteration, self.step)}{since})"

    @property
    def rule(self) -> BestRule:
        """The rule, without a count."""
        return BestRule(self.metric, self.mode)

    @property
    def deciding(self) -> dict[str, float]:
        """The score that decides; all scores if the model decides."""
        if self.metric is None:
            return dict(self.scores)
        return {self.metric: self.scores[self.metric]}


@dataclass
class BestSoFar:
    """The best validations of a run so far.

    Attributes:
        rule: what decides; ``None`` if nothing does, and no validation is the best.
        validations: the best ones, the best first; at most ``rule.count``.
        since: earlier validations than after this iteration are unknown; 0 if all are known.
    """

    rule: BestRule | None = None
    validations: list[Validation] = field(default_factory=list)
    since: int = 0

    def judge(self, validation: Validation, *, has_improved: bool) -> bool:
        """Add a validation, if it is one of the best; returns whether it is.

        Args:
            validation: the newest one.
            has_improved: what ``Model.have_metrics_improved`` returned.
        """
        rule = self.rule
        if rule is None:
            return False
        if rule.metric is None or rule.mode is None:
            self.validations = [validation] if has_improved else self.validations
            return has_improved
        scored = [
            (each.scores.get(rule.metric, math.nan), each)
            for each in (*self.validations, validation)
        ]
        self.validations = rank_by_score(scored, rule.mode)[: rule.count]
        return any(each is validation for each in self.validations)

    @property
    def best(self) -> BestValidation | None:
        """The best one; ``None`` if there is none."""
        if self.rule is None or not self.validations:
            return None
        first = self.validations[0]
        metric, mode = self.rule.metric, self.rule.mode
        return BestValidation(metric, mode, **vars(first), since=self.since)

    def as_plain(self) -> dict[str, Any]:
        """Return the content as plain values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BestSoFar:
        """Return what :meth:`as_plain` returned."""
        rule = plain["rule"]
        validations = [Validation(**each) for each in plain["validations"]]
        return cls(None if rule is None else BestRule(**rule), validations, plain["since"])
