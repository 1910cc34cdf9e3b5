"""A kill between any two file operations of an export leaves a whole folder or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.checkpoint.export_folders import write_folder
from tests.checkpoint import export_kill_child, kill_child
from tests.checkpoint.helpers import names
from tests.checkpoint.test_export_folders import LAYOUTS, is_equal, load, small, value_in
from tests.support.killed_scenes import Scene, play


@pytest.fixture(scope="module")
def scenes() -> Iterator[dict[str, Scene]]:
    with play(export_kill_child.main) as (root, results):
        yield {
            name: Scene(root / name, set(result["hit"]), result["codes"])
            for name, result in results.items()
        }


@pytest.mark.shows("P99")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_kill_leaves_a_whole_export_or_none_and_the_next_one_tidies_up(
    kind: str, scenes: dict[str, Scene]
) -> None:
    scene = scenes[kind]
    assert scene.hit == set(kill_child.OPERATIONS)
    assert len(scene.codes) >= 50
    assert set(scene.codes.values()) == {-9}
    seen = set()
    for point in scene.codes:
        folder = scene.root / point / "exports"
        seen.add(number := exported_number(kind, folder / "out"))
        assert number == 2 if (scene.root / point / "returned.txt").exists() else True, point
        write_folder(folder / "out", small(3.0), LAYOUTS[kind], metadata={}, replaces=True)
        assert value_in(kind, folder / "out") == 3.0
        assert names(folder) == ["out"], point
    assert seen == {0, 1, 2}


def exported_number(kind: str, path: Path) -> int:
    """Return which export is there as a whole; 0 if there is nothing."""
    if not path.exists():
        return 0
    states = {number: export_kill_child.make_state(number) for number in (1, 2)}
    found = load(kind, path, states[1])
    (number,) = (number for number, state in states.items() if is_equal(found, state))
    return number
