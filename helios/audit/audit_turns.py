"""Which gradient of an audited step is computed again, and by which process.

Audits rotate over replicas, micro-batches and processes, so that in time each process computes what
each other one has computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from helios.replicas.assignment import blocks


@dataclass(frozen=True)
class AuditTurn:
    """What is audited in one step.

    Attributes:
        replica: the replica whose gradient is computed again.
        micro_batch: its micro-batch in the accumulation window, from 0.
        owner: the rank that trains the replica.
        auditor: the rank that computes the gradient again; the owner if there is one process.
        third: the rank that decides if the two differ; ``None`` with fewer than three processes.
    """

    replica: int
    micro_batch: int
    owner: int
    auditor: int
    third: int | None


def find_turn(
    number: int, *, num_replicas: int, num_processes: int, accumulation_steps: int
) -> AuditTurn:
    """Return what is audited in a step: a function of its number, the same on all processes.

    Replica and micro-batch do not depend on the number of processes.

    Args:
        number: number of the audit in the run, from 0.
        num_replicas: replicas of the run.
        num_processes: processes that run them.
        accumulation_steps: micro-batches of a window.

    >>> turn = find_turn(5, num_replicas=4, num_processes=3, accumulation_steps=1)
    >>> turn.replica, turn.owner, turn.auditor, turn.third
    (1, 0, 2, 1)
    """
    lap, replica = divmod(number, num_replicas)
    block = blocks(num_processes, num_replicas)
    owner = next(rank for rank, replicas in enumerate(block) if replica in replicas)
    num_others = num_processes - 1
    micro_batch = lap % accumulation_steps
    if not num_others:
        return AuditTurn(replica, micro_batch, owner, owner, None)
    # The second term shifts the order, so that each pair of micro-batch and auditor occurs.
    place = (lap + lap // lcm(accumulation_steps, num_others)) % num_others
    auditor, third = ((owner + 1 + (place + step) % num_others) % num_processes for step in (0, 1))
    return AuditTurn(replica, micro_batch, owner, auditor, third if num_others > 1 else None)
