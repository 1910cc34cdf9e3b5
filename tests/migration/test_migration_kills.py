"""A kill at any file operation of a migration loses nothing, and no start misreads what is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.checkpoint import file_names
from helios.checkpoint.store import RunFolder
from helios.errors import IncompatibleCheckpointError
from helios.migration.folder_migration import BACKUP_FOLDER, Result, migrate_checkpoints
from tests.migration import migration_child
from tests.support import old_files as old
from tests.support import tier
from tests.support.killed_scenes import Scene, play

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")

_SOURCES = {name.split("/")[1]: old.GOLDEN / name for name in migration_child.NAMES}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with play(migration_child.main) as (root, result):
        assert result["status"] == 0, result
        yield Scene(root, set(result["hit"]), result["codes"])


def check_start(folder: Path, point: str) -> str:
    """What a start finds: the old file, named as such, or the new one; nothing is put aside."""
    RunFolder(folder).clean()
    names = sorted(path.name for path in folder.iterdir())
    try:
        loaded = RunFolder(folder).load_newest()
    except IncompatibleCheckpointError as error:
        state = "old" if "chkpt_migrator" in str(error) else str(error)
    else:
        assert loaded is not None, point
        raw = old.raw_model(_SOURCES[loaded.path.name])
        assert old.is_same(raw, loaded.payload["model"]), point
        state = "new" if loaded.sidecar is not None else "without sidecar"
    assert sorted(path.name for path in folder.iterdir()) == names, point
    return state


def test_a_kill_at_any_file_operation_of_a_migration_loses_nothing(scene: Scene) -> None:
    assert {"create", "write", "fsync", "replace", "unlink", "fsync_folder"} <= scene.hit
    assert {"make_folder", "write_text_durably"} <= scene.hit
    assert len(scene.codes) > 70
    assert set(scene.codes.values()) == {-9}
    seen = set()
    for number, point in enumerate(scene.codes):
        folder = scene.root / point / "linear"
        state = check_start(folder, point)
        seen.add(state)
        if state != "without sidecar" and number % 3 and not tier.is_full():
            continue
        for name, source in _SOURCES.items():
            places = (folder / name, folder / BACKUP_FOLDER / name)
            kept = [path for path in places if path.exists()]
            assert any(path.read_bytes() == source.read_bytes() for path in kept), point
        results = [report.result for report in migrate_checkpoints(folder)]
        assert {Result.MIGRATED, Result.COMPLETED, Result.CURRENT} >= set(results), point
        assert check_start(folder, point) == "new", point
        assert {report.result for report in migrate_checkpoints(folder)} == {Result.CURRENT}
        for name, source in _SOURCES.items():
            loaded = RunFolder(folder).load(folder / name)
            assert loaded.sidecar is not None, point
            assert loaded.sidecar.migrated_from is not None
            assert old.is_same(old.raw_model(source), loaded.payload["model"]), point
            backup = folder / BACKUP_FOLDER / name
            assert backup.read_bytes() == source.read_bytes(), point
        assert not [p for p in folder.iterdir() if file_names.is_temporary(p)], point
    assert seen == {"old", "new", "without sidecar"}
