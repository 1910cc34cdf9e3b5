"""``forward``, ``backward`` and ``update``, as loops of users call them, and ``Model.backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.loops.optimizer import OptimizerLoop
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.state import Phase
from tests.loops.sessions import ListSource, Stepper, fit, make_fit_loop, make_session

Advance = Callable[[Any, Any], None]


def make_loop(advance: Advance) -> OptimizerLoop:
    return type("Own", (OptimizerLoop,), {"advance": advance})()


def plain(loop: Any, batch: Any) -> None:
    """What the default advance does, in the words of the page."""
    loop.backward(loop.forward(batch))
    loop.update()


def run(
    advance: Advance | OptimizerLoop | None,
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
    session = make_session(
        model,
        *plugins,
        accumulation=accumulation,
        replicas=Replicas(num_replicas),
        sources={Phase.TRAINING: [ListSource(rows)]},
        total_steps=len(batches) // accumulation,
        **options,
    )
    loop = make_loop(advance) if callable(advance) else advance
    fit(session, make_fit_loop(loop))
    return model


class Steps(Plugin):
    """Counts the steps of optimizers, and what the events see."""

    def __init__(self) -> None:
        super().__init__("steps")
        self.seen: list[Any] = []

    def setup(self) -> None: ...

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self.seen.append([p.grad.item() for g in optimizer.param_groups for p in g["params"]])


@pytest.mark.shows("L43")
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_of_public_words_is_the_default_one(num_replicas: int, accumulation: int) -> None:
    """A loop of the user's made one update for each replica of a process, in silence."""
    options: dict[str, Any] = {"num_replicas": num_replicas, "accumulation": accumulation}
    found, default = Steps(), Steps()
    weight = run(plain, None, found, **options).weight
    assert weight == run(None, None, default, **options).weight
    assert found.seen == default.seen
    assert len(found.seen) == 4 // accumulation


def nothing(loop: Any, batch: Any) -> None:
    """Forgets all."""


def no_backward(loop: Any, batch: Any) -> None:
    loop.forward(batch)


def no_update(loop: Any, batch: Any) -> None:
    loop.backward(loop.forward(batch))


def no_forward(loop: Any, batch: Any) -> None:
    loop.backward(loop.session.model.train_step(batch, loop.session.state))
    loop.update()


MISTAKES: list[tuple[Advance, str]] = [
    (nothing, r"Own\.advance must call super\(\)\.advance\(batch\), or forward, backward and upd"),
    (no_backward, r"Own\.advance must call backward\(loss\) and update\(optimizer\) for each"),
    (no_update, r"Own\.advance must call update\(optimizer\) for 'optimizer' for each batch"),
    (no_forward, r"Own\.advance must call forward\(batch\) before backward\(loss\)"),
]


@pytest.mark.shows("L43")
@pytest.mark.parametrize(("advance", "message"), MISTAKES)
def test_a_call_that_is_missing_is_an_error_at_the_first_batch(
    advance: Advance, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(advance)


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
@pytest.mark.parametrize("advance", [None, plain])
def test_a_model_may_make_one_gradient_of_several_losses(num_replicas: int, advance: Any) -> None:
    model, watch = Surgeon(), Steps()
    run(advance, model, watch, num_replicas=num_replicas, accumulation=2)
    assert model.seen == [(["a", "b"], None)] * 4 * num_replicas
    assert watch.seen == [[13 * 1.5 * (num_replicas + 1) / 2], [13 * 6.0 * (num_replicas + 1) / 2]]
    assert model.loss_items.keys() == {"loss"}
