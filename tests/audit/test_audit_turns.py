"""Who audits what: each process repeats what each other one has computed."""

from __future__ import annotations

import itertools
import math

import pytest

from helios.audit.step_audit import AuditTurn, find_turn
from helios.replicas.reduction_tree import blocks


def turns_of(num_replicas: int, num_processes: int, accumulation: int) -> list[AuditTurn]:
    laps = accumulation * max(num_processes - 1, 1)
    return [
        find_turn(
            number,
            num_replicas=num_replicas,
            num_processes=num_processes,
            accumulation_steps=accumulation,
        )
        for number in range(num_replicas * laps)
    ]


CASES = [
    (v, p, a) for v, p, a in itertools.product(range(1, 7), range(1, 7), range(1, 5)) if p <= v
]


@pytest.mark.shows("P18")
@pytest.mark.parametrize(("num_replicas", "num_processes", "accumulation"), CASES)
def test_in_time_each_process_repeats_each_gradient_of_the_others(
    num_replicas: int, num_processes: int, accumulation: int
) -> None:
    turns = turns_of(num_replicas, num_processes, accumulation)
    seen = {(turn.replica, turn.micro_batch, turn.auditor) for turn in turns}
    assert len(seen) == num_replicas * accumulation * max(num_processes - 1, 1)
    for turn in turns:
        assert turn.replica in blocks(num_processes, num_replicas)[turn.owner]
        ranks = {turn.owner, turn.auditor, turn.owner if turn.third is None else turn.third}
        assert len(ranks) == min(num_processes, 3)
        assert ranks <= set(range(num_processes))


@pytest.mark.shows("P18")
def test_what_is_audited_does_not_depend_on_the_number_of_processes() -> None:
    found = [
        [(turn.replica, turn.micro_batch) for turn in turns_of(4, processes, 3)[: 4 * 3]]
        for processes in (1, 2, 3, 4)
    ]
    assert found[1:] == found[:1] * 3
    assert len(set(found[0])) == math.prod((4, 3))
