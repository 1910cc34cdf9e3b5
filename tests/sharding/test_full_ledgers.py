"""Full ledgers of sharded models: the digests of whole tensors, on any number of processes."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.storage import content_hash
from tests.sharding.test_sharded_training import EVERYTHING, MATRIX, cases
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import Kill, Sharded, fit, read_bits, train

FULL = {"ledger": "full"}


@pytest.mark.shows("P104")
@pytest.mark.parametrize(("num_replicas", "num_processes"), cases([(5, 3)], MATRIX))
def test_they_are_those_of_whole_models(
    tmp_path: Path, num_replicas: int, num_processes: int
) -> None:
    setting = Sharded(num_replicas, options=FULL)
    train(tmp_path / "whole", num_processes, replace(setting, sharding="none"))
    train(tmp_path / "sharded", num_processes, setting)
    assert read_bits(tmp_path / "sharded") == read_bits(tmp_path / "whole")
    lines = [json.loads(line) for line in read_bits(tmp_path / "sharded")[1].splitlines()[1:]]
    assert "net.layers.0.up.weight" in lines[0]["initial"]
    assert "net.layers.0.up.weight" in lines[0]["gradients"]
    assert "net.layers.0.never.weight" not in lines[0]["gradients"]
    digests = [line["parameters"]["net.layers.0.up.weight"] for line in lines if "loss" in line]
    assert len({lines[0]["initial"]["net.layers.0.up.weight"], *digests}) == 5
    assert len(lines[0]["batch"]) == num_replicas


@pytest.mark.shows("P104")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], [(3, 2), (2, 1), (1, 3)]))
def test_a_killed_run_continues_them_on_other_processes(
    tmp_path: Path, before: int, after: int
) -> None:
    setting = Sharded(3, options=FULL | EVERYTHING)
    train(tmp_path / "undisturbed", 1, setting)
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, setting, Kill(iteration=6, rank=before - 1))
    train(tmp_path / "killed", after, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")


def fit_with_one_whole(rank: int, folder: Path, setting: Sharded) -> int:
    """Train, and check that no more than one tensor is whole at a time."""
    gather, found = content_hash.whole_of, list[weakref.ref[Any]]()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        assert all(earlier() is None for earlier in found)
        whole = gather(tensor)
        if whole is not tensor:
            found.append(weakref.ref(whole))
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_hash, "whole_of", count)
        fit(rank, folder, setting)
    return len(found)


@pytest.mark.shows("P104")
def test_one_tensor_is_whole_at_a_time(tmp_path: Path) -> None:
    counts = run_ranks(fit_with_one_whole, 2, tmp_path, Sharded(3, total_steps=2, options=FULL))
    assert counts[0] == counts[1] > 100
