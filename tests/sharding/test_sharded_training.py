"""Sharded networks train to the bits of whole ones, on any number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helios.cli.commands import main
from helios.plugins import EMA, GradientNormMonitor, NaNGuard
from tests.support.ranks import RankError
from tests.support.sharded import Kill, Sharded, read_bits, train

MATRIX = [(v, p) for v in (3, 4, 5, 8) for p in range(1, min(v, 4) + 1)]
EVERYTHING = {"accumulation_steps": 2, "clip_norm": 0.5}


def cases(quick: list[tuple[int, int]], full: list[tuple[int, int]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.full) for case in full]


@pytest.mark.shows("P86")
@pytest.mark.parametrize(("num_replicas", "num_processes"), cases([(4, 4)], MATRIX))
def test_sharded_networks_have_the_bits_of_whole_ones(
    tmp_path: Path, num_replicas: int, num_processes: int
) -> None:
    setting = Sharded(num_replicas)
    (whole,) = train(tmp_path / "whole", 1, replace(setting, sharding="none"))
    sharded = train(tmp_path / "sharded", num_processes, setting)
    assert read_bits(tmp_path / "sharded") == read_bits(tmp_path / "whole")
    # Steps that a process repeats for others leave no trace.
    assert sum(each["num_trained"] for each in sharded) == whole["num_trained"]


RESTARTS = [(3, 2), (2, 3), (2, 1), (1, 3)]


@pytest.mark.shows("P87", "P93")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], RESTARTS))
def test_a_killed_run_goes_on_in_other_processes(tmp_path: Path, before: int, after: int) -> None:
    setting = Sharded(3, total_steps=5, options=EVERYTHING)
    train(tmp_path / "undisturbed", 1, setting)
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, setting, Kill(iteration=6, rank=before - 1))
    train(tmp_path / "killed", after, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
    assert main(["verify", str(tmp_path / "killed")]) == 0


def make_plugins() -> list[Any]:
    return [EMA(0.9), NaNGuard("skip"), GradientNormMonitor(per_parameter=True)]


@pytest.mark.shows("P89")
def test_plugins_see_the_same_bits(tmp_path: Path) -> None:
    setting = Sharded(3, num_valid=13, options={"print_frequency": 1})
    alone = train(tmp_path / "alone", 1, setting, *make_plugins())
    several = train(tmp_path / "several", 2, setting, *make_plugins())
    assert read_bits(tmp_path / "several") == read_bits(tmp_path / "alone")
    assert several[0]["loss"] == several[1]["loss"] == alone[0]["loss"]


@pytest.mark.shows("P89")
@pytest.mark.parametrize("num_valid", [13, pytest.param(7, marks=pytest.mark.full)])
def test_validations_end_together_and_count_once(tmp_path: Path, num_valid: int) -> None:
    setting = Sharded(3, num_valid=num_valid, total_steps=2)
    (alone,) = train(tmp_path / "alone", 1, setting)
    several = train(tmp_path / "several", 2, setting)
    assert [each["loss"] for each in several] == [alone["loss"]] * 2
    assert sum(each["num_seen"] for each in several) == alone["num_seen"] == num_valid
