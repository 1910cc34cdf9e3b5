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
from tests.loops.parts import ListSource, make_parts
from tests.support.quiet import Quiet
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

    def setup(self, fast_init: bool = False) -> None:
        with rng.stream(0):
            self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.history: list[Any] = []
        self.table = {"seen": [0]}

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

    def on_sanity_check_start(self) -> None:
        draw()

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


def make(num_replicas: int, *plugins: Plugin) -> RunParts:
    """Return the objects of a run before its training."""
    rng.seed_rngs(1)
    rows = [[torch.full((3, 2), float(row + r)) for r in range(num_replicas)] for row in range(4)]
    return make_parts(
        Touchy(),
        *plugins,
        replicas=Replicas(num_replicas),
        sources={Phase.VALIDATION: [Closing(rows)]},
        sanity_steps=2,
        total_steps=3,
    )


def _asked(parts: RunParts) -> list[dict[str, Any]]:
    return [dict(vars(requests)) for requests in (parts.run.asked, parts.run.agreed)]


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_a_trial_has_changed_is_put_back(num_replicas: int) -> None:
    greedy = Greedy()
    parts = make(num_replicas, greedy)
    source = parts.sources[Phase.VALIDATION][0]
    model = parts.model
    held = [model.history, model.table, *model.net.parameters(), *model.net.buffers()]
    before = (model.bits(), greedy.count, parts.run.state.dict(), _asked(parts))
    state = rng.get_rng_state_dict()["torch"]
    loop = ValidationLoop()
    loop._attach(parts)
    with trying(parts, loop):
        assert parts.run.is_sanity_check
        loop.run()
    assert (model.bits(), greedy.count, parts.run.state.dict(), _asked(parts)) == before
    assert torch.equal(rng.get_rng_state_dict()["torch"], state)
    now = [model.history, model.table, *model.net.parameters(), *model.net.buffers()]
    assert all(one is other for one, other in zip(held, now, strict=True)), "in place"
    assert source.num_closed == 1
    assert not parts.run.is_sanity_check
    assert model.net.training is True
    assert not [*parts.findings]
