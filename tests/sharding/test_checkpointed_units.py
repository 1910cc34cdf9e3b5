"""Units whose activations are computed again in backward train to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sharding.test_sharded_training import EVERYTHING, MATRIX, cases
from tests.support.ranks import RankError
from tests.support.sharded import Kill, Sharded, read_bits, train

PLAIN = Sharded(3, sharding="none", again="none")


@pytest.mark.full
@pytest.mark.parametrize(("num_replicas", "num_processes"), MATRIX)
@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize("again", ["units", "both"])
def test_units_that_are_computed_again_have_the_same_bits(
    tmp_path: Path, num_replicas: int, num_processes: int, sharding: str, again: str
) -> None:
    plain = replace(PLAIN, num_replicas=num_replicas)
    train(tmp_path / "plain", 1, plain)
    train(tmp_path / "again", num_processes, replace(plain, sharding=sharding, again=again))
    assert read_bits(tmp_path / "again") == read_bits(tmp_path / "plain")


@pytest.mark.shows("P101")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], [(3, 2), (2, 3), (2, 1), (1, 3)]))
@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.full)])
def test_a_killed_run_goes_on_with_it_and_without(
    tmp_path: Path, before: int, after: int, sharding: str
) -> None:
    """The option is none of the run: it may change at a resume."""
    setting = Sharded(3, total_steps=4, sharding=sharding, options=EVERYTHING, again="none")
    train(tmp_path / "undisturbed", 1, setting)
    killed = replace(setting, again="units")
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, killed, Kill(iteration=4, rank=before - 1))
    train(tmp_path / "killed", after, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
