"""The test of the promise: restart from every checkpoint, compare with an undisturbed run."""

from __future__ import annotations

import itertools
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from helios.ledger.book import FILE_NAME
from tests.support import tier
from tests.support.runs import Outcome

MakeRun = Callable[[Path], Outcome]

_RESUME = ["on_checkpoint_loaded", "on_fit_start", "on_training_start", "on_training_resume"]


def iteration_of(path: Path) -> int:
    return int(path.stem.split("_iter_")[1])


def copy_checkpoint(path: Path, root: Path) -> Path:
    """Copy one checkpoint with its sidecar into a folder of a fresh run, and the whole ledger."""
    folder = root / path.parent.name
    folder.mkdir(parents=True)
    ledger = path.with_name(FILE_NAME)
    for source in (path, path.with_suffix(".json"), *([ledger] if ledger.exists() else [])):
        shutil.copy(source, folder / source.name)
    return root


def assert_equal(resumed: Outcome, whole: Outcome, *, since: int) -> None:
    """Assert that a resumed run repeats no batch and gives the bits of an undisturbed one."""
    tail = {number: record for number, record in whole.records.items() if number > since}
    assert resumed.records == tail, f"samples or losses differ after iteration {since}"
    found = resumed.bits()
    different = [name for name, bits in whole.bits().items() if found.get(name) != bits]
    assert not different, f"{different} differ at the end, resumed after iteration {since}"
    assert resumed.cursor == whole.cursor


def assert_equal_ledgers(folder: Path, other: Path) -> None:
    """Assert that the ledgers of two runs are the same file byte for byte."""
    found, expected = (sorted(root.glob(f"*/{FILE_NAME}")) for root in (folder, other))
    assert expected
    assert [path.parent.name for path in found] == [path.parent.name for path in expected]
    for path, same in zip(found, expected, strict=True):
        lines = zip(path.read_bytes().split(b"\n"), same.read_bytes().split(b"\n"), strict=True)
        assert not [pair for pair in lines if pair[0] != pair[1]][:2]


def assert_events_join(resumed: Outcome, whole: Outcome, *, since: int) -> None:
    """Assert that exactly those events follow that an undisturbed run has."""
    names = [event[0] for event in resumed.events[: len(_RESUME)]]
    assert names == _RESUME
    expected = whole.events[whole.saves[since] :]
    pairs = itertools.zip_longest(resumed.events[len(_RESUME) :], expected)
    different = [pair for pair in pairs if pair[0] != pair[1]]
    assert not different[:3], f"events differ after iteration {since}"


def resume_everywhere(
    make_run: MakeRun,
    folder: Path,
    *,
    make_resumed: MakeRun | None = None,
    compares_events: bool = True,
    is_whole: bool = False,
) -> Outcome:
    """Train undisturbed with a checkpoint at every safe point, then restart from each of them.

    The default tier restarts from some of them (`restarts_of`), the full tier from all.

    Args:
        make_resumed: trains after a restart, if something is to be changed (workers, say).
        is_whole: whether the default tier restarts from all of them, too.
    """
    whole = make_run(folder / "whole")
    finished = 0
    checkpoints = sorted((folder / "whole").glob("*/*.pth"), key=iteration_of)
    assert len(checkpoints) >= 3, "the run wrote too few checkpoints to show anything"
    assert set(whole.records) == set(range(1, len(whole.records) + 1))
    for number, path in enumerate(checkpoints if is_whole else restarts_of(checkpoints)):
        since = iteration_of(path)
        resumed = (make_resumed or make_run)(copy_checkpoint(path, folder / f"resumed-{number}"))
        if not resumed.has_ended:
            finished += 1
            continue
        assert_equal(resumed, whole, since=since)
        assert_equal_ledgers(folder / f"resumed-{number}", folder / "whole")
        if compares_events:
            assert_events_join(resumed, whole, since=since)
    assert finished == 1, "only the last checkpoint is that of a finished run, which does nothing"
    return whole


def restarts_of(checkpoints: list[Path]) -> list[Path]:
    """Return which of a run's checkpoints, in their order, a test restarts from.

    The full tier restarts from all. Where there are more than five, the default tier restarts from
    one in five and from the last two, of which the last is the end of the run. Which ones these are
    depends on the test, so that each place of an epoch and of a window has its turn: five divides
    the length of neither.
    """
    if tier.is_full() or len(checkpoints) <= 5:
        return checkpoints
    offset = zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode())
    chosen = [path for n, path in enumerate(checkpoints[:-2]) if (n + offset) % 5 == 0]
    return chosen + checkpoints[-2:]
