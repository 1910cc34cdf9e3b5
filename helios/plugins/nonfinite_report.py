"""Reports of what is not finite in a window, and of its sources.

With several replicas the reports of all are merged into one message, the same on all processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from helios.hooks.context import Context
from helios.state import Cursor, TrainingState
from helios.text import with_step

_MOST_SAMPLES = _MOST_NAMES = 5


class BadLoss(NamedTuple):
    """A loss that is not finite.

    Attributes:
        place: position of its batch.
        replica: the replica.
        value: its value.
    """

    place: Cursor
    replica: int
    value: float


class NonFiniteReport(NamedTuple):
    """What is not finite in a window.

    Attributes:
        losses: the losses.
        gradients: names of parameters, by their number in the optimizer.
    """

    losses: list[BadLoss]
    gradients: dict[int, str]

    @property
    def is_empty(self) -> bool:
        """Whether everything is finite."""
        return not (self.losses or self.gradients)


def merge_reports(findings: Iterable[NonFiniteReport | None]) -> NonFiniteReport:
    """Merge the reports of several processes, in the order of batches and replicas."""
    found = [part for part in findings if part is not None]
    losses = [loss for part in found for loss in part.losses]
    losses.sort(key=lambda loss: (*_key(loss.place), loss.replica))
    # Gradients are sums over all replicas, of which a process may hold only a shard.
    gradients = {number: name for part in found for number, name in part.gradients.items()}
    return NonFiniteReport(losses, dict(sorted(gradients.items())))


def describe_nonfinite(context: Context, found: NonFiniteReport, window: Iterable[Cursor]) -> str:
    """Describe what is not finite, and which samples it may come from.

    Args:
        context: the run.
        found: the report.
        window: the batches of the window, for gradients that may come from any of them.
    """
    bad: dict[tuple[int, int], dict[int, BadLoss]] = {}
    for loss in found.losses:
        bad.setdefault(_key(loss.place), {})[loss.replica] = loss
    parts = [_name_losses(context, list(losses.values())) for losses in bad.values()]
    if found.gradients:
        names = list(found.gradients.values())
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        parts.append(f"the gradients of {', '.join(names[:_MOST_NAMES])}{more}")
    if not bad:
        places = {_key(place): place for place in window}
        batches = " and ".join(name_batch(context, place) for place in places.values())
        parts[-1] += f", which come from {batches}"
    return f"In {name_moment(context.state)} not finite: {', and '.join(parts)}."


def name_moment(state: TrainingState) -> str:
    """Return the epoch and iteration for messages, with the step at its end."""
    step = state.global_step + (state.is_step_boundary and state.is_step_committed)
    iteration = with_step(state.global_iteration, step)
    return f"epoch {state.global_epoch}, iteration {iteration}"


def name_batch(context: Context, place: Cursor, replica: int = 0) -> str:
    """Return the name of a batch for messages, with its first samples, beginning with a replica."""
    text = f"batch {place.batch} (from 0) of epoch {place.epoch + 1}"
    found = context.indices_of(place)
    if found is None:
        return f"{text}, samples unknown (the sampler has a state)"
    whose = context.choose("", f" (those of replica {replica} first)")
    indices = [index.item() if isinstance(index, Tensor) else index for index in found]
    start = replica * (len(indices) // context.num_replicas)
    shown = ", ".join(map(str, [*indices[start:], *indices[:start]][:_MOST_SAMPLES]))
    more = len(indices) - _MOST_SAMPLES
    return f"{text}, samples{whose} {shown}{f' and {more} more' if more > 0 else ''}"


def _name_losses(context: Context, losses: list[BadLoss]) -> str:
    """Name the bad losses of one batch."""
    text: str = context.choose(_name_only_loss, _name_by_replica)(
        name_batch(context, losses[0].place, losses[0].replica), losses
    )
    return text


def _name_only_loss(batch: str, losses: list[BadLoss]) -> str:
    (loss,) = losses
    return f"the loss of {batch} ({loss.value})"


def _name_by_replica(batch: str, losses: list[BadLoss]) -> str:
    owners = " and ".join(f"of replica {loss.replica} ({loss.value})" for loss in losses)
    return f"the loss {owners} in {batch}"


def _key(place: Cursor) -> tuple[int, int]:
    return place.epoch, place.batch
