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
from helios.loops.evaluation import EvaluationLoop, TestingLoop, ValidationLoop
from helios.loops.loop import LoopStates
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

    def _step(self, batch: Tensor, step: int, *which: int) -> dict[str, tuple[Any, Any]]:
        assert not self.net.training
        assert not torch.is_grad_enabled()
        self.calls.append((batch.tolist(), step, *which, draw()))
        score = {"score": (score_of(batch), len(batch))}
        return {**score, "rare": (batch.sum(), 1)} if 6.0 in batch else score

    def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return self._step(batch, step, *([] if dataloader_idx is None else [dataloader_idx]))

    def test_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return self.valid_step(batch, step, dataloader_idx)

    def predict_step(self, batch: Any, step: int) -> Any:
        return batch * 10


def score_of(batch: Tensor) -> Tensor:
    """Return numbers of different magnitude, in double precision."""
    return (torch.sin(batch.double() + 1) * 10 ** torch.cos(3 * batch.double())).sum() / 3


class Watcher(Quiet):
    """Notes the events of an evaluation, and what they draw and see."""

    def __init__(self) -> None:
        super().__init__("watcher")
        self.seen: list[tuple[Any, ...]] = []

    def note(self, event: str, *args: Any) -> None:
        self.seen.append((event, *args, draw()))

    def on_validation_start(self, validation_cycles: int) -> None:
        self.note("start", validation_cycles)

    def on_validation_batch_start(self, step: int, *which: int) -> None:
        self.note("batch start", step, *which, self.context.batch.tolist())

    def process_validation_batch(self, batch: Any, step: int, *which: int) -> Any:
        self.note("process", step, *which, batch.tolist())
        return batch

    def on_validation_batch_end(self, step: int, *which: int) -> None:
        self.note("batch end", step, *which, self.context.batch.tolist())

    def on_validation_end(self, validation_cycles: int) -> None:
        scores = dict(self.context.model.metrics)
        self.note("end", validation_cycles, scores)


def source_of(
    replicas: Replicas, length: int, *, batch_size: int = 2, number: int = 0, name: str = ""
) -> Source:
    """Return the part of the data that the replicas of this process evaluate on."""
    data = [100.0 * number + index for index in range(length)]
    loader, sampler = create_dataloader(data, batch_size=batch_size)
    share = Shard(replicas.num_replicas, replicas.local_replicas, pads=False)
    source = open_source(loader, sampler, run_seed=0, purpose=f"valid-{number}", share=share)
    source.name = name
    return source


def evaluate(
    loop: EvaluationLoop,
    model: Model,
    replicas: Replicas,
    sources: list[Source],
    *plugins: Plugin,
    pass_number: int = 0,
) -> Any:
    """Evaluate by the loop alone, as a trainer does; returns its result."""
    engine = Engine("cpu")
    engine.replicas = replicas
    parts = RunParts(
        model=model,
        engine=engine,
        hooks=Bus(plugins=plugins, model=model, engine=engine),
        display=Display(),
        seed=0,
        loop_states=LoopStates(loop, "loop", carries=False),
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


def expected_scores(length: int, num_replicas: int) -> dict[str, float]:
    """Add each replica's batches in their order, then replicas as the tree is defined."""
    batches = batches_of(length, num_replicas)
    sums, rare = [], []
    for replica in range(num_replicas):
        own = [torch.tensor(b) for (_, r), b in sorted(batches.items()) if r == replica]
        total = 0.0
        for batch in own:
            total = total + score_of(batch)
        sums.append(float(total))
        rare += [float(batch.sum()) for batch in own if 6.0 in batch]
    scores = {"score": by_definition(sums) / length}
    return {"rare": rare[0], **scores} if rare else scores


def _evaluate(rank: int, num_processes: int, num_replicas: int, length: int, kind: Any) -> Any:
    rng.seed_rngs(rank)
    before = draw()
    rng.seed_rngs(rank)
    with replicas_on(rank, num_processes, num_replicas) as here:
        model = Scorer()
        assert evaluate(kind(), model, here, [source_of(here, length)]) is True
        assert draw() == before, "the generators are given back"
        scores = model.metrics if kind is ValidationLoop else model.test_scores
        return dict(scores), list(scores), model.calls


@pytest.mark.parametrize(
    ("num_replicas", "length", "kind"),
    [
        (3, 11, ValidationLoop),
        pytest.param(5, 12, TestingLoop, marks=pytest.mark.full),
        (4, 2, TestingLoop),
    ],
)
def test_scores_are_the_same_on_any_number_of_processes(
    num_replicas: int, length: int, kind: type[EvaluationLoop]
) -> None:
    """No sample counts twice; a replica may have no batch at all, and so may a process."""
    expected = expected_scores(length, num_replicas)
    batches = batches_of(length, num_replicas)
    noun = kind.phase.value
    for num_processes in range(1, num_replicas + 1):
        ranks = run_ranks(_evaluate, num_processes, num_processes, num_replicas, length, kind)
        calls: list[Any] = []
        for scores, names, rank_calls in ranks:
            assert scores == expected
            assert names == sorted(expected)
            calls += rank_calls
        assert sorted(calls) == sorted(
            (batch, step, from_key(0, noun, 0, step, "replica", replica))
            for (step, replica), batch in batches.items()
        )


def _watch(rank: int, num_processes: int) -> list[tuple[Any, ...]]:
    rng.seed_rngs(rank)
    with replicas_on(rank, num_processes, 4) as here:
        watcher = Watcher()
        evaluate(ValidationLoop(), Scorer(), here, [source_of(here, 9)], watcher)
    # What a hook sees of a batch is its own process', the rest is everybody's.
    return [
        (event, *(args[:1] + args[2:] if "batch" in event else args))
        for event, *args in watcher.seen
        if event != "process"
    ]


@pytest.mark.parametrize("num_processes", [4])
def test_hooks_of_all_processes_draw_and_see_the_same(num_processes: int) -> None:
    """A process without a batch in the last iteration has no events of it."""
    (expected,) = run_ranks(_watch, 1, 1)
    assert [event[:2] for event in expected][1:-1] == [
        ("batch start", 0),
        ("batch end", 0),
        ("batch start", 1),
        ("batch end", 1),
    ]
    first, *others = run_ranks(_watch, num_processes, num_processes)
    assert first == expected
    for found in others:
        assert found == [event for event in expected if event[1] != 1]


def _evaluate_two(rank: int, num_processes: int) -> tuple[Any, ...]:
    with replicas_on(rank, num_processes, 3) as here:
        model = Scorer()
        sources = [
            source_of(here, 5, name="near"),
            source_of(here, 4, number=1, name="far"),
        ]
        evaluate(ValidationLoop(), model, here, sources, pass_number=2)
        return dict(model.metrics), model.calls


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_of_several_loaders_has_its_scores_and_numbers(num_processes: int) -> None:
    calls: list[Any] = []
    for scores, rank_calls in run_ranks(_evaluate_two, num_processes, num_processes):
        near = expected_scores(5, 3)
        far = [torch.tensor(b) for b in ([100.0, 103.0], [101.0], [102.0])]
        total = by_definition([float(score_of(batch)) for batch in far])
        assert scores == {"score/near": near["score"], "score/far": total / 4}
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
        assert evaluate(ValidationLoop(), model, Replicas(2), [ListSource(rows)]) is True
        assert model.metrics == {}
        return
    with pytest.raises(UsageError, match="at least one batch"):
        evaluate(ValidationLoop(), model, Replicas(2), [ListSource(rows)])


class Odd(Scorer):
    """Gives what is no score."""

    def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return {"score": 1.0}


def test_what_is_no_score_is_refused() -> None:
    rows = [[torch.tensor([1.0]), torch.tensor([2.0])]]
    with pytest.raises(UsageError, match=r"must return None or a dict \{name: \(sum, weight\)\}"):
        evaluate(ValidationLoop(), Odd(), Replicas(2), [ListSource(rows)])


def test_one_replica_draws_by_step_alone() -> None:
    """The numbers of a run of one replica are what they were before there were several."""
    model, lone, watcher = Scorer(), Replicas(), Watcher()
    evaluate(ValidationLoop(), model, lone, [source_of(lone, 3)], watcher)
    # Start, process and step draw one after the other from the key of the batch.
    for step in (0, 1):
        with rng.stream(rng.key(0, _VALIDATION, 0, step)):
            expected = [draw() for _ in range(4)]
        found = [args[-1] for event, *args in watcher.seen if args[0] == step and len(args) == 3]
        found = [numbers for numbers in found if isinstance(numbers, tuple)]
        drawn = [*found[:2], model.calls[step][-1], found[2]]
        assert drawn == expected
