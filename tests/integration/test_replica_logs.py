"""The order of events over numbers of replicas and processes, compared with golden logs."""

from __future__ import annotations

import pytest

from tests.support import replica_logs
from tests.support.replica_logs import FOLDER, MOST, PER_REPLICA, SUBJECTS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_processes", range(1, MOST + 1))
def test_rank_0_tells_what_the_golden_log_has(num_processes: int) -> None:
    for name, subject in SUBJECTS.items():
        places = [place for place in subject.places() if place[1] == num_processes]
        golden = replica_logs.parse((FOLDER / f"{name}.txt").read_text("utf-8"))
        for place, found in replica_logs.sections_of(name, places).items():
            assert found == golden[place], f"{name}, {place}"


@pytest.mark.parametrize("name", SUBJECTS)
def test_without_the_calls_of_replicas_all_logs_are_the_same(name: str) -> None:
    golden = replica_logs.parse((FOLDER / f"{name}.txt").read_text("utf-8"))
    rests = {
        "".join(line for line in log.splitlines(keepends=True) if line[0] != "*")
        for log in golden.values()
    }
    assert len(rests) == 1
    assert not any(f"{call}(" in rest for call in PER_REPLICA for rest in rests)
