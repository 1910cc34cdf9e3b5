"""Which checkpoints may go."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from helios.checkpoint import file_names
from helios.checkpoint.retention import CheckpointStore, Entry, KeepBest, plan
from helios.checkpoint.store import RunFolder
from tests.checkpoint.helpers import make_payload, make_sidecar, save_payload


def make(*places: tuple[int, int]) -> list[Entry]:
    return [Entry(Path(f"r_epoch_{epoch}_iter_{it}.pth")) for epoch, it in places]


def known(iteration: int, count: int | None = None, **metrics: float) -> Entry:
    path = Path(f"r_epoch_1_iter_{iteration}.pth")
    return Entry(path, make_sidecar(1, iteration, count=count, metrics=metrics))


ENTRIES = make((1, 5), (1, 10), (2, 11), (10, 12), (9, 99))
BEST = KeepBest(2, "accuracy", "max")


def numbers(entries: list[Entry]) -> list[tuple[int, int]]:
    return [entry.place for entry in entries]


def kept(entries: list[Entry], options: CheckpointStore, *protected: Path) -> list[int]:
    gone = plan(random.Random(1).sample(entries, len(entries)), options, protected)
    return [entry.place[1] for entry in sorted(entries) if entry not in gone]


@pytest.mark.shows("S9")
@pytest.mark.parametrize(
    ("keep_last", "deleted"),
    [
        (None, []),
        (2, [(1, 5), (1, 10), (2, 11)]),
        (1, [(1, 5), (1, 10), (2, 11), (9, 99)]),
    ],
)
def test_the_newest_by_epoch_and_iteration_stay(
    keep_last: int | None, deleted: list[tuple[int, int]]
) -> None:
    shuffled = random.Random(1).sample(ENTRIES, len(ENTRIES))
    assert numbers(plan(shuffled, CheckpointStore(keep_last=keep_last))) == deleted


@pytest.mark.shows("S9")
def test_every_nth_completed_unit_stays_and_what_lies_in_mid_epoch_goes() -> None:
    entries = [known(10, 1), known(15), known(20, 2), known(30, 3), known(40, 4), known(45)]
    assert kept(entries, CheckpointStore(keep_every=2)) == [20, 40, 45]
    assert kept(entries, CheckpointStore(keep_every=3)) == [30, 45]


@pytest.mark.shows("S9")
def test_the_best_stay_by_the_mode() -> None:
    scores = [0.3, 0.9, 0.1, 0.5, 0.7, 0.4]
    entries = [known(number, accuracy=score) for number, score in enumerate(scores)]
    assert kept(entries, CheckpointStore(keep_best=BEST)) == [1, 4, 5]
    lowest = CheckpointStore(keep_best=KeepBest(2, "accuracy", "min"))
    assert kept(entries, lowest) == [0, 2, 5]


@pytest.mark.shows("U13", "U25")
@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equal_scores_the_earlier_stays(mode: str) -> None:
    entries = [known(number, loss=0.5) for number in range(6)]
    best = CheckpointStore(keep_best=KeepBest(2, "loss", mode))
    assert kept(entries, best) == [0, 1, 5], "the newest stays in any case"


@pytest.mark.shows("U13")
@pytest.mark.parametrize("mode", ["max", "min"])
def test_nan_and_a_missing_score_are_never_best(mode: str) -> None:
    entries = [
        known(1, loss=math.nan),
        known(2),
        known(3, loss=1.0),
        known(4, loss=math.nan),
        known(5, other=9.0),
        known(6, loss=math.nan),
    ]
    assert kept(entries, CheckpointStore(keep_best=KeepBest(4, "loss", mode))) == [3, 6]


def save_scored(folder: RunFolder, iteration: int, **changes: Any) -> Path:
    return save_payload(
        folder,
        make_payload(1, iteration),
        stem=file_names.stem("run", 1, iteration),
        sidecar=make_sidecar(1, iteration, **changes),
    )


def iterations(folder: RunFolder) -> list[int]:
    return [*map(file_names.iteration_of, file_names.list_checkpoints(folder.path))]


@pytest.mark.shows("S9", "U13")
def test_a_folder_keeps_what_the_sidecars_say(tmp_path: Path) -> None:
    options = CheckpointStore(keep_every=4, keep_best=KeepBest(1, "score", "max"))
    folder = RunFolder(tmp_path, options)
    scores = {1: 0.1, 2: 0.9, 3: 0.4, 4: 0.2, 5: 0.3, 6: 0.5}
    for iteration, score in scores.items():
        save_scored(folder, iteration, count=iteration, metrics={"score": score})
    assert iterations(folder) == [2, 4, 6]
    # A later start reads what an earlier one has written.
    again = RunFolder(tmp_path, options)
    save_scored(again, 7, count=7, metrics={"score": 0.95})
    assert iterations(again) == [4, 7]


@pytest.mark.shows("U13")
def test_a_damaged_and_a_missing_sidecar_keep_their_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    paths = [save_scored(folder, iteration, count=iteration) for iteration in (1, 3, 5)]
    file_names.sidecar_path(paths[0]).write_text("{")
    file_names.sidecar_path(paths[1]).unlink()
    strict = RunFolder(tmp_path, CheckpointStore(keep_every=100))
    save_scored(strict, 7, count=7)
    assert iterations(strict) == [1, 3, 7]


@pytest.mark.parametrize(
    "rules", [{"keep_last": 2}, {"keep_every": 4}, {"keep_best": KeepBest(1, "score", "max")}]
)
def test_files_of_others_are_neither_deleted_nor_counted(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    others = RunFolder(tmp_path)
    for iteration in (2, 99):
        save_payload(
            others,
            make_payload(0, iteration),
            stem=file_names.stem("pretrained", 0, iteration),
            sidecar=make_sidecar(0, iteration, run_name="pretrained", metrics={"score": 9.0}),
        )
    (tmp_path / "mine_epoch_0_iter_1.pth").touch()
    (tmp_path / "mine_epoch_9_iter_9.pth").touch()
    foreign = {path.name for path in tmp_path.iterdir()}
    folder = RunFolder(tmp_path, CheckpointStore(**rules))
    for iteration in range(1, 6):
        save_scored(folder, iteration, count=iteration, metrics={"score": -iteration})
    own = {path for path in tmp_path.iterdir() if path.name not in foreign}
    assert {path.name for path in tmp_path.iterdir()} >= foreign
    assert len(own) == 4, "two checkpoints of the run and their sidecars"
    assert tmp_path / "run_epoch_1_iter_5.pth" in own
