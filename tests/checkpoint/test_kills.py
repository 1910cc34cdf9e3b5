"""A kill between any two file operations leaves a run that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.checkpoint import file_names
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.errors import DamagedCheckpointError
from tests.checkpoint import kill_child
from tests.checkpoint.helpers import is_same, make_payload, names, save
from tests.checkpoint.sharded_helpers import is_whole, save_sharded
from tests.support.killed_scenes import Scene, play

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")


@pytest.fixture(scope="module")
def scenes() -> Iterator[dict[str, Scene]]:
    with play(kill_child.main) as (root, results):
        assert all(result["status"] == 0 for result in results.values()), results
        yield {
            name: Scene(root / name, set(result["hit"]), result["codes"])
            for name, result in results.items()
        }


def committed(folder: Path) -> list[int]:
    return [path[1] for path in map(file_names.parse, file_names.find_checkpoints(folder)) if path]


def test_a_kill_before_or_after_any_operation_of_a_save_loses_no_committed_checkpoint(
    scenes: dict[str, Scene],
) -> None:
    scene = scenes["save"]
    assert scene.hit == set(kill_child.OPERATIONS) - {"remove_empty_folder"}
    assert len(scene.codes) > 60
    assert set(scene.codes.values()) == {-9}
    seen = set()
    for point in scene.codes:
        folder, report = scene.root / point / "model", scene.root / point / "returned.txt"
        returned = [int(line) for line in report.read_text().split()] if report.exists() else []
        present = committed(folder)
        assert max(present, default=0) >= max(returned, default=0), point
        check_recovery(RunFolder(folder, CheckpointStore(keep_last=1)), present, point)
        seen.add(max(present, default=0))
    assert seen == {0, 1, 2}


def check_recovery(folder: RunFolder, present: list[int], point: str) -> None:
    """What the next start does: it tidies, loads the newest in full, and goes on saving."""
    folder.clean()
    found = names(folder.path) if folder.path.exists() else []
    stems = {f"run_epoch_1_iter_{iteration}" for iteration in present}
    assert set(found) == {stem + end for stem in stems for end in (".pth", ".json")}, point
    loaded = folder.load_newest()
    if not present:
        assert loaded is None
    else:
        assert loaded is not None
        assert loaded.sidecar is not None, point
        assert is_same(loaded.payload, make_payload(1, max(present))), point
    save(folder, 1, 9)
    again = RunFolder(folder.path).load_newest()
    assert again is not None
    assert is_same(again.payload, make_payload(1, 9)), point


def test_a_kill_while_files_are_put_aside_never_brings_a_damaged_one_back(
    scenes: dict[str, Scene],
) -> None:
    scene = scenes["repair"]
    assert {"replace", "unlink", "fsync_folder", "make_folder"} <= scene.hit
    assert set(scene.codes.values()) == {-9}
    for point in scene.codes:
        folder = RunFolder(scene.root / point / "model")
        present = committed(folder.path)
        folder.clean()
        if present:
            loaded = folder.load_newest()
            assert loaded is not None, point
            newest = max(committed(folder.path))
            assert is_same(loaded.payload, make_payload(1, newest)), point
        elif folder.path.exists() and any(folder.path.glob("*.pth.damaged")):
            with pytest.raises(DamagedCheckpointError):
                folder.load_newest()
        else:
            assert folder.load_newest() is None, point


def test_a_kill_at_any_operation_of_any_rank_leaves_the_old_or_the_new_sharded_checkpoint(
    scenes: dict[str, Scene],
) -> None:
    scene = scenes["sharded save"]
    of_pytorch = {name for _, name in kill_child.OF_PYTORCH}
    assert scene.hit == set(kill_child.OPERATIONS) | of_pytorch
    assert len(scene.codes) > 60
    assert set(scene.codes.values()) == {-9}
    seen = set()
    for point in scene.codes:
        folder = RunFolder(scene.root / point / "model", CheckpointStore(keep_last=1))
        present = committed(folder.path)
        assert present in ([1], [1, 2], [2]), point
        has_returned = (scene.root / point / "returned.txt").exists()
        assert present == [2] if has_returned else True, point
        seen.add(tuple(present))
        folder.clean()
        stems = [f"run_epoch_1_iter_{iteration}" for iteration in present]
        assert set(names(folder.path)) == {s + e for s in stems for e in (".ckpt", ".json")}, point
        loaded = folder.load_newest()
        assert loaded is not None
        assert loaded.sidecar is not None, point
        assert is_whole(loaded.payload, max(present)), point
        save_sharded(folder, 1, 9, 3)
        assert folder.clean()[-1].name == "run_epoch_1_iter_9.ckpt", point
    assert seen == {(1,), (1, 2), (2,)}


def test_a_kill_while_a_damaged_folder_is_put_aside_never_brings_it_back(
    scenes: dict[str, Scene],
) -> None:
    scene = scenes["sharded repair"]
    assert {"replace", "unlink", "remove_empty_folder", "fsync_folder"} <= scene.hit
    assert set(scene.codes.values()) == {-9}
    for point in scene.codes:
        folder = RunFolder(scene.root / point / "model")
        folder.clean()
        loaded = folder.load_newest()
        assert loaded is not None
        assert is_same(loaded.payload, make_payload(1, 1)), point
        left = [name for name in names(folder.path) if not name.endswith(".damaged")]
        assert left == ["run_epoch_1_iter_1.json", "run_epoch_1_iter_1.pth"], point
