"""``OptimizerLoop.losses``, as loops of users override it, and ``Model.backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helios.engines.engine import Engine
from helios.loops.optimizer import OptimizerLoop
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.state import Phase
from tests.engines.joined import replicas_on
from tests.loops.parts import ListSource, Stepper, fit, make_fit_loop, make_parts
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks

Losses = Callable[[Any, Any], Iterator[Any]]


def make_loop(losses: Losses) -> OptimizerLoop:
    return type("Own", (OptimizerLoop,), {"losses": losses})()


def plain(loop: Any, batch: Any) -> Iterator[Any]:
    """Passes on what the default yields."""
    yield from OptimizerLoop.losses(loop, batch)


def run(
    losses: Losses | None,
    model: Stepper | None = None,
    *plugins: Plugin,
    batches: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0),
    num_replicas: int = 1,
    **options: Any,
) -> Stepper:
    """Train on batches of numbers, all replicas in this process; returns the model."""
    model = model or Stepper()
    rows = [[batch * (r + 1) for r in range(num_replicas)] for batch in batches]
    accumulation = options.pop("accumulation", 1)
    parts = make_parts(
        model,
        *plugins,
        accumulation=accumulation,
        replicas=Replicas(num_replicas),
        sources={Phase.TRAINING: [ListSource(rows)]},
        total_steps=len(batches) // accumulation,
        **options,
    )
    fit(parts, make_fit_loop(None if losses is None else make_loop(losses)))
    return model


class Steps(Quiet):
    """Counts the steps of optimizers, and what the events see."""

    def __init__(self) -> None:
        super().__init__("steps")
        self.seen: list[Any] = []

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self.seen.append([p.grad.item() for g in optimizer.param_groups for p in g["params"]])


@pytest.mark.shows("L43")
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_that_are_passed_on_train_as_the_default_ones(
    num_replicas: int, accumulation: int
) -> None:
    """One update for all replicas of a process, and all micro-batches of a window."""
    options: dict[str, Any] = {"num_replicas": num_replicas, "accumulation": accumulation}
    found, default = Steps(), Steps()
    weight = run(plain, None, found, **options).weight
    assert weight == run(None, None, default, **options).weight
    assert found.seen == default.seen
    assert len(found.seen) == 4 // accumulation


@pytest.mark.shows("L43")
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_between_its_losses_a_loop_sees_the_gradient_of_one_micro_batch(
    num_replicas: int, accumulation: int
) -> None:
    """What is cleared does not count, and what is there at the end is averaged."""
    seen: list[Any] = []

    def twice(loop: Any, batch: Any) -> Iterator[Any]:
        weight = loop.session.model.net.weight
        before = weight.grad
        yield from OptimizerLoop.losses(loop, batch)
        seen.append((before, weight.grad.item() / batch))
        loop.session.model.optimizer.zero_grad()
        yield from OptimizerLoop.losses(loop, batch)
        weight.grad = weight.grad * 10

    watch = Steps()
    run(twice, None, watch, num_replicas=num_replicas, accumulation=accumulation)
    assert seen == [(None, 1.0)] * 4 * num_replicas
    batches = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(-1, accumulation).mean(1)
    assert watch.seen == [[10 * x * (num_replicas + 1) / 2] for x in batches.tolist()]


@pytest.mark.shows("L43")
def test_after_a_loss_with_its_optimizer_the_update_is_made() -> None:
    """One replica, and the update of each loss sees the weights that the one before has left."""
    weights: list[float] = []

    def apart(loop: Any, batch: Any) -> Iterator[Any]:
        model = loop.session.model
        for _ in range(2):
            for loss in OptimizerLoop.losses(loop, batch):
                yield loss, model.optimizer
            weights.append(model.weight)

    run(apart, batches=(4.0, 2.0))
    assert weights == [-4.0, -6.0, -6.5, -6.75]


class Surgeon(Stepper):
    """Makes one gradient of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.engine = Engine("cpu")

    def train_step(self, batch: Any, state: Any) -> Any:
        weight = self.net.weight
        return {"a": (weight * batch).sum(), "b": (weight * 3 * batch).sum(), "n": 5}

    def backward(self, losses: Any) -> None:
        self.seen.append((list(losses), self.gradient))
        gradients = []
        for loss in losses.values():
            self.engine.backward_loss(loss, retain_graph=True)
            gradients.append(self.net.weight.grad)
            self.net.weight.grad = None
        self.net.weight.grad = gradients[0] * 10 + gradients[1]


@pytest.mark.shows("L44")
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("losses", [None, plain])
def test_a_model_may_make_one_gradient_of_several_losses(num_replicas: int, losses: Any) -> None:
    model, watch = Surgeon(), Steps()
    run(losses, model, watch, num_replicas=num_replicas, accumulation=2)
    assert model.seen == [(["a", "b"], None)] * 4 * num_replicas
    assert watch.seen == [[13 * 1.5 * (num_replicas + 1) / 2], [13 * 6.0 * (num_replicas + 1) / 2]]
    assert model.loss_items.keys() == {"loss"}


def _train_unequally(rank: int) -> None:
    """Make one update more on rank 1."""

    def uneven(loop: Any, batch: Any) -> Iterator[Any]:
        model = loop.session.model
        for _ in range(1 + rank):
            for loss in OptimizerLoop.losses(loop, batch):
                yield loss, model.optimizer

    with replicas_on(rank, 2, 2) as here:
        parts = make_parts(
            Stepper(),
            replicas=here,
            sources={Phase.TRAINING: [ListSource([[1.0]])]},
            total_steps=1,
        )
        fit(parts, make_fit_loop(make_loop(uneven)))


@pytest.mark.shows("L43")
def test_processes_that_make_other_numbers_of_updates_are_told() -> None:
    with pytest.raises(RankError, match="must make the same number of updates"):
        run_ranks(_train_unequally, 2)
