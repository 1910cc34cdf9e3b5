"""The sidecar's text: nothing is lost, and no change goes unseen."""

from __future__ import annotations

import pytest

from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar
from helios.errors import DamagedCheckpointError
from helios.findings import Finding, FindingKind, Findings, Level
from helios.state import Cursor, TrainingState
from tests.checkpoint.helpers import make_sidecar

FULL = make_sidecar(
    3,
    100,
    metrics={"loss": 0.1, "ä": 1e-300},
    finished="total_steps reached",
    resumed_from="/runs/\udc80/x.pth",
    changes=["batch_size: 8 -> 4"],
    options={"seed": 1, "sampler": None, "nested": {"a": [1, 2.5, True]}},
    digest="sha256:00",
    version="3.0.0",
    count=12,
)


def read(text: str) -> Sidecar:
    return Sidecar.from_json(text, name="x.json")


@pytest.mark.shows("S48")
def test_a_sidecar_is_a_projection_of_the_record() -> None:
    record = Record(
        training_state=TrainingState(global_epoch=2, global_iteration=7).dict(),
        cursor=Cursor(epoch=1, batch=3).dict(),
        model={},
        rng={},
        num_replicas=1,
        findings=Findings([Finding(FindingKind.MISSING, "net.seen", "a file")]),
        options={"total_steps": 3},
    )
    sidecar = Sidecar.of(
        record,
        run_name="run",
        level=Level.INCOMPLETE,
        metrics={"loss": 0.5},
        averages=["ema"],
        changes=[],
        is_by_epoch=True,
    )
    assert (sidecar.epoch, sidecar.iteration, sidecar.num_replicas) == (2, 7, 1)
    assert (sidecar.level, sidecar.missing) == ("incomplete", {"net.seen": "a file"})
    assert sidecar.options == {"total_steps": 3}
    assert sidecar.count is None, "in mid-epoch"


@pytest.mark.shows("S18")
def test_every_flipped_bit_of_a_sidecar_is_seen() -> None:
    data = FULL.to_json().encode()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                sidecar = read(bytes(changed).decode("utf-8", "replace"))
            except DamagedCheckpointError:
                continue
            assert sidecar == FULL, "only white space outside of values may change unseen"
