"""Units whose activations are computed again in backward train to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sharding.test_sharded_training import EVERYTHING, cases
from tests.support.ranks import RankError
from tests.support.sharded import Kill, Sharded, read_bits, train


@pytest.mark.shows("P101")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], [(3, 2), (2, 3), (2, 1), (1, 3)]))
@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.full)])
@pytest.mark.parametrize("again", ["units", pytest.param("both", marks=pytest.mark.full)])
def test_a_killed_run_goes_on_with_it_and_without(
    tmp_path: Path, before: int, after: int, sharding: str, again: str
) -> None:
    """The option is none of the run: it may change at a resume."""
    setting = Sharded(3, total_steps=4, sharding=sharding, options=EVERYTHING, again="none")
    train(tmp_path / "undisturbed", 1, setting)
    killed = replace(setting, again=again)
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, killed, Kill(iteration=4, rank=before - 1))
    train(tmp_path / "killed", after, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
