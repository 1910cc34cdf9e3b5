"""The gradients of one optimizer, from a replica's micro-batch to the sum over all replicas.

A replica's gradients of a window are added in the order of its micro-batches; the result is a leaf
of the tree, and goes onto its stack at once, so that few buffers are alive (DESIGN section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.engines.flat import FlatBuffer, FlatGradients
from helios.engines.replicated import Replicas
from helios.engines.tree import TreeStack


@final
class GradientSum:
    """Adds the gradients of an optimizer's parameters over micro-batches and replicas.

    Args:
        optimizer: whose parameters.
        replicas: what is summed over.
        networks: by path, to name their parameters in messages.
    """

    def __init__(
        self, optimizer: Optimizer, replicas: Replicas, networks: Mapping[str, nn.Module]
    ) -> None:
        names = {
            id(parameter): f"{path}.{name}"
            for path, network in networks.items()
            for name, parameter in network.named_parameters()
        }
        self._parameters = parameters_of(optimizer)
        self._replicas = replicas
        self._flat = FlatGradients(
            (names.get(id(parameter), f"parameter {place} of the optimizer"), parameter)
            for place, parameter in enumerate(self._parameters)
        )
        self._leaves: dict[int, FlatBuffer] = {}
        self._stack = TreeStack(replicas.block, replicas.num_replicas, self._flat.add)
        self._is_open = False

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether these are still the parameters of an optimizer; a group may have come."""
        present = parameters_of(optimizer)
        return len(present) == len(self._parameters) and all(
            known is found for known, found in zip(self._parameters, present, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for the window's end."""
        return self._is_open

    def collect(self, replica: int, *, ends_window: bool) -> None:
        """Take the gradients of a replica's micro-batch; ``.grad`` is None after it.

        Args:
            replica: number of the replica.
            ends_window: whether it is the replica's last micro-batch of the window.
        """
        self._is_open = True
        leaf = self._flat.collect(self._leaves.pop(replica, None))
        if ends_window:
            self._stack.push(leaf)
        else:
            self._leaves[replica] = leaf

    def finish(self) -> None:
        """Add over all replicas; ``.grad`` holds the sum, the same on all processes."""
        self._flat.show(self._flat.reduce(self._stack.take(), self._replicas.reducer))
        self._is_open = False


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
