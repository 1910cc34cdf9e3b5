"""Units whose activations are computed again in backward train to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios import Unit
from helios.errors import ArgumentTypeError
from helios.plugins import EMA
from helios.startup import model_setup
from tests.sharding.test_sharded_training import EVERYTHING, MATRIX, cases
from tests.support.models import Fitting
from tests.support.ranks import RankError
from tests.support.runs import IndexModule, Setting
from tests.support.sharded import Kill, Sharded, read_bits, train

PLAIN = Sharded(3, sharding="none", again="none")


@pytest.mark.shows("P101")
@pytest.mark.parametrize(("num_replicas", "num_processes"), cases([(3, 2)], MATRIX))
@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize("again", ["units", pytest.param("both", marks=pytest.mark.full)])
def test_units_that_are_computed_again_have_the_same_bits(
    tmp_path: Path, num_replicas: int, num_processes: int, sharding: str, again: str
) -> None:
    plain = replace(PLAIN, num_replicas=num_replicas)
    train(tmp_path / "plain", 1, plain)
    train(tmp_path / "again", num_processes, replace(plain, sharding=sharding, again=again))
    assert read_bits(tmp_path / "again") == read_bits(tmp_path / "plain")


@pytest.mark.shows("P101")
@pytest.mark.parametrize(
    ("num_replicas", "num_processes"), cases([(3, 2)], [case for case in MATRIX if case[1] > 1])
)
def test_nested_accumulated_and_clipped_they_have_the_same_bits(
    tmp_path: Path, num_replicas: int, num_processes: int
) -> None:
    setting = Sharded(num_replicas, again="none", options=EVERYTHING)
    train(tmp_path / "plain", 1, setting)
    train(tmp_path / "again", num_processes, replace(setting, again="nested"))
    assert read_bits(tmp_path / "again") == read_bits(tmp_path / "plain")


@pytest.mark.shows("P101")
@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.full)])
def test_in_bfloat16_they_have_the_same_bits(tmp_path: Path, sharding: str) -> None:
    plain = replace(PLAIN, has_norm=False, options={"precision": "bf16"})
    train(tmp_path / "plain", 1, plain)
    train(tmp_path / "again", 3, replace(plain, sharding=sharding, again="units"))
    assert read_bits(tmp_path / "again") == read_bits(tmp_path / "plain")


@pytest.mark.shows("P101")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], [(3, 2), (2, 3), (2, 1), (1, 3)]))
@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.full)])
def test_a_killed_run_goes_on_with_it_and_without(
    tmp_path: Path, before: int, after: int, sharding: str
) -> None:
    """The option is none of the run: it may change at a resume."""
    setting = Sharded(3, total_steps=5, sharding=sharding, options=EVERYTHING, again="none")
    train(tmp_path / "undisturbed", 1, setting)
    killed = replace(setting, again="units")
    with pytest.raises(RankError):
        train(tmp_path / "killed", before, killed, Kill(iteration=4, rank=before - 1))
    with pytest.raises(RankError):
        train(tmp_path / "killed", after, setting, Kill(iteration=8, rank=after - 1))
    train(tmp_path / "killed", after, killed)
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "undisturbed")


class Deep(Fitting):
    """Two blocks, of which the second is a unit as a test asks for it."""

    part = 1
    unit: Any = None

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)))

    def shard(self) -> Any:
        return self.unit if self.unit is None else [self.unit(self.net[1])]


def fit(root: Path, unit: Any) -> Deep:
    """Train two epochs, with an average of the weights."""
    model = Deep("deep")
    model.unit = unit
    trainer = helios.Trainer(
        total_steps=2,
        use_cpu=True,
        print_banner=False,
        chkpt_root=root,
        chkpt_frequency=1,
        plugins=[EMA(0.9)],
    )
    trainer.fit(model, IndexModule(Setting()))
    return model


def checkpoint(module: nn.Module) -> Unit:
    return Unit(module, checkpoint=True)


@pytest.mark.shows("P101")
def test_checkpoints_are_the_same(tmp_path: Path) -> None:
    models = [fit(tmp_path / str(unit is None), unit) for unit in (None, checkpoint)]
    plain, again = (
        helios.load_checkpoint(helios.find_last_checkpoint(tmp_path / name / "deep"))
        for name in ("True", "False")
    )
    assert plain.keys() == again.keys()
    assert str(plain["model"]) == str(again["model"])
    for one, other in zip(*(each.net.state_dict().values() for each in models), strict=True):
        assert torch.equal(one, other)
    # After the run, the network is as setup has built it.
    assert "forward" not in vars(models[1].net[1])


@pytest.mark.shows("P103")
def test_a_unit_that_is_no_part_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="must return modules of the model's networks"):
        fit(tmp_path, lambda _: Unit(nn.Linear(2, 2), checkpoint=True))


def run(model: Deep, sharding: str) -> None:
    trainer = helios.Trainer(
        total_steps=1, use_cpu=True, print_banner=False, num_replicas=2, sharding=sharding
    )
    trainer.fit(model, IndexModule(Setting()))


def test_units_may_come_from_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Yielding(Deep):
        def shard(self) -> Any:
            yield Unit(self.net[1], checkpoint=True)

    found: list[str] = []

    def find_units(networks: Any, named: Any) -> Any:
        units = find(networks, named)
        found.extend(units)
        return units

    find = model_setup.find_units
    monkeypatch.setattr(model_setup, "find_units", find_units)
    run(Yielding("deep"), "full")
    assert found == ["net", "net.1"]


@pytest.mark.shows("P103")
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_units_are_a_list(sharding: str) -> None:
    class Bare(Deep):
        def shard(self) -> Any:
            return Unit(self.net[0], checkpoint=True)

    with pytest.raises(ArgumentTypeError, match="must return a list of modules or None, got Unit"):
        run(Bare("deep"), sharding)


def fail(_: nn.Module) -> Unit:
    raise ValueError("only with processes")


@pytest.mark.shows("P103")
@pytest.mark.parametrize("unit", [lambda module: module, Unit, lambda _: nn.ReLU(), fail])
def test_without_it_an_unsharded_run_is_as_before(
    tmp_path: Path, unit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fit(tmp_path / "plain", None)
    capsys.readouterr()
    other = fit(tmp_path / "other", unit)
    for one, two in zip(plain.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(one, two)
    said = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(said) == (unit is fail)
    if said:
        match = "Deep.shard() failed, so no activations are computed again: ValueError('only with"
        assert match in said[0]
