"""Scripts whose results were frozen: every version has their bits, from the start and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import frozen
from tests.support import tier


@pytest.mark.shows("S49")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", frozen.RUNS)
def test_a_frozen_script_gives_its_bits(name: str, tmp_path: Path) -> None:
    expected = frozen.load(name)
    counts = frozen.RUNS[name]
    assert frozen.run(name, tmp_path / "whole", counts[0]) == expected
    paths = frozen.checkpoints(name, tmp_path / "whole")
    assert paths
    for path in paths if tier.is_full() else paths[::3]:
        for count in counts:
            root = tmp_path / f"{path.stem}-{count}"
            found = frozen.resume(name, path, root, count)
            assert found["end"] == expected["end"] != []
            assert 0 < len(found["steps"]) < len(expected["steps"])
            # Processes may take the replicas of an iteration in another order.
            assert sorted(found["steps"]) == sorted(expected["steps"][-len(found["steps"]) :])
