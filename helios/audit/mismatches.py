"""What an audit says of a gradient that differs when it is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helios.audit.audit_turns import AuditTurn
from helios.audit.gradient_copies import GradientCopy, GradientMismatch


@dataclass(frozen=True)
class Finding:
    """What the process that has computed a gradient again has found.

    Attributes:
        difference: where the gradients differ; ``None`` if they do not.
        digest: of the gradients that it has computed, if they differ.
        left: what the second computation has changed and could not be put back.
    """

    difference: GradientMismatch | None
    digest: str
    left: Sequence[str]

    @classmethod
    def of(cls, first: GradientCopy, second: GradientCopy, left: Sequence[str]) -> Finding:
        """Compare the gradients of two computations."""
        difference = first.difference(second)
        return cls(difference, "" if difference is None else second.digest(), left)


def describe_mismatch(
    difference: GradientMismatch,
    turn: AuditTurn,
    *,
    iteration: int,
    step: int,
    places: Sequence[str],
    verdict: str,
) -> str:
    """Return what is said of a mismatch.

    Args:
        difference: where the gradients differ.
        turn: who has computed them.
        iteration: the iteration, from 1.
        step: the optimizer step, from 1.
        places: host and device of each process, by rank.
        verdict: what a third computation says.
    """
    name = difference.parameter
    where = name if not difference.place else f"{name}{list(difference.place)}"
    first, second = (f"rank {rank} ({places[rank]})" for rank in (turn.owner, turn.auditor))
    return (
        f"Iteration {iteration}, step {step}: the gradient of replica {turn.replica} differs when "
        f"it is computed a second time from the same weights, batch and random numbers. {where}: "
        f"{difference.values[0]} on {first}, then {difference.values[1]} on {second}; "
        f"{_count(difference)}. {verdict}"
    )


def _count(difference: GradientMismatch) -> str:
    elements, parameters = difference.num_elements, difference.num_parameters
    texts = []
    if elements:
        texts.append("1 element differs" if elements == 1 else f"{elements} elements differ")
    if parameters > 1:
        texts.append(f"{parameters} parameters are affected")
    return ", ".join(texts) or "the forms differ"


def describe_verdict(
    turn: AuditTurn, digests: tuple[str, str], third: str | None, places: Sequence[str]
) -> str:
    """Return what a third computation says.

    Args:
        turn: who has computed what.
        digests: of the first two gradients.
        third: digest of the third gradient; ``None`` if there is none.
        places: host and device of each process, by rank.
    """
    if turn.owner == turn.auditor:
        return "The same process has computed both."
    if third is None or turn.third is None:
        return "There is no third process to decide which one is right."
    who = f"A third computation, on rank {turn.third} ({places[turn.third]}),"
    if third not in digests:
        return f"{who} differs from both."
    wrong = turn.owner if third == digests[1] else turn.auditor
    order = "second" if third == digests[1] else "first"
    return f"{who} equals the {order}: rank {wrong} ({places[wrong]}) has computed wrongly."
