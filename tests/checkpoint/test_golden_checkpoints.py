"""A checkpoint of each schema, written once, loads and resumes in this version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helios.checkpoint import file_names, loading
from tests.support import golden_checkpoint as golden

FILES = sorted(golden.FOLDER.glob("schema_*/*.pth"))


@pytest.mark.shows("S22")
def test_there_is_a_golden_file_of_every_schema() -> None:
    found = {path.parent.name for path in FILES}
    assert found == {f"schema_{number}" for number in range(1, file_names.SCHEMA + 1)}


@pytest.mark.shows("S22")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_file_of_every_schema_loads_as_it_was(path: Path) -> None:
    loaded = loading.load(path)
    assert loaded.payload["schema"] == file_names.SCHEMA
    assert loaded.sidecar is not None
    *parts, keys = path.with_suffix(golden.DIGEST_SUFFIX).read_text("utf-8").splitlines()
    *found, found_keys = golden.describe(loaded.payload).splitlines()
    assert found == parts
    assert set(keys.split()) <= set(found_keys.split()), "a later schema adds keys only"


@pytest.mark.shows("S22")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_run_of_every_schema_goes_on_where_it_was(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old" / "golden"
    folder.mkdir(parents=True)
    for part in (path, file_names.sidecar_path(path)):
        shutil.copyfile(part, folder / part.name)
    resumed = golden.train(tmp_path / "old", 12)
    fresh = golden.train(tmp_path / "fresh", 12)
    assert sorted(resumed.ids) == [9, 10, 11, 12]
    assert resumed.ids == {number: fresh.ids[number] for number in resumed.ids}
    assert resumed.seen["count"] == 12
    assert resumed.seen["set"] == set(range(1, 13))
