"""Checks that all processes have the same weights, which would otherwise diverge unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.state_graph.discovery import Discovery
from helios.storage.checksums import bit_sum


def check_alike(
    discovery: Discovery,
    gather: Callable[[Any], list[Any]],
    *,
    ignored: Collection[str] = (),
    marks: Mapping[str, Any] | None = None,
) -> None:
    """Check that weights, buffers, learning rates and orders are the same on all processes.

    Gradients are added by the position of their parameter in its optimizer.

    Args:
        discovery: finds the networks, loose parameters and optimizers of the model.
        gather: returns the values of all processes, in the order of ranks.
        ignored: paths that are known to differ.
        marks: of tensors that are sharded by now, by name, from when they were whole.

    Raises:
        UsageError: on all processes, if something differs, or if a network has lazy layers.
    """
    refuse_lazy_layers(discovery)
    loose, members = discovery.moved()
    orders = {path: list(chain.from_iterable(groups)) for path, groups in members.items()}
    own = {**(marks or {}), **_marks_of(discovery, loose)}
    gathered = gather((orders, own))
    first, *others = gathered
    for rank, found in enumerate(others, 1):
        _compare_orders(rank, found[0], first[0])
        _compare_marks(rank, found[1], first[1], ignored)


def find_lazy(discovery: Discovery) -> list[str]:
    """Return the paths of networks with lazy layers, which draw their weights in the first step."""
    return [
        path
        for path, network in discovery.modules().items()
        if any(map(is_lazy, (*network.parameters(), *network.buffers())))
    ]


def refuse_lazy_layers(discovery: Discovery) -> None:
    """Refuse lazy layers, whose initial weights would differ between processes.

    Raises:
        UsageError: for the first network that has any.
    """
    for path in find_lazy(discovery):
        raise UsageError(
            f"The network {path!r} has lazy layers, which draw their weights in the first step: "
            "with several replicas these would differ between processes. Run a batch through it "
            "in Model.setup()."
        )


def _compare_orders(
    rank: int, found: Mapping[str, list[str]], first: Mapping[str, list[str]]
) -> None:
    for path in [path for path in first if path in found]:
        for here, there in zip_longest(found[path], first[path], fillvalue="nothing"):
            if here != there:
                raise UsageError(
                    f"All processes must pass parameters to {path} in the same order, but rank "
                    f"{rank} has {here} where rank 0 has {there}. Build optimizers in setup() in "
                    "a fixed order: sort what comes from a set, whose order differs between "
                    "processes."
                )


def _compare_marks(
    rank: int, found: dict[str, Any], first: dict[str, Any], ignored: Collection[str]
) -> None:
    names = [
        name for name in first | found if first.get(name) != found.get(name) and name not in ignored
    ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(
            f"All processes must have the same weights, but {', '.join(names[:3])}{more} "
            f"of rank {rank} differ from rank 0's. Load weights on every rank, do the same in "
            "hooks on all ranks, and in manual steps wrap networks with engine.wrap(...)."
        )


def _marks_of(discovery: Discovery, loose: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return marks by name that differ if the numbers differ."""
    tensors = dict(loose)
    for path, network in discovery.modules().items():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            tensors[f"{path}.{name}"] = tensor
    # Processes have different shards; they were compared before they were cut.
    sums = {name: bit_sum(part) for name, part in tensors.items() if not is_sharded(part)}
    marks: dict[str, Any] = {name: int(total) for name, total in sums.items()}
    for path, optimizer in discovery.optimizers().items():
        for number, group in enumerate(optimizer.param_groups):
            marks[f"the learning rate of {path}, group {number},"] = float(group.get("lr", 0.0))
    return marks
