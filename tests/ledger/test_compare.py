"""``diff`` against planted differences: where two runs came apart, and in what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.errors import LedgerError
from helios.ledger import diff
from helios.ledger.book import FILE_NAME
from helios.ledger.compare import CONTENT, NUMERICS, ORDER, RATES
from helios.state import TrainingState
from tests.support.synthetic_run import write_ledger

LENGTH, BATCH, TOTAL = 24, 4, 12


@dataclasses.dataclass
class Plan:
    """A training, with places for what makes it differ: by sample, by step, or after a load."""

    seed: int = 3
    sample: Callable[[int, torch.Tensor], torch.Tensor] = lambda index, sample: sample
    forward: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, output: output
    rate: Callable[[int, float], float] = lambda step, rate: rate
    loaded: Callable[[nn.Module], None] | None = None
    width: int = 6
    steps: int = TOTAL


class Samples(Dataset[torch.Tensor]):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.sin(torch.arange(5) * (index + 1.0)) + 0.1 * torch.rand(5)
        return self.plan.sample(index, sample)


class Data(helios.DataModule):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=BATCH, shuffle=True)
        self._train_dataset = self._create_dataset(Samples(self.plan), params)


class Net(helios.Model):
    unsaved = ("plan",)

    def __init__(self, plan: Plan) -> None:
        super().__init__("net")
        self.plan = plan

    def setup(self, *, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(5, self.plan.width), nn.Linear(self.plan.width, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_training_batch_start(self, state: TrainingState) -> None:
        super().on_training_batch_start(state)
        (group,) = self.optimizer.param_groups
        group["lr"] = self.plan.rate(state.global_iteration, 0.1)

    def on_checkpoint_loaded(self) -> None:
        if self.plan.loaded is not None:
            self.plan.loaded(self.net)

    def train_step(self, batch: torch.Tensor, state: TrainingState) -> torch.Tensor:
        return self.plan.forward(state.global_iteration, self.net(batch)).square().mean()


def run(folder: Path, plan: Plan | None = None) -> Path:
    plan = plan or Plan()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=plan.steps,
        chkpt_root=folder,
        random_seed=plan.seed,
        print_banner=False,
        use_cpu=True,
        chkpt_frequency=5,
    )
    trainer.fit(Net(plan), Data(plan))
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without any difference."""
    return run(tmp_path_factory.mktemp("known") / "run")


def _change_one(index: int, sample: torch.Tensor) -> torch.Tensor:
    return sample.nextafter(sample + 1) if index == 7 else sample


def _swap(index: int, sample: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(5) * 1.0) if index == 7 else sample


def _augment(index: int, sample: torch.Tensor) -> torch.Tensor:
    return sample + 0.1 * torch.rand(5)


def _drop(step: int, output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.seed()
    return output * torch.rand(output.shape, generator=generator) if step >= 6 else output


def _draw(step: int, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + torch.rand(1)) if step >= 6 else output


def _slower(step: int, rate: float) -> float:
    return math.nextafter(rate, 0) if step >= 5 else rate


def _flip(network: nn.Module) -> None:
    """Flip the highest bit of the exponent of a weight below one, in place."""
    weight = next(network.parameters()).detach().view(torch.int32)
    weight[0, 0] ^= 1 << 24


PLANTED = {
    "another seed": (Plan(seed=4), 1, ORDER),
    "another augmentation": (Plan(sample=_augment), 1, CONTENT),
    "a rate off by one ulp": (Plan(rate=_slower), 5, RATES),
    "another layer": (Plan(width=7), 1, NUMERICS),
    "an unkeyed dropout": (Plan(forward=_drop), 6, NUMERICS),
    "a keyed dropout": (Plan(forward=_draw), 6, NUMERICS),
}
"""The runs that differ, the first iteration that does, and what is first in it."""


@pytest.mark.shows("P12", "P40")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str, known: Path, tmp_path: Path) -> None:
    plan, iteration, what = PLANTED[name]
    check(known, run(tmp_path, plan), iteration, what)


def check(base: Path, other: Path, iteration: int, what: str) -> None:
    found = diff(base, other)
    assert not found.is_equal
    assert (found.what[0], found.iteration) == (what, iteration)
    assert found.num_equal == iteration - 1


@pytest.mark.shows("P40")
def test_a_flipped_bit_of_a_loaded_weight_is_found(known: Path, tmp_path: Path) -> None:
    run(tmp_path, Plan(steps=5))
    check(known, run(tmp_path, Plan(loaded=_flip)), 6, NUMERICS)


@pytest.mark.shows("P12", "P40")
@pytest.mark.parametrize("sample", [_change_one, _swap], ids=["one value by one ulp", "swapped"])
def test_a_changed_sample_is_found_where_it_is_seen_first(
    sample: Any, known: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(index: int, value: torch.Tensor) -> torch.Tensor:
        seen.append(index)
        return sample(index, value)  # type: ignore[no-any-return]

    other = run(tmp_path, Plan(sample=note))
    check(known, other, seen.index(7) // BATCH + 1, CONTENT)


def test_a_run_that_has_not_ended_is_not_equal(known: Path, tmp_path: Path) -> None:
    (ledger,) = known.glob(f"*/{FILE_NAME}")
    open_end = tmp_path / "open.jsonl"
    open_end.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    found = diff(known, open_end)
    assert not found.is_equal
    assert found.num_equal == TOTAL
    assert found.have_ended == (True, False)


def test_half_a_line_that_is_being_written_is_no_iteration(tmp_path: Path) -> None:
    for name in ("whole", "written"):
        write_ledger(tmp_path / name, [1.0, 2.0, 3.0])
    path = tmp_path / "written" / FILE_NAME
    head, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([head, *lines[:2], lines[2][:40]]))
    found = diff(tmp_path / "whole", tmp_path / "written")
    assert (found.lengths, found.num_equal, found.iteration) == ((3, 2), 2, None)
    twice = diff(tmp_path / "written", tmp_path / "written")
    assert (twice.is_equal, twice.lengths) == (True, (2, 2))


@pytest.mark.parametrize(
    "harm",
    [
        lambda lines: [*lines[:4], *lines[5:]],
        lambda lines: [*lines[:4], lines[4].replace(b'"loss":"', b'"loss":"g'), *lines[5:]],
        lambda lines: [b"{}\n"],
    ],
    ids=["a line is missing", "a number is none", "no ledger"],
)
def test_a_damaged_ledger_is_refused(harm: Any, known: Path, tmp_path: Path) -> None:
    (ledger,) = known.glob(f"*/{FILE_NAME}")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join(harm(ledger.read_bytes().splitlines(keepends=True))))
    with pytest.raises(LedgerError, match=r"helios verify|is not a ledger"):
        diff(known, bad)
