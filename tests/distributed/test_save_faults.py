"""Saves that go wrong on three ranks: all go on, or all end with the same error."""

from __future__ import annotations

import dataclasses
import datetime
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helios.errors import SaveError
from helios.plugins import Plugin
from helios.state import TrainingState
from helios.storage import files
from tests.support import faults
from tests.support.elastic import (
    Bits,
    Elastic,
    ElasticData,
    ElasticModel,
    assert_same,
    make_trainer,
    read_bits,
)
from tests.support.faults import KILLS, Fault, Faults, Operation, make_store
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks

_NUM_STEPS = 7
_SAVES = (2, 4, 6, 7)
_MODES = ("async", "sync")
_LAST = len(_SAVES) - 1
_NUM_RANKS = 3


@dataclasses.dataclass(frozen=True)
class Ended:
    error: str
    is_save_error: bool
    code: int
    told: list[str]
    operations: list[Operation]
    seconds: float


def make_setting(mode: str, **more: Any) -> Elastic:
    """Return more than one epoch with four saves, of which the last one stays."""
    return Elastic(
        num_replicas=_NUM_RANKS,
        total_steps=_NUM_STEPS,
        chkpt_frequency=2,
        options=make_store(mode, keep_last=1, **more),
    )


def work(rank: int, folder: Path, setting: Elastic, *plugins: Plugin) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    plugin = next(plugin for plugin in plugins if isinstance(plugin, Faults))
    trainer = make_trainer(folder, setting, *plugins)
    error: Exception | None = None
    try:
        trainer.fit(ElasticModel(setting, folder), ElasticData(setting))
    except Exception as caught:
        error = caught
    return Ended(
        error="" if error is None else f"{type(error).__name__}: {error}",
        is_save_error=isinstance(error, SaveError),
        code=trainer.exit_code,
        told=plugin.told,
        operations=plugin.operations,
        seconds=time.monotonic(),
    )


def train(folder: Path, setting: Elastic, *plugins: Plugin) -> list[Ended]:
    ends: list[Ended] = run_ranks(work, _NUM_RANKS, folder, setting, *plugins)
    return ends


@dataclasses.dataclass(frozen=True)
class Whole:
    bits: Bits
    saves: list[list[Operation]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train undisturbed; the operations are the same in both modes."""
    folder = tmp_path_factory.mktemp("whole")
    first, *others = train(folder, make_setting("async"), Faults())
    assert all(not other.operations for other in others), "only rank 0 writes"
    assert first.code == 0
    saves = faults.by_save(first.operations)
    assert len(saves) == len(_SAVES)
    return Whole(read_bits(folder), saves)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with faults.in_memory(tmp_path) as place:
        yield place


def finish(folder: Path, mode: str, whole: Whole) -> None:
    ends = train(folder, make_setting(mode), Faults())
    assert [(end.error, end.code) for end in ends] == [("", 0)] * _NUM_RANKS
    check(folder, whole)


def check(folder: Path, whole: Whole) -> None:
    assert_same(read_bits(folder), whole.bits)
    assert not list(folder.glob("elastic/*.tmp"))


def kill(folder: Path, mode: str, whole: Whole, fault: Fault) -> None:
    """Kill rank 0 at an operation; the next start goes on from what was committed."""
    # Where another rank tells of it first, it can only tell that the connection is gone.
    with pytest.raises(RankError, match=r"Rank 0 failed: it ended with code -9|[Cc]onnection"):
        train(folder, make_setting(mode), Faults(fault))
    newest = max(faults.committed(folder / "elastic"), default=0)
    done = len((folder / "turns-0.jsonl").read_text().splitlines())
    finish(folder, mode, whole)
    again = (folder / "turns-0.jsonl").read_text().splitlines()[done:]
    if newest < _NUM_STEPS:
        assert f'"iteration": {newest + 1},' in again[0]
    else:
        assert not again


def fail(folder: Path, mode: str, whole: Whole, number: int, fault: Fault) -> None:
    """Let an operation fail on rank 0: all ranks go on; at the end all know of the last save."""
    first, *others = train(folder, make_setting(mode), Faults(fault))
    assert any("Errno" in text for text in first.told), first.told
    assert not [text for other in others for text in other.told if "Errno" in text] or first.error
    if number == _LAST:
        assert all(end.is_save_error for end in (first, *others))
        assert len({end.error for end in (first, *others)}) == 1
        assert {end.code for end in (first, *others)} == {1}
        finish(folder, mode, whole)
    else:
        assert {(end.error, end.code) for end in (first, *others)} == {("", 0)}
        check(folder, whole)


def find(whole: Whole, number: int, name: str) -> int:
    return next(o.number for o in whole.saves[number] if str(o) == name)


@pytest.mark.shows("S6", "S34")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "number", "name", "kind"),
    [
        ("async", 1, "replace .pth.tmp", "kill after"),
        ("async", 1, "write .pth.tmp", "ENOSPC"),
        ("sync", _LAST, "fsync .pth.tmp", "EIO"),
    ],
)
def test_a_fault_of_rank_0_costs_no_bit(
    mode: str, number: int, name: str, kind: str, whole: Whole, folder: Path
) -> None:
    fault = Fault(find(whole, number, name), kind)
    if kind in KILLS:
        kill(folder, mode, whole, fault)
    else:
        fail(folder, mode, whole, number, fault)


@pytest.mark.shows("S7", "U22")
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("async", "EIO"),
        pytest.param("async", "RuntimeError", marks=pytest.mark.full),
        pytest.param("sync", "ENOSPC", marks=pytest.mark.full),
        pytest.param("sync", "MemoryError", marks=pytest.mark.full),
    ],
)
def test_all_ranks_end_with_the_same_error_at_the_next_safe_point(
    mode: str, kind: str, whole: Whole, folder: Path
) -> None:
    plugin = Faults(Fault(find(whole, 1, "replace .json.tmp"), kind), settles=True)
    begin = time.monotonic()
    ends = train(folder, make_setting(mode, on_save_error="raise"), plugin)
    assert max(end.seconds for end in ends) - begin < 120, "with the start of three processes"
    (error,) = {end.error for end in ends}
    assert ("Errno" if kind in faults.DISK_ERRORS else f"{kind} of the test") in error
    assert not any(end.is_save_error for end in ends)
    assert {end.code for end in ends} == {1}
    lines = [path.read_text().splitlines() for path in folder.glob("turns-*.jsonl")]
    until = _SAVES[1] + (mode == "async")
    assert {f'"iteration": {until},' in rank[-1] for rank in lines} == {True}
    assert faults.committed(folder / "elastic") == [_SAVES[0]]
    finish(folder, mode, whole)


class Slow(Quiet):
    """Holds up the writer of rank 0 until the training has come to an iteration, or for a time."""

    unsaved = ("gate", "until", "seconds", "was_open")

    def __init__(self, until: int = 0, seconds: float = 0.0) -> None:
        super().__init__()
        self.until, self.seconds = until, seconds
        self.gate: threading.Event | None = None

    def on_fit_start(self) -> None:
        if self.context.rank != 0:
            return
        gate, fsync = threading.Event(), files.fsync
        self.gate = gate

        def held(handle: Any) -> None:
            if not gate.is_set():
                is_open = gate.wait(self.seconds or 150)
                assert is_open or self.seconds, "the training waits for the writer"
                gate.set()
            fsync(handle)

        files.fsync = held

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if self.gate is not None and state.global_iteration == self.until:
            self.gate.set()


@pytest.mark.shows("S30", "U22")
def test_three_ranks_train_on_while_one_writes(whole: Whole, folder: Path) -> None:
    """The gate opens in the last batch before the next save; who waited for it would not come."""
    ends = train(folder, make_setting("async"), Faults(), Slow(until=_SAVES[1]))
    assert {(end.error, end.code) for end in ends} == {("", 0)}
    check(folder, whole)


def work_with_short_timeouts(rank: int, folder: Path, setting: Elastic) -> Ended:
    """Train in a group whose collectives may take a second only."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "short"), _NUM_RANKS),
        rank=rank,
        world_size=_NUM_RANKS,
        timeout=datetime.timedelta(seconds=1),
    )
    return work(rank, folder, setting, Faults(), Slow(seconds=4.0))


@pytest.mark.full
@pytest.mark.parametrize("mode", _MODES)
def test_a_slow_save_times_out_no_rank(mode: str, whole: Whole, folder: Path) -> None:
    ends = run_ranks(work_with_short_timeouts, _NUM_RANKS, folder, make_setting(mode))
    assert {(end.error, end.code) for end in ends} == {("", 0)}
    check(folder, whole)
