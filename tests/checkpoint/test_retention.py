"""Which checkpoints may go (USERS.md 13)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from helios.checkpoint.retention import Entry, plan


def make(*places: tuple[int, int]) -> list[Entry]:
    return [Entry(epoch, it, Path(f"r_epoch_{epoch}_iter_{it}.pth")) for epoch, it in places]


ENTRIES = make((1, 5), (1, 10), (2, 11), (10, 12), (9, 99))


def numbers(entries: list[Entry]) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.iteration) for entry in entries]


@pytest.mark.parametrize(
    ("keep_last", "deleted"),
    [
        (None, []),
        (9, []),
        (5, []),
        (2, [(1, 5), (1, 10), (2, 11)]),
        (1, [(1, 5), (1, 10), (2, 11), (9, 99)]),
    ],
)
def test_the_newest_by_epoch_and_iteration_stay(
    keep_last: int | None, deleted: list[tuple[int, int]]
) -> None:
    shuffled = random.Random(1).sample(ENTRIES, len(ENTRIES))
    assert numbers(plan(shuffled, keep_last=keep_last, protected=())) == deleted


def test_the_one_resumed_from_stays_and_does_not_push_out_another() -> None:
    protected = {ENTRIES[0].path}
    assert numbers(plan(ENTRIES, keep_last=2, protected=protected)) == [(1, 10), (2, 11)]


@pytest.mark.parametrize("keep_last", [1, 0, -3])
def test_the_last_one_is_never_deleted(keep_last: int) -> None:
    assert plan(ENTRIES[:1], keep_last=keep_last, protected=()) == []


def test_nothing_there_is_nothing_to_delete() -> None:
    assert plan([], keep_last=1, protected=()) == []


def test_the_sidecar_lies_beside_its_checkpoint() -> None:
    entry = Entry(1, 2, Path("a/r_epoch_1_iter_2_acc_0.89.pth"))
    assert entry.sidecar_path == Path("a/r_epoch_1_iter_2_acc_0.89.json")
