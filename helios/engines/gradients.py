"""Gradients, from a replica's micro-batch to the sum over all replicas.

A replica's gradients of a window are added in the order of its micro-batches; the result is a leaf
of the tree, and goes onto its stack at once, so that few buffers are alive (DESIGN section 5). With
one replica they stay where backward has put them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helios.engines.flat import FlatBuffer, FlatGradients
from helios.engines.replicated import Replicas
from helios.engines.tree import TreeStack
from helios.errors import UsageError

FindNetworks: TypeAlias = Callable[[], Mapping[str, nn.Module]]


class Gradients:
    """The gradients of a window of one replica: ``.grad`` holds their sum all the time.

    Attributes:
        is_open: whether gradients were collected in this window.
    """

    is_open: bool = False

    def drop_old(self, optimizer: Optimizer) -> None:
        """Drop what parameters had of gradients when the optimizer got them, or a run begins.

        Each process has summed these up over the replicas that it carries, so they would depend on
        the number of processes.
        """

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Take the gradients of a replica's backward, so that the next one begins anew.

        Args:
            optimizer: whose parameters have them.
            replica: number of the replica.
            find_networks: returns the networks by path, to name parameters in messages.
            ends_window: whether it is the replica's last micro-batch of the window.

        Raises:
            UsageError: if the optimizer has got or lost parameters inside of the window.
        """

    def finish(self, optimizer: Optimizer) -> None:
        """Add over all replicas; ``.grad`` holds the sum, the same on all processes."""

    def close_window(self) -> None:
        """Drop what was collected and not used."""


@final
class SharedGradients(Gradients):
    """The gradients of several replicas, added along the tree.

    Args:
        replicas: what is summed over.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._sums: dict[int, GradientSum] = {}
        self._num_parameters: dict[int, int] = {}

    def drop_old(self, optimizer: Optimizer) -> None:
        """Set the gradients to None where parameters have come."""
        size = len(parameters_of(optimizer))
        if size != self._num_parameters.get(id(optimizer)):
            self._num_parameters[id(optimizer)] = size
            optimizer.zero_grad()

    def collect(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks, *, ends_window: bool
    ) -> None:
        """Move the gradients into the replica's leaf."""
        self.is_open = True
        known = self._sums.get(id(optimizer))
        if known is None or not known.is_for(optimizer):
            if known is not None and known.is_open:
                raise UsageError(
                    f"{type(optimizer).__name__} must get or lose parameters between two steps, "
                    "and did so inside of one. Call add_param_group in on_training_step_start."
                )
            known = GradientSum(optimizer, self._replicas, find_networks())
            self._sums[id(optimizer)] = known
        known.collect(replica, ends_window=ends_window)

    def finish(self, optimizer: Optimizer) -> None:
        """Finish the tree over all processes."""
        known = self._sums.get(id(optimizer))
        if known is not None and known.is_open:
            known.finish()

    def close_window(self) -> None:
        """Forget the sums that wait for an update which nobody has made."""
        self.is_open = False
        self._sums = {key: known for key, known in self._sums.items() if not known.is_open}


def make_gradients(replicas: Replicas) -> Gradients:
    """Return how gradients are added; chosen once, at the start of a run."""
    return Gradients() if replicas.is_lone else SharedGradients(replicas)


@final
class GradientSum:
    """Adds the gradients of an optimizer's parameters over micro-batches and replicas.

    Args:
        optimizer: whose parameters.
        replicas: what is summed over.
        networks: by path, to name their parameters in messages.

    Attributes:
        is_open: whether gradients wait for the window's end.
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
        self.is_open = False

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether these are still the parameters of an optimizer; a group may have come."""
        present = parameters_of(optimizer)
        return len(present) == len(self._parameters) and all(
            map(operator.is_, self._parameters, present)
        )

    def collect(self, replica: int, *, ends_window: bool) -> None:
        """Take the gradients of a replica's micro-batch; ``.grad`` is None after it.

        Args:
            replica: number of the replica.
            ends_window: whether it is the replica's last micro-batch of the window.
        """
        self.is_open = True
        leaf = self._flat.collect(self._leaves.pop(replica, None))
        if ends_window:
            self._stack.push(leaf)
        else:
            self._leaves[replica] = leaf

    def finish(self) -> None:
        """Add over all replicas; ``.grad`` holds the sum, the same on all processes."""
        self._flat.show(self._flat.reduce(self._stack.take(), self._replicas.reducer))
        self.is_open = False


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return list(chain.from_iterable(map(operator.itemgetter("params"), optimizer.param_groups)))


def divide(optimizer: Optimizer, count: int) -> None:
    """Divide the gradients of an optimizer by a number, in place."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, float(count))
