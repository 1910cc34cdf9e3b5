"""The order in which replicas are added: a binary tree over replicas 0 … V-1.

A node is the range of its replicas; one of n leaves splits after the first ceil(n / 2). Every sum
of a run follows this tree, whichever process runs which replica, so its bits depend on V only.
A process adds the subtrees within its block of replicas; the rest is added over processes.

Which replicas a process has is a function of their numbers, too. *Blocks*: each process holds the
whole model, and runs contiguous replicas. *Waves*: in turn t rank r runs replica t·P + r, so that
all processes train neighboring replicas at the same time, as they must if the model is sharded over
them. The tree is the same, and so are the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from helios.errors import ArgumentError

T = TypeVar("T")


def children(node: range) -> tuple[range, range]:
    """Return the left and the right half of a node of two leaves or more.

    >>> children(range(5))
    (range(0, 3), range(3, 5))
    """
    middle = node.start + (len(node) + 1) // 2
    return range(node.start, middle), range(middle, node.stop)


def subtrees(block: range, num_replicas: int) -> list[range]:
    """Return the largest nodes within a block of replicas, in order.

    >>> subtrees(range(1, 4), 4)
    [range(1, 2), range(2, 4)]
    """

    def inside(node: range) -> Iterator[range]:
        if block.start <= node.start and node.stop <= block.stop:
            yield node
        elif block.start < node.stop and node.start < block.stop:
            for child in children(node):
                yield from inside(child)

    return list(inside(range(num_replicas)))


def add_values(left: Any, right: Any) -> Any:
    """Return left + right: numbers, tensors, and lists, tuples or dicts of them.

    A tensor is added in place into the left one; a tensor without dimensions counts as a number.
    If only one of two dicts has a name, its value is kept.
    """
    if isinstance(left, Tensor) and left.dim() > 0:
        return left.add_(right)
    if isinstance(left, list | tuple):
        return type(left)(add_values(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        both = {name: add_values(left[name], right[name]) for name in left if name in right}
        return {**left, **right, **both}
    return left + right


class TreeStack(Generic[T]):
    """Adds the leaves of a block of replicas as soon as both children of a node are present.

    At most log2 of the leaves (plus one for each subtree) are alive at any time.

    Args:
        block: the replicas whose leaves are pushed, in order.
        num_replicas: leaves of the whole tree.
        add: returns left + right; may change the left value and keep the right one.
    """

    def __init__(
        self, block: range, num_replicas: int, add: Callable[[T, T], T] = add_values
    ) -> None:
        self._block = block
        self._add = add
        self._sums_after = dict.fromkeys(block, 0)
        for node in subtrees(block, num_replicas):
            self._count_sums(node)
        self._values: list[tuple[range, T]] = []
        self._next = block.start

    def _count_sums(self, node: range) -> None:
        if len(node) > 1:
            self._sums_after[node[-1]] += 1
            for child in children(node):
                self._count_sums(child)

    def preview(self) -> tuple[list[T], dict[range, T]]:
        """Return what the next leaf will be added to, nearest first, and all other sums."""
        place = len(self._values) - self._sums_after.get(self._next, 0)
        left = [value for _, value in reversed(self._values[place:])]
        return left, dict(self._values[:place])

    def push(self, leaf: T, add: Callable[[T, T], T] | None = None) -> None:
        """Push the leaf of the next replica, and add the nodes that it completes.

        Args:
            leaf: the leaf of the next replica.
            add: replaces the usual function, for elements that are added already.
        """
        assert self._next in self._block, "take() comes before the first leaf of the next step"
        self._values.append((range(self._next, self._next + 1), leaf))
        for _ in range(self._sums_after[self._next]):
            (last, right), (first, left) = self._values.pop(), self._values.pop()
            total = (add or self._add)(left, right)
            self._values.append((range(first.start, last.stop), total))
        self._next += 1

    def take(self) -> dict[range, T]:
        """Return the sum of each subtree of the block, and clear the stack."""
        assert self._next == self._block.stop, "there is a leaf of each replica"
        sums = dict(self._values)
        self._values.clear()
        self._next = self._block.start
        return sums


def finish(nodes: Mapping[range, T], num_replicas: int, add: Callable[[T, T], T] = add_values) -> T:
    """Return the sum at the root, from the sums of nodes that cover all replicas.

    Args:
        nodes: sums by node.
        num_replicas: leaves of the whole tree.
        add: returns left + right; may change the left value.
    """

    def total(node: range) -> T:
        if node in nodes:
            return nodes[node]
        assert len(node) > 1, "the nodes cover all replicas"
        left, right = children(node)
        return add(total(left), total(right))

    return total(range(num_replicas))


def tree_sum(leaves: Sequence[T], add: Callable[[T, T], T] = add_values) -> T:
    """Return the sum of all replicas' values, in the order of the tree.

    >>> tree_sum(["a", "b", "c", "d", "e"], "({}{})".format)
    '(((ab)c)(de))'
    """
    return finish({range(i, i + 1): leaf for i, leaf in enumerate(leaves)}, len(leaves), add)


@functools.lru_cache(maxsize=64)
def blocks(num_processes: int, num_replicas: int) -> tuple[range, ...]:
    """Return the replicas of every process: contiguous, in order, none empty.

    Sizes differ by at most one. 2^k processes get the nodes of the tree's k-th level. Otherwise the
    longer blocks are placed so that there are as few subtrees as possible, because each is sent.

    >>> blocks(4, 6)
    (range(0, 2), range(2, 3), range(3, 5), range(5, 6))
    >>> blocks(3, 5)
    (range(0, 2), range(2, 3), range(3, 5))

    Raises:
        ArgumentError: unless 1 <= num_processes <= num_replicas.
    """
    _check(num_processes, num_replicas)
    if is_power_of_two(num_processes):
        level = [range(num_replicas)]
        while len(level) < num_processes:
            level = [child for node in level for child in children(node)]
        return tuple(level)
    return _blocks_of_fewest_subtrees(num_processes, num_replicas)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _blocks_of_fewest_subtrees(num_processes: int, num_replicas: int) -> tuple[range, ...]:
    size, num_longer = divmod(num_replicas, num_processes)
    # By the number of longer blocks so far: the fewest subtrees, and the blocks with that number.
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}
    for rank in range(num_processes):
        longer: dict[int, tuple[int, tuple[range, ...]]] = {}
        for used, (count, before) in best.items():
            start = rank * size + used
            for total in (used + 1, used):
                block = range(start, start + size + total - used)
                found = count + len(subtrees(block, num_replicas))
                if total <= num_longer and (total not in longer or found < longer[total][0]):
                    longer[total] = (found, (*before, block))
        best = longer
    return best[num_longer][1]


def block_of(rank: int, num_processes: int, num_replicas: int, *, in_waves: bool = False) -> range:
    """Return the replicas that one process runs.

    Raises:
        ArgumentError: unless num_processes <= num_replicas.
    """
    return assign(num_processes, num_replicas, in_waves=in_waves)[rank]


def assign(num_processes: int, num_replicas: int, *, in_waves: bool) -> tuple[range, ...]:
    """Return the replicas of every process, in waves or in blocks.

    Raises:
        ArgumentError: unless 1 <= num_processes <= num_replicas.
    """
    return (waves if in_waves else blocks)(num_processes, num_replicas)


def waves(num_processes: int, num_replicas: int) -> tuple[range, ...]:
    """Return the replicas of every process in the order of its turns, one from each wave.

    In the last wave the last processes may have none.

    >>> waves(2, 5)
    (range(0, 5, 2), range(1, 5, 2))

    Raises:
        ArgumentError: unless 1 <= num_processes <= num_replicas.
    """
    _check(num_processes, num_replicas)
    return tuple(range(rank, num_replicas, num_processes) for rank in range(num_processes))


def _check(num_processes: int, num_replicas: int) -> None:
    if not 1 <= num_processes <= num_replicas:
        raise ArgumentError(
            f"num_processes must be between 1 and num_replicas ({num_replicas}), got "
            f"{num_processes}. Start fewer processes, or define the run over more replicas."
        )
