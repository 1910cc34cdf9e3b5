"""Trainings with ``init="keyed"``: equal bits wherever they start, and what they hold at a time."""

from __future__ import annotations

import functools
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helios
from helios.core.sharded_tensors import local_of
from helios.session import Session
from helios.startup import fit_run, run_setup
from tests.support.keyed import (
    GPT,
    Keyed,
    KeyedData,
    KeyedModel,
    digest_of,
    fit_keyed,
    read_bits,
    train_keyed,
)
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import Kill

WHOLE = Keyed(sharding="none")
CASES = [
    (num_processes, sharding, units)
    for num_processes in (1, 2, 3, 4)
    for sharding, units in (
        ("none", "none"),
        ("full", "none"),
        ("full", "layers"),
        ("full", "many"),
    )
]
QUICK = {(2, "none", "none"), (4, "full", "layers")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for network in ("zoo", "gpt"):
        folder = tmp_path_factory.mktemp("whole") / network
        train_keyed(folder, 1, replace(WHOLE, network=network))
        found[network] = read_bits(folder)
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on two processes."""
    folder = tmp_path_factory.mktemp("begun")
    train_keyed(folder, 2, Keyed(network="gpt", total_steps=1))
    return folder


@pytest.mark.shows("P105")
@pytest.mark.parametrize(
    ("num_processes", "sharding", "units"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES],
)
@pytest.mark.parametrize(
    "network", ["gpt", pytest.param("zoo", marks=pytest.mark.full)], ids=["gpt", "zoo"]
)
def test_the_bits_depend_on_neither_processes_nor_shards_nor_units(
    tmp_path: Path,
    expected: dict[str, Any],
    network: str,
    num_processes: int,
    sharding: str,
    units: str,
) -> None:
    setting = Keyed(network=network, units=units, sharding=sharding)
    train_keyed(tmp_path / "run", num_processes, setting)
    assert read_bits(tmp_path / "run") == expected[network]


@pytest.mark.shows("P105")
def test_each_kind_of_module_has_the_same_bits_in_other_processes_and_units(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    train_keyed(tmp_path / "run", 3, Keyed(units="many"))
    assert read_bits(tmp_path / "run") == expected["zoo"]


def test_state_that_adagrad_makes_at_once_has_the_same_bits(tmp_path: Path) -> None:
    setting = Keyed(network="gpt", optimizer="Adagrad")
    train_keyed(tmp_path / "whole", 1, replace(setting, sharding="none"))
    train_keyed(tmp_path / "sharded", 3, setting)
    assert read_bits(tmp_path / "sharded") == read_bits(tmp_path / "whole")


RESTARTS = [(3, 2), (4, 1), (1, 4), (2, 3)]


@pytest.mark.shows("P105")
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*case, marks=() if case == (3, 2) else pytest.mark.full) for case in RESTARTS],
)
def test_a_killed_run_goes_on_in_other_processes(
    tmp_path: Path, expected: dict[str, Any], before: int, after: int
) -> None:
    setting = Keyed(network="gpt")
    with pytest.raises(RankError):
        train_keyed(tmp_path / "run", before, setting, Kill(iteration=2, rank=before - 1))
    train_keyed(tmp_path / "run", after, replace(setting, units="none"))
    assert read_bits(tmp_path / "run")[1:] == expected["gpt"][1:]


@pytest.mark.shows("P107")
def test_a_run_does_not_change_how_it_is_initialized_unless_it_is_allowed(tmp_path: Path) -> None:
    setting = replace(WHOLE, network="gpt", total_steps=1)
    train_keyed(tmp_path, 1, setting)
    longer = replace(setting, total_steps=2, options={"init": "setup"})
    with pytest.raises(RankError, match="init: 'keyed' -> 'setup'"):
        train_keyed(tmp_path, 1, longer)
    options = {"init": "setup", "allow_changes": ("init",)}
    train_keyed(tmp_path, 1, replace(longer, options=options))
    with pytest.raises(RankError, match="init: 'setup' -> 'keyed'"):
        train_keyed(tmp_path, 1, replace(setting, total_steps=3))


def fit_unlike(rank: int, folder: Path) -> None:
    fit_keyed(rank, folder, Keyed(options={"init": ("setup", "keyed")[rank]}))


@pytest.mark.shows("P107")
def test_all_processes_agree_on_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"must agree on Trainer\(init=\.\.\.\)"):
        run_ranks(fit_unlike, 2, tmp_path / "run")


class Unlike(KeyedModel):
    """Initializes a module in another way on one of the processes."""

    def init_unit(self, module: nn.Module, name: str) -> bool:
        is_done = super().init_unit(module, name)
        if name == "net.blocks.1.up" and self.trainer.global_rank == 1:
            module.bias[3] = 1e-9
        return is_done


def fit_other_weights(rank: int, folder: Path) -> None:
    trainer = helios.Trainer(
        total_steps=1, num_replicas=2, sharding="full", init="keyed", use_cpu=True
    )
    trainer.fit(Unlike(folder, Keyed(network="gpt")), KeyedData())


@pytest.mark.shows("P105")
def test_processes_that_initialize_in_different_ways_are_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"same weights, but net\.blocks\.1\.up\.bias of rank 1"):
        run_ranks(fit_other_weights, 2, tmp_path)


class Warm(KeyedModel):
    """Starts with the weights of another run."""

    ranks = range(4)

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        if self.trainer.global_rank in self.ranks:
            helios.load_weights(self.folder / "keyed" / "keyed_epoch_1_iter_1.ckpt", self)

    def on_training_start(self) -> None:
        self.first = {name: digest_of(part) for name, part in self.net.named_parameters()}


def fit_warm(rank: int, folder: Path, sharding: Any) -> dict[str, str]:
    trainer = helios.Trainer(
        total_steps=0, num_replicas=4, use_cpu=True, init="keyed", sharding=sharding
    )
    model = Warm(folder, Keyed(network="gpt"))
    trainer.fit(model, KeyedData())
    return model.first


@pytest.mark.shows("P107")
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_weights_that_setup_loads_are_loaded_when_there_is_memory(
    begun: Path, tmp_path: Path, sharding: str
) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    last = (tmp_path / "last.txt").read_text().splitlines()
    found = run_ranks(fit_warm, 3, tmp_path, sharding)
    assert found[0] == found[1] == found[2]
    assert found[0].items() <= {tuple(line.rsplit(" ", 1)) for line in last}


class WarmAlone(Warm):
    """Loads on one process only."""

    ranks = range(1)


def fit_warm_alone(rank: int, folder: Path) -> None:
    trainer = helios.Trainer(num_replicas=2, use_cpu=True, init="keyed", sharding="full")
    trainer.fit(WarmAlone(folder, Keyed(network="gpt")), KeyedData())


def test_weights_that_one_process_loads_are_an_error(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    with pytest.raises(RankError, match=r"same weights, but load_weights of keyed_epoch_1_iter_1"):
        run_ranks(fit_warm_alone, 2, tmp_path)


def evaluate(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    trainer = helios.Trainer(
        num_replicas=4, use_cpu=True, print_banner=False, chkpt_root=folder, **options
    )
    model = KeyedModel(folder, Keyed(network="gpt"))
    trainer.validate(model, KeyedData())
    return dict(model.metrics)


@pytest.mark.shows("P107")
def test_an_evaluation_needs_no_whole_model_either(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (whole,) = run_ranks(evaluate_alone, 1, tmp_path, {})
    assert whole["loss"] > 0
    keyed = {"init": "keyed"}
    assert run_ranks(evaluate_alone, 1, tmp_path, keyed) == [whole]
    assert run_ranks(evaluate, 2, tmp_path, {**keyed, "sharding": "full"}) == [whole] * 2


def evaluate_alone(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    dist.destroy_process_group()
    found = evaluate(rank, folder, options)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


class Large(KeyedModel):
    """Has units that are much larger than everything else."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = GPT(WIDTH, DEPTH)
        make: Any = getattr(torch.optim, self.setting.optimizer)
        self.optimizer = make(self.net.parameters(), lr=0.01)


WIDTH, DEPTH = 64, 6
METHODS: tuple[tuple[Any, str, str], ...] = (
    (fit_run.Training, "_load", "load"),
    (Session, "save", "save"),
    (helios.plugins.EMA, "on_fit_start", "average"),
)
REST = 32 << 10
"""Bytes of generators, counters and batches, a quarter of a unit."""


def measure(rank: int, folder: Path, setting: Keyed, *plugins: Any) -> dict[str, int]:
    """Return the most bytes that were alive in each phase."""
    live = LiveBytes()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        build = run_setup.build_networks
        patch.setattr(run_setup, "build_networks", live.around("init", build))
        for owner, name, phase in METHODS:
            method = functools.partialmethod(_measured, live, phase, getattr(owner, name))
            patch.setattr(owner, name, method)
        patch.setattr("tests.support.keyed.KeyedModel", Large)
        stack.enter_context(live)
        fit_keyed(rank, folder, setting, *plugins)
    return live.peaks


def _measured(owner: Any, live: LiveBytes, phase: str, method: Any, *args: Any, **kw: Any) -> Any:
    return live.around(phase, method)(owner, *args, **kw)


def bytes_of(num_processes: int) -> tuple[int, int, int]:
    """Return the bytes of the padded shards of a process, of the largest unit, and of all."""
    net = GPT(WIDTH, DEPTH)
    parts = [*net.parameters()]
    shards = sum(-(-len(part) // num_processes) * part[0].nbytes for part in parts)
    unit = sum(part.nbytes for part in net.blocks[0].parameters())
    return shards, unit, sum(part.nbytes for part in parts)


@pytest.mark.shows("P108")
@pytest.mark.parametrize(
    ("optimizer", "num_states", "is_async"),
    [
        ("SGD", 0, False),
        ("AdamW", 2, True),
        pytest.param("SGD", 0, True, marks=pytest.mark.full),
        pytest.param("AdamW", 2, False, marks=pytest.mark.full),
    ],
)
def test_no_process_holds_more_than_its_shards_and_a_unit(
    tmp_path: Path, optimizer: str, num_states: int, is_async: bool
) -> None:
    shards, unit, _ = bytes_of(4)
    store = helios.CheckpointStore(is_async=is_async)
    setting = Keyed(network="gpt", optimizer=optimizer, options={"store": store})
    begun = run_ranks(measure, 4, tmp_path, replace(setting, total_steps=1))
    resumed = run_ranks(measure, 4, tmp_path, replace(setting, total_steps=2))
    held = shards * (1 + num_states)
    # What training continues beside is copied.
    copied = held if is_async else unit
    for peaks in (*begun, *resumed):
        assert shards < peaks["init"] <= shards + unit + REST
        assert held < peaks["save"] <= held + copied + REST
    for peaks in resumed:
        assert held < peaks["load"] <= held + unit + REST


@pytest.mark.shows("P110")
def test_no_process_holds_more_than_its_part_of_an_average(tmp_path: Path) -> None:
    shards, unit, _ = bytes_of(4)
    store = helios.CheckpointStore(is_async=False)
    setting = Keyed(network="gpt", optimizer="SGD", options={"store": store})
    ema = helios.plugins.EMA(0.9)
    run_ranks(measure, 4, tmp_path, replace(setting, total_steps=1), ema)
    for peaks in run_ranks(measure, 4, tmp_path, replace(setting, total_steps=2), ema):
        assert shards < peaks["load"] <= shards + unit + REST
        assert 2 * shards < peaks["average"] <= 2 * shards + unit + REST
        assert 2 * shards < peaks["save"] <= 2 * shards + unit + REST


class LargeWarm(Large):
    """Loads the weights of another run in setup."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        path = helios.find_last_checkpoint(self.folder / "keyed")
        helios.load_weights(path, self)


def measure_warm(rank: int, folder: Path) -> dict[str, int]:
    """Return the most bytes that were alive while networks were built."""
    live = LiveBytes()
    trainer = helios.Trainer(
        total_steps=0, num_replicas=4, use_cpu=True, init="keyed", sharding="full"
    )
    with pytest.MonkeyPatch.context() as patch, live:
        patch.setattr(run_setup, "build_networks", live.around("init", run_setup.build_networks))
        trainer.fit(LargeWarm(folder, Keyed(network="gpt")), KeyedData())
    return live.peaks


@pytest.mark.shows("P110")
def test_no_process_reads_more_than_its_part_of_the_weights_of_another_run(tmp_path: Path) -> None:
    shards, unit, _ = bytes_of(4)
    run_ranks(measure, 2, tmp_path, Keyed(network="gpt", total_steps=1))
    for peaks in run_ranks(measure_warm, 4, tmp_path):
        assert shards < peaks["init"] <= shards + unit + REST


@pytest.mark.shows("P108")
def test_models_that_are_built_by_setup_are_whole_in_each_process(tmp_path: Path) -> None:
    _, _, whole = bytes_of(2)
    setting = Keyed(network="gpt", total_steps=1, options={"init": "setup"})
    assert all(peaks["init"] >= whole for peaks in run_ranks(measure, 2, tmp_path, setting))


def measure_shards(rank: int, folder: Path) -> tuple[int, int]:
    """Return the bytes of this process's parameters and optimizer state, after a step."""
    model = Large(folder, Keyed(network="gpt"))
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=1,
        num_replicas=4,
        use_cpu=True,
        sharding="full",
        init="keyed",
    )
    trainer.fit(model, KeyedData())
    parts = [local_of(part.detach()) for part in model.net.parameters()]
    states = [value for table in model.optimizer.state.values() for value in table.values()]
    state = [local_of(value) for value in states if value.dim()]
    return tuple(sum(part.untyped_storage().nbytes() for part in each) for each in (parts, state))


@pytest.mark.shows("P108")
def test_a_process_holds_its_part_of_parameters_and_optimizer(tmp_path: Path) -> None:
    shards, _, whole = bytes_of(4)
    padding = sum(part[0].nbytes for part in GPT(WIDTH, DEPTH).parameters())
    assert shards <= whole / 4 + padding
    for parameters, state in run_ranks(measure_shards, 4, tmp_path):
        assert parameters <= shards
        assert state <= 2 * shards
