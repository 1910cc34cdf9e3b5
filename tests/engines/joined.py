"""Replicas of a run on the ranks of a test, and what all of them have to find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helios.distributed.process_groups import DistributedInfo, membership
from helios.replicas.replicas import Replicas


@contextmanager
def joined(rank: int, num_processes: int) -> Iterator[DistributedInfo]:
    """Be in the groups of a training, on a rank that ``run_ranks`` has started."""
    info = DistributedInfo(rank, rank, num_processes, num_processes)
    if num_processes == 1:
        yield info
        return
    with membership(info):
        yield info


@contextmanager
def replicas_on(rank: int, num_processes: int, num_replicas: int) -> Iterator[Replicas]:
    """Carry this rank's part of the replicas of a run."""
    with joined(rank, num_processes) as info:
        yield Replicas(num_replicas, info)
