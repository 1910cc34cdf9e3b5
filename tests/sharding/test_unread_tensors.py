"""Whoever sees a checkpoint of shards while it is loaded gets the values, or an error by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import Sharded, ShardedModel, fit, read_bits, train

NAME = "layers.0.up.weight"


class OwnState(ShardedModel):
    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.net.load_state_dict(state_dict["net"])
        if not fast_init:
            self.optimizer.load_state_dict(state_dict["optimizer"])


class Reading(OwnState):
    """Computes with a tensor that has not been read."""

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        state_dict["net"][NAME] = state_dict["net"][NAME] * 0.5
        super().load_state_dict(state_dict, fast_init)


class Halving(Quiet):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["model"]["objects"]["net"]
        assert (saved[NAME].shape, saved[NAME].dtype) == ((25, 11), torch.float32)
        saved[NAME].mul_(0.5)


def fit_as(rank: int, kind: type[ShardedModel], *args: Any) -> None:
    fit(rank, *args, kind=kind)


@pytest.mark.shows("P115")
def test_a_model_with_a_state_dict_of_its_own_gets_what_it_has_saved(tmp_path: Path) -> None:
    setting = Sharded(3, total_steps=3)
    train(tmp_path / "undisturbed", 1, Sharded(3, total_steps=3, sharding="none"))
    run_ranks(fit_as, 2, OwnState, tmp_path / "run", Sharded(3, total_steps=2))
    run_ranks(fit_as, 3, OwnState, tmp_path / "run", setting)
    assert read_bits(tmp_path / "run") == read_bits(tmp_path / "undisturbed")


@pytest.mark.shows("P115")
def test_tensors_that_are_not_read_are_refused_by_name_where_values_are_needed(
    tmp_path: Path,
) -> None:
    setting = Sharded(2, total_steps=1)
    run_ranks(fit_as, 2, OwnState, tmp_path / "own", setting)
    with pytest.raises(RankError, match=rf"model\.net\.{NAME} of a sharded .* before it is used"):
        run_ranks(fit_as, 2, Reading, tmp_path / "own", Sharded(2, total_steps=2))
    train(tmp_path / "hook", 2, setting)
    with pytest.raises(RankError, match=rf"model\.objects\.net\.{NAME} .*\(mul_\).*value_of"):
        train(tmp_path / "hook", 2, Sharded(2, total_steps=2), Halving())
