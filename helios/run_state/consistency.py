"""Whether all processes have the same weights: what differs would go its own way in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from helios.errors import UsageError
from helios.run_state.bits import bit_sum
from helios.run_state.discovery import Discovery

Costs: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by owner and place."""


def check_alike(
    discovery: Discovery,
    gather: Callable[[Any], list[Any]],
    *,
    too_slow: Costs,
    ignored: Collection[str] = (),
) -> Costs:
    """Check that weights, buffers and learning rates are the same on all processes.

    Args:
        discovery: finds the networks and optimizers of the model.
        gather: returns the values of all processes, in the order of ranks.
        too_slow: the seconds of what this process would leave out of a checkpoint, by owner.
        ignored: what is known to differ, by path.

    Returns:
        What rank 0 would leave out of a checkpoint.

    Raises:
        UsageError: if they are not; the same on all processes.
    """
    told = gather((_marks_of(discovery), too_slow))
    first, *others = [marks for marks, _ in told]
    for rank, found in enumerate(others, 1):
        names = [
            name
            for name in first | found
            if first.get(name) != found.get(name) and name not in ignored
        ]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(
                f"All processes must have the same weights, but {', '.join(names[:3])}{more} "
                f"of rank {rank} differ from rank 0's. Load weights on every rank, let hooks do "
                "the same on all of them, and in manual steps wrap networks by engine.wrap(...)."
            )
    agreed: Costs = told[0][1]
    return agreed


def _marks_of(discovery: Discovery) -> dict[str, Any]:
    """Return by name what is the same where numbers are the same, and differs where they do not."""
    tensors: dict[str, Tensor] = {}
    for path, network in discovery.modules().items():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            tensors[f"{path}.{name}"] = tensor
    sums = {name: bit_sum(tensor) for name, tensor in tensors.items()}
    marks: dict[str, Any] = {name: int(total) for name, total in sums.items()}
    for path, optimizer in discovery.optimizers().items():
        for number, group in enumerate(optimizer.param_groups):
            marks[f"the learning rate of {path}, group {number},"] = float(group.get("lr", 0.0))
    return marks
