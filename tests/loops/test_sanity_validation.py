"""A trial validation before the training leaves no trace, whoever carries how many replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helios.core import rng
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import trying
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.state import Phase, TrainingState
from tests.engines.joined import replicas_on
from tests.loops.parts import ListSource, fit, make_parts
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.sums import bits


def draw() -> tuple[float, float, float]:
    """Draw from all three generators."""
    numpy = rng.get_default_numpy_rng().generator.normal()
    return torch.rand(()).item(), random.random(), float(numpy)


class Touchy(Model):
    """Its validation changes whatever it can."""

    def __init__(self) -> None:
        super().__init__("touchy")
        self.setup()

    unsaved = ("drawn",)

    def setup(self, fast_init: bool = False) -> None:
        with rng.stream(0):
            self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.history: list[Any] = []
        self.table = {"seen": [0]}
        self.drawn: list[Any] = []

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        self.drawn.append(draw())
        return self.net(batch).square().mean()

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        with torch.no_grad():
            for part in (*self.net.parameters(), *self.net.buffers()):
                part += 1
        self.history.append(batch)
        self.table["seen"][0] += 1
        return {"score": (batch.sum(), 1)}

    def bits(self) -> tuple[Any, ...]:
        """Return all that it holds."""
        weights = {name: bits(part) for name, part in self.net.state_dict().items()}
        return weights, list(self.history), list(self.table["seen"]), dict(self.metrics)


class Greedy(Quiet):
    """Asks for everything in a validation, and counts."""

    def __init__(self) -> None:
        super().__init__("greedy")
        self.count = 0
        self.told: list[Any] = []

    def on_sanity_check_start(self) -> None:
        draw()
        self.told.append(("start", self.context.is_sanity_check))

    def on_sanity_check_end(self) -> None:
        self.told.append(("end", self.context.is_sanity_check))

    def on_validation_batch_end(self, step: int) -> None:
        self.count += 1
        assert self.context.is_sanity_check
        self.context.request_stop("no")
        self.context.interrupt("no")
        self.context.request_checkpoint()
        self.context.log({"number": 1.0})

    def on_log(self, scalars: Any, state: TrainingState) -> None:
        raise AssertionError("a trial logs nothing")


class Closing(ListSource):
    """Notes how often the workers that live from pass to pass are ended."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def rows_of(block: range, num_rows: int) -> list[Any]:
    return [[torch.full((3, 2), float(row + r)) for r in block] for row in range(num_rows)]


def make(
    replicas: Replicas, *plugins: Plugin, num_rows: int = 4, sanity_steps: int = 2
) -> RunParts:
    """Return the objects of a run before its training."""
    rng.seed_rngs(1)
    rows = rows_of(replicas.local_replicas, num_rows)
    train = [[part + 0.5 for part in row] for row in rows]
    return make_parts(
        Touchy(),
        *plugins,
        replicas=replicas,
        sources={Phase.TRAINING: [ListSource(train)], Phase.VALIDATION: [Closing(rows)]},
        sanity_steps=sanity_steps,
        total_steps=3,
    )


def _asked(parts: RunParts) -> list[dict[str, Any]]:
    return [dict(vars(requests)) for requests in (parts.run.asked, parts.run.agreed)]


def try_out(parts: RunParts) -> ValidationLoop:
    loop = ValidationLoop()
    loop._attach(parts)
    with trying(parts, loop):
        assert parts.run.is_sanity_check
        loop.run()
    return loop


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_a_trial_has_changed_is_put_back(num_replicas: int) -> None:
    greedy = Greedy()
    parts = make(Replicas(num_replicas), greedy)
    source = parts.sources[Phase.VALIDATION][0]
    model = parts.model
    held = [model.history, model.table, *model.net.parameters(), *model.net.buffers()]
    before = (model.bits(), greedy.count, parts.run.state.dict(), _asked(parts))
    state = rng.get_rng_state_dict()["torch"]
    try_out(parts)
    assert (model.bits(), greedy.count, parts.run.state.dict(), _asked(parts)) == before
    assert torch.equal(rng.get_rng_state_dict()["torch"], state)
    now = [model.history, model.table, *model.net.parameters(), *model.net.buffers()]
    assert all(one is other for one, other in zip(held, now, strict=True)), "in place"
    assert source.num_closed == 1
    assert not parts.run.is_sanity_check
    assert model.net.training is True
    assert not [*parts.findings]


def _train(rank: int, num_processes: int, num_replicas: int, has_trial: bool) -> tuple[Any, ...]:
    with replicas_on(rank, num_processes, num_replicas) as here:
        plugin = Greedy()
        parts = make(here, plugin, sanity_steps=2 if has_trial else 0)
        assert fit(parts) == "total_steps reached"
        return parts.model.bits(), parts.model.drawn, draw(), plugin.told


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_replicas", [2, 1, 3])
def test_a_training_is_the_same_with_a_trial_before_it(num_replicas: int) -> None:
    """C17, K14: bit for bit, on any number of processes."""
    for num_processes in range(1, num_replicas + 1):
        (plain, *_), (tried, *_) = (
            run_ranks(_train, num_processes, num_processes, num_replicas, has_trial)
            for has_trial in (False, True)
        )
        assert tried[:-1] == plain[:-1]
        assert (plain[-1], tried[-1]) == ([], [("start", False), ("end", False)])
