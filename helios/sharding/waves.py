"""Which replicas train in one turn, and how their gradients are added in the order of the tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import Tensor

from helios.replicas.assignment import is_power_of_two
from helios.replicas.reduction_tree import children, subtrees


@final
class Waves:
    """The turns of an iteration: in turn t, rank r of P trains replica t * P + r.

    Args:
        num_replicas: V.
        num_processes: P, between 1 and V.
        rank: number of this process.

    Attributes:
        turn: number of the current turn.

    Example:
        >>> waves = Waves(num_replicas=5, num_processes=2, rank=1)
        >>> waves.turn = 2
        >>> waves.replicas, waves.is_idle
        (range(4, 5), True)
    """

    def __init__(self, num_replicas: int, num_processes: int, rank: int) -> None:
        self.num_replicas = num_replicas
        self._num_processes = num_processes
        self._rank = rank
        self.turn = 0

    @property
    def replicas(self) -> range:
        """The replicas of this turn, in the order of ranks."""
        begin = self.turn * self._num_processes
        return range(begin, min(begin + self._num_processes, self.num_replicas))

    @property
    def is_last(self) -> bool:
        """Whether this is the last turn of the iteration."""
        return self.replicas.stop == self.num_replicas

    @property
    def is_idle(self) -> bool:
        """Whether this process has no replica in this turn, and only computes along."""
        return self._rank >= len(self.replicas)

    @property
    def has_idle_turn(self) -> bool:
        """Whether it has none in the last turn."""
        rest = self.num_replicas % self._num_processes
        return 0 < rest <= self._rank

    @property
    def is_node(self) -> bool:
        """Whether the replicas of this turn are a node of the tree whose halves are nodes, too.

        Then they can be added by recursive halving.
        """
        replicas = self.replicas
        is_full = len(replicas) == self._num_processes and is_power_of_two(len(replicas))
        return is_full and subtrees(replicas, self.num_replicas) == [replicas]


@final
class NodeSums:
    """Adds the values of nodes as soon as both children of a node are present.

    At most log2(V) + 1 values are alive between two turns.

    Args:
        num_replicas: leaves of the whole tree.
    """

    def __init__(self, num_replicas: int) -> None:
        self._root = range(num_replicas)
        self._values: dict[range, Tensor] = {}
        self._parents: dict[range, range] = {}
        self._note_children(self._root)

    def _note_children(self, node: range) -> None:
        if len(node) > 1:
            for child in children(node):
                self._parents[child] = node
                self._note_children(child)

    def add(self, node: range, value: Tensor) -> None:
        """Add the value of a node; it may be changed in place."""
        self._values[node] = value
        while node != self._root:
            node = self._parents[node]
            left, right = children(node)
            if left not in self._values or right not in self._values:
                return
            self._values[node] = self._values.pop(left).add_(self._values.pop(right))

    def release_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Copy what refers to the memory of any of these buffers, so that they can be freed."""
        owned = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        for node, value in self._values.items():
            if value.untyped_storage().data_ptr() in owned:
                self._values[node] = value.clone()

    def take(self) -> Tensor:
        """Return the sum over all replicas, and begin anew."""
        total = self._values.pop(self._root)
        assert not self._values, "all values have been added"
        return total
