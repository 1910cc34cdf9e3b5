"""The loop for generator steps: one loss by `yield` for each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentError, UsageError
from helios.hooks.context import Context
from helios.loops import YieldLoop
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.run_parts import RunParts
from helios.state import Phase, TrainingState, TrainingUnit
from tests.loops.parts import (
    Failing,
    ListSource,
    attached,
    fit,
    make_fit_loop,
    make_parts,
    train_on,
)
from tests.support.quiet import Quiet

Body = Callable[["Pair", Any], Iterator[Any]]


def both(model: Pair, batch: Any) -> Iterator[Any]:
    """Yield a loss for `right`, then one for `left`: the order in which `setup` makes them."""
    yield (model.b * batch).sum()
    yield (model.a * batch).sum()


class Pair(Model):
    """Two weights, an optimizer and a scheduler for each; the step is up to the test."""

    def __init__(self, body: Body = both) -> None:
        super().__init__("pair")
        self.body = body
        self.setup()

    def setup(self, fast_init: bool = False) -> None:
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        # Not in the order of the names.
        self.right = SGD([self.b], lr=1.0)
        self.left = SGD([self.a], lr=1.0)
        self.left_scheduler = StepLR(self.left, 1, gamma=0.5)
        self.right_scheduler = StepLR(self.right, 1, gamma=0.5)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return self.body(self, batch)

    @property
    def weights(self) -> tuple[float, float]:
        return self.a.item(), self.b.item()

    @property
    def gradients(self) -> tuple[float | None, float | None]:
        found = [None if p.grad is None else p.grad.item() for p in (self.a, self.b)]
        return found[0], found[1]

    @property
    def moves(self) -> tuple[int, int]:
        return self.left_scheduler.last_epoch, self.right_scheduler.last_epoch


def prepared(
    model: Pair, *plugins: Plugin, loop: YieldLoop | None = None, **options: Any
) -> tuple[YieldLoop, RunParts]:
    parts = make_parts(model, *plugins, **options)
    loop = loop or YieldLoop()
    attached(loop, parts)
    for plugin in plugins:
        plugin.context = parts.context
    return loop, parts


class Watcher(Quiet):
    """Notes weights and gradients at every event of a step."""

    def __init__(self, model: Pair) -> None:
        super().__init__()
        self.model = model
        self.seen: list[tuple[Any, ...]] = []

    def note(self, event: str, *args: Any) -> None:
        self.seen.append((event, *args, self.model.weights, self.model.gradients))

    def on_forward_start(self, context: Context) -> None:
        self.note("forward", context.loss)

    def on_forward_end(self, context: Context) -> None:
        assert context.loss is not None
        self.note("forward done", context.loss.item())

    def on_backward_start(self, loss: Tensor) -> None:
        self.note("backward", loss.item())

    def on_backward_end(self) -> None:
        self.note("backward done")

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self.note("step", "left" if optimizer is self.model.left else "right")

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        self.note("step done", committed)


@pytest.mark.shows("L27")
def test_each_yield_is_trained_on_before_the_step_goes_on() -> None:
    """L27: locals survive, the next loss sees the new weights, each optimizer has its events."""

    def body(model: Pair, batch: Any) -> Iterator[Tensor]:
        local = model.b * batch + 1.0
        yield local
        yield (model.a + model.b.detach()) * local.detach()

    model = Pair(body)
    watcher = Watcher(model)
    loop, parts = prepared(model, watcher)
    assert train_on(loop, parts, 4.0) is True
    start, after_first = (0.0, 0.0), (0.0, -4.0)
    assert watcher.seen == [
        ("forward", None, start, (None, None)),
        ("forward done", 1.0, start, (None, None)),
        ("backward", 1.0, start, (None, None)),
        ("backward done", start, (None, 4.0)),
        ("step", "right", start, (None, 4.0)),
        ("step done", True, after_first, (None, None)),
        ("forward", None, after_first, (None, None)),
        ("forward done", -4.0, after_first, (None, None)),
        ("backward", -4.0, after_first, (None, None)),
        ("backward done", after_first, (1.0, None)),
        ("step", "left", after_first, (1.0, None)),
        ("step done", True, (-1.0, -4.0), (None, None)),
    ]
    assert model.moves == (1, 1)
    assert parts.run.is_manual is False


@pytest.mark.shows("L29")
def test_a_window_sums_each_optimizers_gradients_and_averages_them_apart() -> None:
    """L29: all yields of all micro-batches; a loss leaves the other's gradients alone."""

    def body(model: Pair, batch: Any) -> Iterator[Tensor]:
        yield model.b * batch + model.a * 100
        yield model.a * batch * 10 + model.b * 100

    model = Pair(body)
    loop, parts = prepared(model, accumulation=2)
    train_on(loop, parts, 4.0, is_boundary=False)
    assert (model.weights, model.gradients) == ((0.0, 0.0), (40.0, 4.0))
    train_on(loop, parts, 2.0)
    assert (model.weights, model.gradients) == ((-30.0, -3.0), (None, None))
    assert parts.engine.state_dict() == {"open_micro_batches": 0}
    train_on(loop, parts, 1.0)
    assert model.weights == (-35.0, -3.5)


def iter_losses(*losses: Any) -> Iterator[Any]:
    yield from losses


def test_names_settle_the_order_and_must_be_those_of_all_optimizers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = Pair(lambda model, batch: iter_losses(model.a, model.b))
    loop, parts = prepared(model, loop=YieldLoop(optimizers=("left", "right")))
    train_on(loop, parts, 0.0)
    assert model.weights == (-1.0, -1.0)
    assert "Pair.train_step yields its losses for left, then right" in caplog.text
    loop, parts = prepared(Pair(), loop=YieldLoop(optimizers=("left", "wrong")))
    with pytest.raises(UsageError, match=r"each optimizer of the model once \(\['left', 'right'\]"):
        train_on(loop, parts, 1.0)


@pytest.mark.shows("L27")
def test_a_step_that_is_no_generator_is_an_error() -> None:
    loop, parts = prepared(Pair(lambda model, batch: torch.ones(())))
    with pytest.raises(UsageError, match=r"Pair\.train_step must be a generator.*Tensor.*yield"):
        train_on(loop, parts, 1.0)


@pytest.mark.shows("L27")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_and_too_many_yields_are_errors(count: int) -> None:
    """L27: the end of the generator must not end the loop in silence."""
    loop, parts = prepared(
        Pair(lambda model, batch: iter_losses(*[model.a + model.b for _ in range(count)]))
    )
    what = ["before it had yielded a loss for 'right'", "loss for 'left'", "", "yielded once more"]
    form = (
        rf"exactly one loss for each optimizer, in this order: right, left; but it .*{what[count]}"
    )
    with pytest.raises(UsageError, match=form):
        train_on(loop, parts, 1.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "got None"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\)"),
        (torch.ones(()), "requires_grad=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_yield_that_is_no_loss_is_an_error(answer: Any, words: str) -> None:
    loop, parts = prepared(Pair(lambda model, batch: iter_losses(model.b, answer)))
    with pytest.raises(UsageError, match=f"scalar loss tensor.*yield such losses.*{words}"):
        train_on(loop, parts, 1.0)


@pytest.mark.shows("L27")
@pytest.mark.parametrize(
    ("event", "kind"),
    [("on_backward_start", KeyboardInterrupt), ("on_optimizer_step_end", ValueError)],
)
def test_the_generator_is_closed_on_every_way_out(event: str, kind: type[BaseException]) -> None:
    """L27: what the body holds (a file, a `with` block) is released at once."""
    closed: list[bool] = []

    def body(model: Pair, batch: Any) -> Iterator[Tensor]:
        try:
            yield from both(model, batch)
        finally:
            closed.append(True)

    loop, parts = prepared(Pair(body), Failing(event, kind()))
    with pytest.raises(kind):
        train_on(loop, parts, torch.ones(1))
    assert closed == [True]
    loop, parts = prepared(Pair(body))
    train_on(loop, parts, torch.ones(1))
    assert closed == [True, True]


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_frozen_optimizer_gets_no_backward_and_its_step_changes_nothing(has_graph: bool) -> None:
    """Its loss needs no graph then; its events and its scheduler go on as in a loop by hand."""

    def body(model: Pair, batch: Any) -> Iterator[Tensor]:
        loss = model.b * model.a * batch + 7.0
        yield loss if has_graph else loss.detach()
        yield model.a * batch

    model = Pair(body)
    model.b.requires_grad_(False)
    watcher = Watcher(model)
    loop, parts = prepared(model, watcher)
    assert train_on(loop, parts, 3.0) is True
    assert (model.weights, model.gradients, model.moves) == ((-3.0, 0.0), (None, None), (1, 1))
    events = [name for name, *_ in watcher.seen]
    assert events[:4] == ["forward", "forward done", "step", "step done"]
    assert model.loss_items["loss_right"].item() == 7.0


class Skipper(Quiet):
    """Asks for a skip, in one event, at the n-th time."""

    def __init__(self, event: str, *numbers: int) -> None:
        super().__init__()
        self.count = 0

        def skip(*args: Any) -> None:
            if self.count in numbers:
                self.context.skip_step("test")
            self.count += 1

        setattr(self, event, skip)


@pytest.mark.parametrize(
    ("event", "numbers", "weights", "is_committed"),
    [
        ("on_optimizer_step_start", (0,), (-2.0, 0.0), True),
        ("on_optimizer_step_start", (1,), (0.0, -2.0), True),
        ("on_optimizer_step_start", (0, 1), (0.0, 0.0), False),
    ],
)
def test_a_skip_leaves_out_one_optimizers_update(
    event: str, numbers: tuple[int, ...], weights: tuple[float, float], is_committed: bool
) -> None:
    """E26: its scheduler stays; the step is withdrawn only if nothing was committed."""
    model = Pair()
    loop, parts = prepared(model, Skipper(event, *numbers))
    assert train_on(loop, parts, 2.0) is is_committed
    assert (model.weights, model.gradients) == (weights, (None, None))
    assert model.moves == tuple(int(weight != 0) for weight in weights)
    assert parts.run.state.current_iteration == int(is_committed)


@pytest.mark.shows("L45")
@pytest.mark.parametrize(
    ("event", "weights"),
    [
        ("on_forward_start", (0.0, 0.0)),
        ("on_backward_end", (-2.0, 0.0)),
    ],
)
def test_a_skip_inside_of_a_window_is_kept_for_the_updates_that_it_is_meant_for(
    event: str, weights: tuple[float, float]
) -> None:
    """Before the first loss it is for all; in the events of a loss it is for its optimizer."""
    model = Pair()
    loop, parts = prepared(model, Skipper(event, 0), accumulation=2)
    train_on(loop, parts, 2.0, is_boundary=False)
    train_on(loop, parts, 2.0)
    assert (model.weights, model.gradients) == (weights, (None, None))


@pytest.mark.shows("L45")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_may_leave_out_the_update_of_an_optimizer(accumulation: int) -> None:
    """As a GAN whose critic trains more often than its generator."""

    def body(model: Pair, batch: Any) -> Iterator[Any]:
        yield model.b * batch
        yield YieldLoop.SKIP if batch == 2.0 else model.a * batch

    model = Pair(body)
    loop, parts = prepared(model, accumulation=accumulation)
    for batch, weights in ((2.0, (0.0, -2.0)), (4.0, (-4.0, -4.0))):
        for number in range(accumulation):
            train_on(loop, parts, batch, is_boundary=number == accumulation - 1)
        assert model.weights == weights
        assert model.gradients == (None, None)
    assert model.moves == (1, 2)


@pytest.mark.shows("L28", "E24")
def test_the_body_computes_in_the_engines_precision_and_nothing_else_does() -> None:
    """L28, E24: autocast covers each part of the body, but no hook, no backward, no update."""
    seen: dict[str, list[bool]] = {"body": [], "elsewhere": []}

    def note(place: str) -> None:
        seen[place].append(torch.is_autocast_enabled("cpu"))

    def body(model: Pair, batch: Any) -> Iterator[Tensor]:
        note("body")
        yield model.b * 1.0
        note("body")
        yield model.a * 1.0
        note("body")

    class Noting(Watcher):
        def note(self, event: str, *args: Any) -> None:
            note("elsewhere")

    class Own(Engine):
        def backward_loss(self, loss: Tensor, inputs: Any = None) -> None:
            note("elsewhere")
            super().backward_loss(loss, inputs)

    model = Pair(body)
    engine = Own(torch.device("cpu"), precision=Precision.BF16)
    loop, parts = prepared(model, Noting(model), engine=engine)
    train_on(loop, parts, 1.0)
    assert seen == {"body": [True] * 3, "elsewhere": [False] * 14}


@pytest.mark.shows("L45")
def test_a_step_may_name_the_optimizer_of_each_loss() -> None:
    """As a GAN whose critic makes several updates on a batch: each sees the weights before."""

    def body(model: Pair, batch: Any) -> Iterator[Any]:
        yield model.b * batch, model.right
        yield model.b * model.b.detach() / 2, model.right
        yield model.a * model.b.detach(), model.left

    class Steps(Quiet):
        """Notes which optimizer steps, and counts the events of the forward."""

        seen: tuple[str, ...] = ()
        depth = 0

        def on_optimizer_step_start(self, optimizer: Any) -> None:
            self.seen += ("left" if optimizer is model.left else "right",)

        def on_forward_start(self, context: Context) -> None:
            self.depth += 1

        def on_forward_end(self, context: Context) -> None:
            self.depth -= 1

    model, steps = Pair(body), Steps()
    loop, parts = prepared(model, steps)
    train_on(loop, parts, 4.0)
    assert (steps.seen, steps.depth) == (("right", "right", "left"), 0)
    assert model.weights == (3.0, -3.0)
    assert model.moves == (1, 2)


@pytest.mark.shows("L45")
def test_gradients_of_an_optimizer_without_a_loss_at_the_end_of_a_window_are_dropped() -> None:
    """They would count in the next window, and not after a resume from the point between."""

    def body(model: Pair, batch: Any) -> Iterator[Any]:
        yield model.b * batch, model.right
        if batch < 4.0:
            yield model.a * batch, model.left

    model = Pair(body)
    loop, parts = prepared(model, accumulation=2)
    train_on(loop, parts, 1.0, is_boundary=False)
    train_on(loop, parts, 4.0)
    assert (model.weights, model.gradients) == ((0.0, -2.5), (None, None))


@pytest.mark.shows("L45")
def test_several_losses_of_a_parameter_are_refused_with_accumulation() -> None:
    body = lambda model, batch: iter_losses(  # noqa: E731
        (model.b * batch, model.right), (model.b * batch, model.right)
    )
    loop, parts = prepared(Pair(body), accumulation=2)
    with pytest.raises(UsageError, match=r"trained by one loss of a batch.*'right'"):
        train_on(loop, parts, 1.0, is_boundary=False)


@pytest.mark.shows("L45")
def test_a_stranger_is_no_optimizer_of_a_loss() -> None:
    loop, parts = prepared(Pair(lambda model, batch: iter_losses((model.b, object()))))
    with pytest.raises(ArgumentError, match=r"one of \['right', 'left'\], got object"):
        train_on(loop, parts, 1.0)


def exchanged(model: Pair, batch: Any) -> Iterator[Any]:
    """Yield both losses, each for the optimizer of the other."""
    yield (model.a * batch).sum()
    yield (model.b * batch).sum()


def test_a_loss_that_reaches_no_parameter_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Pair(exchanged)
    loop, parts = prepared(model)
    for _ in range(2):
        train_on(loop, parts, torch.ones(1))
    assert model.weights == (0.0, 0.0)
    assert [text.split(":")[0] for text in caplog.messages] == [
        f"The loss yielded for {path!r} reaches none of its parameters. Yields belong to the "
        "optimizers in the order right, left"
        for path in ("right", "left")
    ]


def skipped(model: Pair, batch: Any) -> Iterator[Any]:
    """Leave both optimizers out."""
    yield YieldLoop.SKIP
    yield YieldLoop.SKIP


def test_an_epoch_without_a_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sources = {Phase.TRAINING: [ListSource([torch.ones(1)] * 2)]}
    parts = make_parts(Pair(skipped), unit=TrainingUnit.EPOCH, sources=sources, total_steps=1)
    fit(parts, make_fit_loop(YieldLoop()))
    assert "Epoch 1 has made no optimizer step: all were skipped." in caplog.text
