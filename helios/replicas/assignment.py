"""Assigns replicas to processes: pure functions of their numbers.

*Blocks*: each process holds the whole model, runs contiguous replicas, and adds the subtrees within
its block. *Waves*: in turn t rank r runs replica t·P + r, so that all processes train neighboring
replicas at the same time, as they must if the model is sharded over them. The tree is the same, and
so are the bits.
"""

from __future__ import annotations

import functools

from helios.errors import ArgumentError
from helios.replicas.reduction_tree import children, subtrees


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
        ArgumentError: unless 0 <= rank < num_processes <= num_replicas.
    """
    found = assign(num_processes, num_replicas, in_waves=in_waves)
    if not 0 <= rank < num_processes:
        raise ArgumentError(
            f"rank must be between 0 and {num_processes - 1}, got {rank}. Pass the number of the "
            "process in its group."
        )
    return found[rank]


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
