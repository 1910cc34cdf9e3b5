"""Trainings with ``init="keyed"``: equal bits wherever they start, and what they hold at a time."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.loops.boundary import Boundary
from helios.start import fit as start
from helios.start import model_setup
from tests.sharding.test_sharded_training import cases
from tests.support.keyed import GPT, Keyed, KeyedModel, fit_keyed, read_bits, train_keyed
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


RESTARTS = [(3, 2), (4, 1), (1, 4), (2, 3)]


@pytest.mark.shows("P105")
@pytest.mark.parametrize(("before", "after"), cases([(3, 2)], RESTARTS))
def test_a_killed_run_goes_on_in_other_processes(
    tmp_path: Path, expected: dict[str, Any], before: int, after: int
) -> None:
    setting = Keyed(network="gpt")
    with pytest.raises(RankError):
        train_keyed(tmp_path / "run", before, setting, Kill(iteration=2, rank=before - 1))
    train_keyed(tmp_path / "run", after, replace(setting, units="none"))
    assert read_bits(tmp_path / "run")[1:] == expected["gpt"][1:]


class Large(KeyedModel):
    """Has units that are much larger than everything else."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = GPT(WIDTH, DEPTH)
        make: Any = getattr(torch.optim, self.setting.optimizer)
        self.optimizer = make(self.net.parameters(), lr=0.01)


WIDTH, DEPTH = 64, 4
METHODS: tuple[tuple[Any, str, str], ...] = (
    (Boundary, "_save", "save"),
    (helios.plugins.EMA, "on_fit_start", "average"),
)
REST = 32 << 10
"""Bytes of generators, counters and batches, a quarter of a unit."""


def measure(rank: int, folder: Path, setting: Keyed, *plugins: Any) -> dict[str, int]:
    """Return the most bytes that were alive in each phase."""
    live = LiveBytes()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        build = live.around("init", model_setup.build_networks)
        patch.setattr(model_setup, "build_networks", build)
        patch.setattr(start, "load_checkpoint", live.around("load", start.load_checkpoint))
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
        ("AdamW", 2, True),
        pytest.param("SGD", 0, False, marks=pytest.mark.full),
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
