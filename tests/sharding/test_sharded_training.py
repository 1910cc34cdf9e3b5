"""Sharded networks train to the bits of whole ones, on any number of processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helios.cli.commands import main
from helios.core.sharded_tensors import local_of
from helios.plugins import EMA, GradientNormMonitor, NaNGuard, Plugin
from tests.support.ranks import RankError
from tests.support.sharded import Kill, Sharded, read_bits, train

QUICK = [(3, 2), (4, 4), (5, 4)]
MATRIX = [(v, p) for v in (3, 4, 5, 8) for p in range(1, min(v, 4) + 1)]
EVERYTHING = {"accumulation_steps": 2, "clip_norm": 0.5}


def cases(quick: list[tuple[int, int]], full: list[tuple[int, int]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.full) for case in full]


@pytest.mark.shows("P86")
@pytest.mark.parametrize(("num_replicas", "num_processes"), cases(QUICK, MATRIX))
def test_sharded_networks_have_the_bits_of_whole_ones(
    tmp_path: Path, num_replicas: int, num_processes: int
) -> None:
    setting = Sharded(num_replicas)
    (whole,) = train(tmp_path / "whole", 1, replace(setting, sharding="none"))
    sharded = train(tmp_path / "sharded", num_processes, setting)
    assert read_bits(tmp_path / "sharded") == read_bits(tmp_path / "whole")
    # Steps that a process repeats for others leave no trace.
    assert sum(each["num_trained"] for each in sharded) == whole["num_trained"]


@pytest.mark.shows("P86")
@pytest.mark.parametrize(
    ("num_replicas", "num_processes"), cases([(3, 2)], [case for case in MATRIX if case[1] > 1])
)
def test_accumulated_and_clipped_the_bits_are_those_of_one_process(
    tmp_path: Path, num_replicas: int, num_processes: int
) -> None:
    setting = Sharded(num_replicas, options=EVERYTHING)
    train(tmp_path / "alone", 1, setting)
    train(tmp_path / "several", num_processes, setting)
    assert read_bits(tmp_path / "several") == read_bits(tmp_path / "alone")


@pytest.mark.shows("P86")
@pytest.mark.parametrize("precision", ["bf16"])
def test_bfloat16_is_equal_too(tmp_path: Path, precision: str) -> None:
    setting = Sharded(3, has_norm=False, options={"precision": precision})
    train(tmp_path / "whole", 1, replace(setting, sharding="none"))
    train(tmp_path / "sharded", 3, setting)
    assert read_bits(tmp_path / "sharded") == read_bits(tmp_path / "whole")


RESTARTS = [(3, 2), (2, 3), (2, 1), (1, 3)]


@pytest.mark.shows("P87", "P93")
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*case, marks=() if case == (3, 2) else pytest.mark.full) for case in RESTARTS],
)
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
@pytest.mark.parametrize("num_valid", [13, 8, 7])
def test_validations_end_together_and_count_once(tmp_path: Path, num_valid: int) -> None:
    setting = Sharded(3, num_valid=num_valid, total_steps=2)
    (alone,) = train(tmp_path / "alone", 1, setting)
    several = train(tmp_path / "several", 2, setting)
    assert [each["loss"] for each in several] == [alone["loss"]] * 2
    assert sum(each["num_seen"] for each in several) == alone["num_seen"] == num_valid


class Measure(Plugin):
    """Writes how many elements of parameters and optimizer state a process holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__("measure")
        self.folder = folder

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_end(self) -> None:
        model = self.context.model
        state = [value for each in model.optimizer.state.values() for value in each.values()]
        tensors = [*model.net.parameters(), *(value for value in state if value.dim())]
        counts = {
            "own": sum(local_of(each.detach()).numel() for each in tensors),
            "whole": sum(each.numel() for each in tensors),
            "padding": sum(each[0].numel() for each in tensors),
        }
        (self.folder / f"memory-{self.context.global_rank}.json").write_text(json.dumps(counts))


@pytest.mark.shows("P90")
def test_a_process_holds_its_part(tmp_path: Path) -> None:
    train(tmp_path, 3, Sharded(8, total_steps=1, num_samples=32), Measure(tmp_path))
    paths = sorted(tmp_path.glob("memory-*.json"))
    assert len(paths) == 3
    for path in paths:
        counts = json.loads(path.read_text())
        assert counts["own"] <= counts["whole"] / 3 + counts["padding"]
