"""A kill between any two file operations of an export leaves a whole folder or none."""

from __future__ import annotations

import pytest

from tests.checkpoint import export_kill_child
from tests.checkpoint.helpers import names
from tests.checkpoint.test_export_folders import export_folder, is_equal, load, small
from tests.support.killed_scenes import play


@pytest.mark.shows("P99")
def test_a_kill_leaves_a_whole_export_or_none_and_the_next_one_tidies_up() -> None:
    with play(export_kill_child.main) as (root, results):
        codes = results["export"]["codes"]
        assert len(codes) >= 10
        assert set(codes.values()) == {-9}
        found = set()
        for point in codes:
            folder = root / "export" / point / "exports"
            out = folder / "out"
            found.add(out.exists())
            if out.exists():
                assert is_equal(load("huggingface", out), export_kill_child.make_state()), point
            else:
                assert not (folder.parent / "returned.txt").exists()
                export_folder(out, small())
            assert names(folder) == ["out"], point
    assert found == {True, False}
