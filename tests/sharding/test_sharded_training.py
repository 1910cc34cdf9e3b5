"""Sharded networks train to the bits of whole ones, on any number of processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helios.cli.commands import main
from helios.core.sharded_tensors import local_of
from helios.plugins import EMA, GradientNormMonitor, NaNGuard, Plugin, nan_guard
from helios.sharding.fsdp_adapter import ShardedUnit
from helios.sharding.sharded_gradients import NodeSums
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import WIDTH, Kill, Sharded, fit, read_bits, train

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


def fit_with_stock_sums(rank: int, folder: Path, setting: Sharded) -> None:
    def use(self: ShardedUnit, reduction: object) -> None:
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_gradient_divide_factor(1.0)
        self.module.set_reduce_scatter_unused_params(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedUnit, "use", use)
        fit(rank, folder, setting)


@pytest.mark.shows("P86")
def test_the_reduce_scatter_of_torch_would_give_other_bits(tmp_path: Path) -> None:
    setting = Sharded(3, total_steps=1)
    train(tmp_path / "ours", 3, setting)
    run_ranks(fit_with_stock_sums, 3, tmp_path / "stock", setting)
    assert read_bits(tmp_path / "stock") != read_bits(tmp_path / "ours")


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
def test_a_killed_run_goes_on_in_other_processes(
    tmp_path: Path, before: int, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Sharded(3, total_steps=5, options=EVERYTHING)
    train(tmp_path / "undisturbed", 1, setting)
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, setting, Kill(iteration=6, rank=before - 1))
    train(tmp_path / "killed", after, setting)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")
    assert main(["verify", str(tmp_path / "killed")]) == 0
    assert "buffers match (6)" in capsys.readouterr().out


@pytest.mark.shows("P87")
def test_a_run_may_change_between_whole_and_sharded(tmp_path: Path) -> None:
    setting = Sharded(3, total_steps=3)
    train(tmp_path / "undisturbed", 1, replace(setting, total_steps=5))
    train(tmp_path / "changed", 2, setting)
    train(tmp_path / "changed", 3, replace(setting, total_steps=4, sharding="none"))
    train(tmp_path / "changed", 3, replace(setting, total_steps=5))
    assert read_bits(tmp_path / "changed")[0] == read_bits(tmp_path / "undisturbed")[0]


@pytest.mark.shows("P87")
@pytest.mark.parametrize(("option", "name"), [("clip_norm", "norm"), ("accumulation_steps", "acc")])
def test_what_sums_in_another_order_must_not_change(tmp_path: Path, option: str, name: str) -> None:
    setting = Sharded(2, total_steps=1, options={option: 2})
    train(tmp_path, 1, setting)
    with pytest.raises(RankError, match=name):
        train(tmp_path, 1, replace(setting, total_steps=2, sharding="none"))


def make_plugins() -> list[Any]:
    return [EMA(0.9), NaNGuard("skip"), GradientNormMonitor(per_parameter=True)]


@pytest.mark.shows("P89")
def test_plugins_see_the_same_bits(tmp_path: Path) -> None:
    setting = Sharded(3, num_valid=13, options={"print_frequency": 1})
    alone = train(tmp_path / "alone", 1, setting, *make_plugins())
    several = train(tmp_path / "several", 2, setting, *make_plugins())
    assert read_bits(tmp_path / "several") == read_bits(tmp_path / "alone")
    assert several[0]["loss"] == several[1]["loss"] == alone[0]["loss"]


def fit_with_bad_gradients(rank: int, folder: Path, setting: Sharded) -> list[str]:
    """Gradients are NaN in a step: a row in the shard of the first process, one in the last's."""
    guard, said = NaNGuard("skip"), []

    def spoil(gradient: torch.Tensor, row: int) -> torch.Tensor:
        if guard.context.state.global_iteration == 2:
            gradient = gradient.clone()
            gradient[row] = float("nan")
        return gradient

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight, hidden = self.weight * 1.0, 2 * WIDTH + 3
        row = {(WIDTH, hidden): 0, (hidden, WIDTH): -1}.get((self.in_features, self.out_features))
        if row is not None and weight.requires_grad:
            weight.register_hook(partial(spoil, row=row))
        return nn.functional.linear(x, weight, self.bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nan_guard._LOGGER, "warning", lambda text, *args: said.append(text % args))
        patch.setattr(nn.Linear, "forward", forward)
        fit(rank, folder, setting, guard)
    return said


@pytest.mark.shows("P89")
def test_shards_that_are_not_finite_are_named_by_all(tmp_path: Path) -> None:
    setting = Sharded(3)
    (alone,) = run_ranks(fit_with_bad_gradients, 1, tmp_path / "alone", setting)
    several = run_ranks(fit_with_bad_gradients, 3, tmp_path / "several", setting)
    assert read_bits(tmp_path / "several") == read_bits(tmp_path / "alone")
    assert several == [alone] * 3
    assert len(alone) == 1
    assert "net.layers.0.up.weight, net.layers.0.down.weight" in alone[0]


@pytest.mark.shows("P89")
@pytest.mark.parametrize("num_valid", [13, 8, 7])
def test_validations_end_together_and_count_once(tmp_path: Path, num_valid: int) -> None:
    setting = Sharded(3, num_valid=num_valid, total_steps=2)
    (alone,) = train(tmp_path / "alone", 1, setting)
    several = train(tmp_path / "several", 2, setting)
    assert [each["loss"] for each in several] == [alone["loss"]] * 2
    assert sum(each["num_seen"] for each in several) == alone["num_seen"] == num_valid


@pytest.mark.shows("P89")
def test_a_validation_with_too_few_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="must have a batch for each process"):
        train(tmp_path, 3, Sharded(3, num_valid=2))


@pytest.mark.shows("P89")
def test_the_first_validation_may_be_a_trial(tmp_path: Path) -> None:
    setting = Sharded(3, num_valid=9, total_steps=2)
    train(tmp_path / "plain", 2, setting)
    train(tmp_path / "tried", 2, replace(setting, options={"sanity_steps": 2}))
    assert read_bits(tmp_path / "tried") == read_bits(tmp_path / "plain")


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


def fit_counting_sums(rank: int, folder: Path, setting: Sharded) -> int:
    most, release = 0, NodeSums.release_buffers

    def count(self: NodeSums, buffers: list[torch.Tensor]) -> None:
        nonlocal most
        release(self, buffers)
        stored = {value.untyped_storage().data_ptr() for value in self._values.values()}
        bytes_of = sum(value.untyped_storage().nbytes() for value in self._values.values())
        # No sum keeps more than itself alive.
        assert bytes_of == sum(value.nbytes for value in self._values.values())
        most = max(most, len(stored))

    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeSums, "release_buffers", count)
        fit(rank, folder, setting, Measure(folder))
    return most


@pytest.mark.shows("P90")
def test_a_process_holds_its_part_and_few_sums(tmp_path: Path) -> None:
    folder, setting = tmp_path / "run", Sharded(8, total_steps=1, num_samples=32)
    folder.mkdir()
    most = run_ranks(fit_counting_sums, 3, folder / "sums", setting)
    assert 1 <= max(most) <= math.log2(8) + 1
    for path in sorted((folder / "sums").glob("memory-*.json")):
        counts = json.loads(path.read_text())
        assert counts["own"] <= counts["whole"] / 3 + counts["padding"]
