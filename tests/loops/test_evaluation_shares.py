"""Evaluation where replicas share the data: one sum of scores, whoever carries which of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helios.core import rng
from helios.data.loader import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import NO_BATCH, Shard, Source
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.hooks.bus import Bus
from helios.loops.evaluation import ValidationLoop
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.run_state import RunState
from helios.state import Phase
from helios.terminal.progress import Display
from tests.engines.joined import replicas_on
from tests.loops.parts import ListSource
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.sums import by_definition

_VALIDATION = Phase.VALIDATION.value


def draw() -> tuple[float, float, float]:
    """Draw from all three generators."""
    numpy = rng.get_default_numpy_rng().generator.normal()
    return torch.rand(()).item(), random.random(), float(numpy)


def from_key(*fields: int | str) -> tuple[float, float, float]:
    """Return what is drawn first under a key."""
    with rng.stream(rng.key(*fields)):
        return draw()


class Scorer(Model):
    """Scores whose sum depends on its order; notes which batch it saw, and what it drew."""

    def __init__(self) -> None:
        super().__init__("scorer")
        self.device = torch.device("cpu")
        self.net = nn.Dropout()
        self.calls: list[tuple[Any, ...]] = []

    def setup(self, fast_init: bool = False) -> None:
        """Nothing to build."""

    def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        assert not self.net.training
        assert not torch.is_grad_enabled()
        self.calls.append((batch.tolist(), step, dataloader_idx, draw()))
        return {"score": (score_of(batch), len(batch))}


def score_of(batch: Tensor) -> Tensor:
    """Return numbers of different magnitude, in double precision."""
    return (torch.sin(batch.double() + 1) * 10 ** torch.cos(3 * batch.double())).sum() / 3


class Watcher(Quiet):
    """Notes what the events of each batch draw."""

    def __init__(self) -> None:
        super().__init__("watcher")
        self.drawn: list[list[Any]] = []

    def on_validation_batch_start(self, step: int) -> None:
        self.drawn.append([draw()])

    def process_validation_batch(self, batch: Any, step: int) -> Any:
        self.drawn[-1].append(draw())
        return batch

    def on_validation_batch_end(self, step: int) -> None:
        self.drawn[-1].append(draw())


def source_of(replicas: Replicas, length: int, *, number: int = 0, name: str = "") -> Source:
    """Return the part of the data that the replicas of this process evaluate on."""
    data = [100.0 * number + index for index in range(length)]
    loader, sampler = create_dataloader(data, batch_size=2)
    share = Shard(replicas.num_replicas, replicas.local_replicas, pads=False)
    source = open_source(loader, sampler, run_seed=0, purpose=f"valid-{number}", share=share)
    source.name = name
    return source


def evaluate(
    model: Model,
    replicas: Replicas,
    sources: list[Source],
    *plugins: Plugin,
    pass_number: int = 0,
) -> Any:
    """Validate by the loop alone, as a trainer does; returns its result."""
    loop = ValidationLoop()
    engine = Engine("cpu")
    engine.replicas = replicas
    parts = RunParts(
        model=model,
        engine=engine,
        hooks=Bus(plugins=plugins, model=model, engine=engine),
        display=Display(),
        seed=0,
        sources={loop.phase: sources},
        run=RunState(phase=loop.phase),
    )
    parts.run.state.validation_cycles = pass_number
    for plugin in plugins:
        plugin.context = parts.context
    loop._attach(parts)
    try:
        return loop.run()
    finally:
        loop.teardown()


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return


def batches_of(length: int, num_replicas: int) -> dict[tuple[int, int], list[float]]:
    """Return the batches by step and replica, as the data is dealt out: r, r + V, r + 2V …"""
    own = {r: [float(i) for i in range(length)][r::num_replicas] for r in range(num_replicas)}
    found = {}
    for replica, samples in own.items():
        for step, first in enumerate(range(0, len(samples), 2)):
            found[step, replica] = samples[first : first + 2]
    return found


def expected_score(length: int, num_replicas: int) -> float:
    """Add each replica's batches in their order, then replicas as the tree is defined."""
    sums = [0.0] * num_replicas
    for (_, replica), batch in sorted(batches_of(length, num_replicas).items()):
        sums[replica] += float(score_of(torch.tensor(batch)))
    mean: float = by_definition(sums) / length
    return mean


def _evaluate_two(rank: int, num_processes: int) -> tuple[Any, ...]:
    rng.seed_rngs(rank)
    before = draw()
    rng.seed_rngs(rank)
    with replicas_on(rank, num_processes, 3) as here:
        model = Scorer()
        sources = [
            source_of(here, 5, name="near"),
            source_of(here, 2, number=1, name="far"),
        ]
        evaluate(model, here, sources, pass_number=2)
        assert draw() == before, "the generators are given back"
        return dict(model.metrics), model.calls


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_each_of_several_loaders_has_its_scores_and_numbers(num_processes: int) -> None:
    """No sample counts twice; a replica may have no batch at all, and so may a process."""
    calls: list[Any] = []
    for scores, rank_calls in run_ranks(_evaluate_two, num_processes, num_processes):
        far = [torch.tensor([100.0]), torch.tensor([101.0])]
        total = by_definition([*(float(score_of(batch)) for batch in far), 0.0])
        assert scores == {"score/near": expected_score(5, 3), "score/far": total / 2}
        calls += rank_calls
    expected = [
        (batch, step, 0, from_key(0, _VALIDATION, 2, step, "replica", replica))
        for (step, replica), batch in batches_of(5, 3).items()
    ]
    expected += [
        (batch.tolist(), 0, 1, from_key(0, _VALIDATION, 2, 0, 1, "replica", replica))
        for replica, batch in enumerate(far)
    ]
    assert sorted(calls) == sorted(expected)


@pytest.mark.parametrize("rows", [[], [[NO_BATCH, NO_BATCH]]])
def test_no_data_is_an_error_and_no_batch_is_none(rows: list[Any]) -> None:
    model = Scorer()
    if rows:
        assert evaluate(model, Replicas(2), [ListSource(rows)]) is True
        assert model.metrics == {}
        return
    with pytest.raises(UsageError, match="at least one batch"):
        evaluate(model, Replicas(2), [ListSource(rows)])


class Odd(Scorer):
    def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return {"score": 1.0}


def test_what_is_no_score_is_refused() -> None:
    rows = [[torch.tensor([1.0]), torch.tensor([2.0])]]
    with pytest.raises(UsageError, match=r"must return None or a dict \{name: \(sum, weight\)\}"):
        evaluate(Odd(), Replicas(2), [ListSource(rows)])


def test_one_replica_draws_by_step_alone() -> None:
    """The numbers of a run of one replica are what they were before there were several."""
    model, lone, watcher = Scorer(), Replicas(), Watcher()
    evaluate(model, lone, [source_of(lone, 3)], watcher)
    # Start, process and step draw one after the other from the key of the batch.
    for step in (0, 1):
        with rng.stream(rng.key(0, _VALIDATION, 0, step)):
            expected = [draw() for _ in range(4)]
        start, process, end = watcher.drawn[step]
        assert [start, process, model.calls[step][-1], end] == expected
