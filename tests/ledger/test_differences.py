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
from helios.ledger.differences import CONTENT, NUMERICS, ORDER, RATES
from helios.state import TrainingState

LENGTH, BATCH, STEPS = 24, 4, 12


@dataclasses.dataclass
class Plan:
    """A training, with places for what makes it differ.

    Attributes:
        seed: the seed of the run.
        sample: changes a sample, given its index.
        forward: changes the output of the network, given the step.
        rate: changes the learning rate, given the step.
        width: of the hidden layer.
        options: further ones of the trainer.
    """

    seed: int = 3
    sample: Callable[[int, torch.Tensor], torch.Tensor] = lambda index, sample: sample
    forward: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, output: output
    rate: Callable[[int, float], float] = lambda step, rate: rate
    width: int = 6
    steps: int = STEPS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


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
        **{"chkpt_frequency": 5, **plan.options},
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


def _slower(step: int, rate: float) -> float:
    return math.nextafter(rate, 0) if step >= 5 else rate


@pytest.mark.parametrize(
    ("plan", "what", "iteration", "cause"),
    [
        (Plan(seed=4), ORDER, 1, "random_seed"),
        (Plan(sample=_augment), CONTENT, 1, "augmentation"),
        (Plan(rate=_slower), RATES, 5, "learning rate"),
        (Plan(width=7), NUMERICS, 1, "model"),
        (Plan(forward=_drop), NUMERICS, 6, "generators"),
    ],
    ids=["seed", "augmentation", "rate", "layer", "unkeyed dropout"],
)
def test_a_planted_difference_is_found(
    plan: Plan, what: str, iteration: int, cause: str, known: Path, tmp_path: Path
) -> None:
    found = diff(known, run(tmp_path, plan))
    assert not found.is_equal
    assert (found.what[0], found.iteration) == (what, iteration)
    assert found.num_equal == iteration - 1
    assert any(cause in text for text in found.causes) or what == RATES


@pytest.mark.parametrize("sample", [_change_one, _swap], ids=["one value by one ulp", "swapped"])
def test_a_changed_sample_is_found_where_it_is_seen_first(
    sample: Any, known: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(index: int, value: torch.Tensor) -> torch.Tensor:
        seen.append(index)
        return sample(index, value)  # type: ignore[no-any-return]

    found = diff(known, run(tmp_path, Plan(sample=note)))
    assert found.what[:1] == [CONTENT]
    assert ORDER not in found.what
    assert found.iteration == seen.index(7) // BATCH + 1


def test_the_same_run_is_equal_whatever_its_frequencies(known: Path, tmp_path: Path) -> None:
    plan = Plan(options={"chkpt_frequency": 2, "print_frequency": 3})
    assert diff(known, run(tmp_path, plan)).is_equal


def test_a_longer_run_is_equal_as_far_as_both_go(known: Path, tmp_path: Path) -> None:
    found = diff(known, run(tmp_path, Plan(steps=STEPS + 3)))
    assert not found.is_equal
    assert found.iteration is None
    assert found.num_equal == STEPS
    assert found.lengths == (STEPS, STEPS + 3)


def test_a_later_ledger_is_compared_from_its_begin_on(known: Path, tmp_path: Path) -> None:
    run(tmp_path, Plan(steps=5))
    (ledger,) = tmp_path.glob(f"*/{FILE_NAME}")
    ledger.unlink()
    run(tmp_path)
    found = diff(known, tmp_path)
    assert found.is_equal
    assert (found.begins_after, found.num_equal) == (5, STEPS)


def test_ledgers_without_a_common_iteration_are_refused(known: Path, tmp_path: Path) -> None:
    run(tmp_path, Plan(steps=STEPS))
    (ledger,) = tmp_path.glob(f"*/{FILE_NAME}")
    ledger.unlink()
    run(tmp_path, Plan(steps=STEPS + 2))
    short = tmp_path / "short"
    with pytest.raises(LedgerError, match="no iteration in common"):
        diff(run(short, Plan(steps=3)), ledger)


def test_a_run_that_has_not_ended_is_not_equal(known: Path, tmp_path: Path) -> None:
    (ledger,) = known.glob(f"*/{FILE_NAME}")
    open_end = tmp_path / "open.jsonl"
    open_end.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    found = diff(known, open_end)
    assert not found.is_equal
    assert found.num_equal == STEPS
    assert found.have_ended == (True, False)


def test_a_ledger_without_iterations_is_a_shorter_one(known: Path, tmp_path: Path) -> None:
    (ledger,) = known.glob(f"*/{FILE_NAME}")
    head = tmp_path / "head.jsonl"
    head.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    found = diff(known, head)
    assert (found.is_equal, found.num_equal, found.lengths) == (False, 0, (STEPS, 0))


@pytest.mark.parametrize(
    "harm",
    [
        lambda lines: [*lines[:4], *lines[5:]],
        lambda lines: [*lines[:4], lines[4].replace(b'"loss":"', b'"loss":"g'), *lines[5:]],
        lambda lines: [*lines[:4], b"{}\n", *lines[5:]],
        lambda lines: [*lines[:4], lines[4].replace(b'{"at"', b'{ "at"'), *lines[5:]],
    ],
    ids=["a line is missing", "a number is none", "a line is none", "a blank"],
)
def test_a_damaged_ledger_is_refused(harm: Any, known: Path, tmp_path: Path) -> None:
    (ledger,) = known.glob(f"*/{FILE_NAME}")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join(harm(ledger.read_bytes().splitlines(keepends=True))))
    with pytest.raises(LedgerError, match="helios verify"):
        diff(known, bad)


def test_a_ledger_that_is_none_is_refused(known: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(LedgerError, match="is not a ledger"):
        diff(known, tmp_path / "other.jsonl")
