"""Every file operation of a save goes wrong once: the run goes on with equal bits (USERS.md 17)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import SaveError
from helios.storage.folder_lock import LOCK_NAME
from tests.support import faults
from tests.support.faults import KILLS, KINDS, Fault, Faults, Operation, make_store
from tests.support.kills import outcome_of, train_in_child
from tests.support.resume import assert_equal
from tests.support.runs import Outcome, Setting, train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")

_BEST = helios.KeepBest(1, "score", "min")
_NUM_STEPS = 14
_SAVES = (4, 8, 12, 14)
_MODES = ("async", "sync")
_LAST = len(_SAVES) - 1


def make_setting(mode: str, **more: Any) -> Setting:
    """Return three epochs with four saves, of which all but the last and the best are deleted."""
    store = make_store(mode, keep_last=1, keep_best=_BEST, **more)
    return Setting(
        total_steps=_NUM_STEPS, chkpt_frequency=_SAVES[0], valid_frequency=4, options=store
    )


@dataclasses.dataclass(frozen=True)
class Whole:
    """The undisturbed run: what it did, which operations it needed, and what it left."""

    outcome: Outcome
    saves: list[list[Operation]]
    names: list[str]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """Train undisturbed in both modes."""
    found = {}
    for mode in _MODES:
        folder, plugin = tmp_path_factory.mktemp(mode), Faults()
        outcome = train(folder, make_setting(mode), plugin)
        saves = faults.by_save(plugin.operations)
        found[mode] = Whole(outcome, saves, faults.names(folder / "small"))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with faults.in_memory(tmp_path) as place:
        yield place


def check_end(folder: Path, whole: Whole, since: int = 0) -> None:
    """Check that a run has come to its end, and left what an undisturbed one leaves.

    The checkpoint that it was resumed from stays, too; and where that is the last one, the one
    before, because only a save deletes others.
    """
    allowed = {since, _SAVES[-2]} if since == _NUM_STEPS else {since}
    left = set(faults.names(folder / "small")) - set(whole.names)
    assert {int(name.split("_iter_")[1].split(".")[0]) for name in left} <= allowed, left
    if since:
        assert len(list(folder.glob(f"small/*_iter_{since}.*"))) == 2
    newest = helios.find_last_checkpoint(folder / "small")
    assert newest is not None
    assert '"finished": "total_steps reached"' in newest.with_suffix(".json").read_text()


def kill(folder: Path, mode: str, whole: Whole, fault: Fault) -> None:
    """Kill at an operation, start again, and compare to the end."""
    assert train_in_child(folder, make_setting(mode), Faults(fault)) == -9, fault
    present = faults.committed(folder / "small")
    since = max(present, default=0)
    assert train_in_child(folder, make_setting(mode), Faults()) == 0, fault
    resumed = outcome_of(folder)
    if resumed.has_ended:
        assert_equal(resumed, whole.outcome, since=since)
    else:
        assert since == _NUM_STEPS
    check_end(folder, whole, since)


def fail(folder: Path, mode: str, whole: Whole, number: int, fault: Fault) -> None:
    """Let an operation fail; the training goes on, and ends as its place in the run says."""
    save = whole.saves[number]
    operation = next(o for o in save if o.number == fault.number)
    part = faults.part_of(operation, save)
    plugin = Faults(fault)
    if number == _LAST and part in ("commit", "sync"):
        with pytest.raises(
            SaveError, match=r"The last checkpoint, .* was (NOT saved|written, but .*): .Errno"
        ):
            train(folder, make_setting(mode), plugin)
        assert plugin.trainer.exit_code == 1
        since = max(faults.committed(folder / "small"))
        assert since == (_NUM_STEPS if part == "sync" else _SAVES[-2])
        check_no_rest(folder)
        resumed = train(folder, make_setting(mode), Faults())
        assert_equal(resumed, whole.outcome, since=since)
        check_end(folder, whole, since)
        return
    outcome = train(folder, make_setting(mode), plugin)
    assert plugin.is_hit, fault
    check_words(part, plugin.told)
    assert plugin.trainer.exit_code == 0
    assert_equal(outcome, whole.outcome, since=0)
    check_no_rest(folder, part)
    assert max(faults.committed(folder / "small")) == _NUM_STEPS


def check_no_rest(folder: Path, part: str = "commit") -> None:
    """Check that nothing half-written is left, and no sidecar without its checkpoint.

    A deletion that fails between the two files may leave one, which the next start removes.
    """
    found = [
        path
        for path in (folder / "small").iterdir()
        if path.name not in faults.EVIDENCE | {LOCK_NAME}
    ]
    assert not [path for path in found if path.suffix == ".tmp"]
    alone = [path for path in found if not path.with_suffix(".pth").exists()]
    assert len(alone) <= (part == "deletion"), alone


def check_words(part: str, told: list[str]) -> None:
    """Check that the user has been told, once and loudly; a lock file that stays hurts nobody."""
    if part == "lock":
        assert not told
        return
    words = {
        "commit": "ERROR The checkpoint",
        "sync": "ERROR The checkpoint",
        "deletion": "WARNING The old checkpoint",
        "note": "ERROR Could not mark the run as finished",
    }[part]
    (text,) = told
    assert text.startswith(words)
    assert "Errno" in text


def play(folder: Path, mode: str, wholes: dict[str, Whole], number: int, shift: int | None) -> None:
    """Let every third operation of a save go wrong in one way in turn, or all in all ways."""
    whole = wholes[mode]
    for place, operation in enumerate(whole.saves[number]):
        if shift is not None and (place + number) % 3:
            continue
        kinds = KINDS if shift is None else (KINDS[(place + shift) % len(KINDS)],)
        for kind in kinds:
            fault = Fault(operation.number, kind)
            root = folder / f"{operation.number} {kind}"
            if kind in KILLS:
                kill(root, mode, whole, fault)
            else:
                fail(root, mode, whole, number, fault)


@pytest.mark.parametrize(("mode", "number", "shift"), [("async", 2, 1), ("sync", 3, 3)])
def test_each_operation_of_a_save_may_go_wrong_in_one_way(
    mode: str, number: int, shift: int, wholes: dict[str, Whole], folder: Path
) -> None:
    play(folder, mode, wholes, number, shift)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(_SAVES)))
@pytest.mark.parametrize("mode", _MODES)
def test_each_operation_of_a_save_may_go_wrong_in_every_way(
    mode: str, number: int, wholes: dict[str, Whole], folder: Path
) -> None:
    play(folder, mode, wholes, number, None)
