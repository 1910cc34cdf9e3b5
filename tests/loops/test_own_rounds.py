"""``forward``, ``backward`` and ``update``, as loops of users call them, and ``Model.backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.loops.yielding import YieldLoop
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


def test_each_round_begins_without_the_gradients_of_earlier_micro_batches() -> None:
    """What a loop projects or replaces must be the gradient of one micro-batch."""
    seen: list[float | None] = []

    def doubled(loop: Any, batch: Any) -> None:
        model = loop.session.model
        seen.append(model.gradient)
        loop.backward(loop.forward(batch))
        model.net.weight.grad = 2 * model.net.weight.grad
        loop.update()

    watch = Steps()
    run(doubled, None, watch, accumulation=2)
    assert seen == [None] * 4
    assert watch.seen == [[2 * 1.5], [2 * 6.0]]


def test_a_forward_may_be_repeated_before_the_update() -> None:
    """As in sharpness-aware minimization: two gradients, of which the second one counts."""

    def twice(loop: Any, batch: Any) -> None:
        weight = loop.session.model.net.weight
        loop.backward(loop.forward(batch))
        weight.grad = None
        loop.backward(loop.forward(batch))
        loop.update()

    assert run(twice, accumulation=2).weight == run(None, accumulation=2).weight


def nothing(loop: Any, batch: Any) -> None:
    """Forgets all."""


def by_hand(loop: Any, batch: Any) -> None:
    model, engine = loop.session.model, loop.session.engine
    engine.backward_loss(model.train_step(batch, loop.session.state))
    engine.optimizer_step(model.optimizer)
    engine.zero_grad(model.optimizer)


def no_backward(loop: Any, batch: Any) -> None:
    loop.forward(batch)


def no_update(loop: Any, batch: Any) -> None:
    loop.backward(loop.forward(batch))


def no_forward(loop: Any, batch: Any) -> None:
    loop.backward(loop.session.model.train_step(batch, loop.session.state))
    loop.update()


def update_alone(loop: Any, batch: Any) -> None:
    loop.forward(batch)
    loop.update()


def update_twice(loop: Any, batch: Any) -> None:
    loop.backward(loop.forward(batch))
    loop.update()
    loop.update()


def round_twice(loop: Any, batch: Any) -> None:
    plain(loop, batch)
    plain(loop, batch)


def stop(loop: Any, batch: Any) -> None:
    raise StopIteration


def stranger(loop: Any, batch: Any) -> None:
    loop.backward(loop.forward(batch))
    loop.update(torch.optim.SGD([torch.zeros(1)], lr=1.0))


MISTAKES: list[tuple[Advance, str]] = [
    (nothing, r"Own\.advance must call super\(\)\.advance\(batch\), or forward, backward and upd"),
    (by_hand, r"Own\.advance must call super\(\)\.advance\(batch\), or forward, backward and upd"),
    (stop, r"Own\.advance must call super\(\)\.advance\(batch\), or forward, backward and update"),
    (no_backward, r"Own\.advance must call backward\(loss\) and update\(optimizer\) for each"),
    (no_update, r"Own\.advance must call update\(optimizer\) for 'optimizer' for each batch"),
    (no_forward, r"Own\.advance must call forward\(batch\) before backward\(loss\)"),
    (update_alone, r"Own\.advance must call backward\(loss\) before it updates 'optimizer'"),
    (update_twice, r"Own\.advance must call update\(optimizer\) once for each optimizer"),
    (round_twice, r"call update\(optimizer\) once for each|needs one process per replica"),
    (stranger, r"Own\.advance must pass an optimizer of the model .* got SGD"),
]


@pytest.mark.shows("L43")
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("advance", "message"), MISTAKES)
def test_a_call_that_is_missing_or_made_twice_is_an_error_at_the_first_batch(
    advance: Advance, message: str, num_replicas: int
) -> None:
    model = Stepper()
    with pytest.raises((UsageError, ArgumentError), match=message):
        run(advance, model, num_replicas=num_replicas)


def test_a_window_whose_last_batch_does_not_update_is_an_error() -> None:
    def only_first(loop: Any, batch: Any) -> None:
        model = loop.session.model
        names = ("optimizer",) if loop.session.state.is_step_boundary else ("optimizer", "second")
        loss = loop.forward(batch)
        for name in names:
            loop.backward(loss, getattr(model, name), retain_graph=True)
            loop.update(getattr(model, name))

    with pytest.raises(UsageError, match=r"last micro-batch of a window, got no call for 'second'"):
        run(only_first, Pair(), accumulation=2)


class Pair(Stepper):
    """Two weights with an optimizer each, and a loss that reaches both."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup()
        self.other = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.other.weight)
        self.second = torch.optim.SGD(self.other.parameters(), lr=1.0)

    def train_step(self, batch: Any, state: Any) -> Any:
        return {"first": (self.net.weight * batch).sum(), "both": self._both(batch)}

    def _both(self, batch: Any) -> Tensor:
        return ((self.net.weight + self.other.weight) * batch).sum()


def alternate(loop: Any, batch: Any) -> None:
    model = loop.session.model
    losses = loop.forward(batch)
    loop.backward(losses["first"], model.optimizer)
    loop.backward(losses["both"], model.second)
    loop.update(model.optimizer)
    loop.update(model.second)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_loss_reaches_the_parameters_of_its_optimizer_only(
    num_replicas: int, accumulation: int
) -> None:
    watch, mean = Steps(), (num_replicas + 1) / 2
    run(alternate, Pair(), watch, num_replicas=num_replicas, accumulation=accumulation)
    gradients = [1.0, 2.0, 4.0, 8.0] if accumulation == 1 else [1.5, 6.0]
    assert watch.seen == [[mean * each] for each in gradients for _ in range(2)]


def test_one_of_several_optimizers_must_be_named_in_an_update() -> None:
    with pytest.raises(UsageError, match=r"an advance of your own calls update\(optimizer\)"):
        run(plain, Pair())


def test_gradients_that_an_update_has_taken_along_get_no_further_backward() -> None:
    def late(loop: Any, batch: Any) -> None:
        model = loop.session.model
        loss = loop.forward(batch)["both"]
        loop.backward(loss, retain_graph=True)
        loop.update(model.optimizer)
        loop.backward(loss, model.second)

    with pytest.raises(UsageError, match=r"for 'second' before .*: backward\(loss, optimizer\)"):
        run(late, Pair())


def test_a_joint_backward_needs_an_update_of_each_optimizer() -> None:
    def half(loop: Any, batch: Any) -> None:
        loop.backward(loop.forward(batch)["both"])
        loop.update(loop.session.model.optimizer)

    with pytest.raises(UsageError, match=r"must call update\(optimizer\) for 'second'"):
        run(half, Pair())


def test_schedulers_step_with_their_optimizer_only() -> None:
    model = Pair()
    run(alternate, model)
    assert model.scheduler.last_epoch == 4


class Skipping(Plugin):
    """Skips the updates of some iterations."""

    def __init__(self, *iterations: int) -> None:
        super().__init__("skipping")
        self.iterations = iterations

    def setup(self) -> None: ...

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        if self.context.state.global_iteration in self.iterations:
            self.context.skip_step("test")


def test_update_says_whether_weights_were_updated() -> None:
    made: list[bool] = []

    def telling(loop: Any, batch: Any) -> None:
        loop.backward(loop.forward(batch))
        made.append(loop.update())

    run(telling, None, Skipping(4), accumulation=2, batches=(1.0,) * 8)
    assert made[:6] == [False, True, False, False, False, True]


def test_a_loss_scale_belongs_to_a_window_of_all_optimizers() -> None:
    model = Pair()
    session = make_session(
        model,
        engine=Engine("cpu", precision=Precision.FP16),
        accumulation=2,
        sources={Phase.TRAINING: [ListSource([[1.0], [2.0], [4.0], [8.0]])]},
        total_steps=2,
    )
    fit(session, make_fit_loop(make_loop(alternate)))
    assert model.other.weight.item() == -7.5


def test_the_default_rounds_of_a_loop_may_be_several() -> None:
    """As in docs/choosing.md: an update for each ``super().advance``."""

    class Twice(OptimizerLoop):
        def advance(self, batch: Any) -> None:
            super().advance(batch)
            super().advance(batch)

    watch = Steps()
    run(Twice(), None, watch, batches=(1.0, 2.0))
    assert watch.seen == [[1.0], [1.0], [2.0], [2.0]]


class Halved(OptimizerLoop):
    """Redefines one of the words: the default advance calls it."""

    def backward(self, losses: Any, optimizer: Any = None) -> None:
        super().backward(losses / 2, optimizer)


class Forgetful(OptimizerLoop):
    """Redefines the update, and forgets the default one."""

    def update(self, optimizer: Any = None) -> bool:
        return True


def test_each_of_the_words_may_be_redefined() -> None:
    watch = Steps()
    run(Halved(), None, watch)
    assert watch.seen == [[0.5], [1.0], [2.0], [4.0]]
    with pytest.raises(UsageError, match=r"Forgetful\.update\(optimizer\) must call super"):
        run(Forgetful())


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


def test_a_backward_of_a_model_may_call_that_of_its_base() -> None:
    class Weighted(Surgeon):
        def backward(self, losses: Any) -> None:
            Stepper.backward(self, {"loss": losses["a"] + 2 * losses["b"]})

    model, watch = Weighted(), Steps()
    run(None, model, watch)
    assert watch.seen == [[7.0], [14.0], [28.0], [56.0]]


def test_a_backward_of_a_model_without_gradients_is_an_error() -> None:
    class Idle(Surgeon):
        def backward(self, losses: Any) -> None:
            sum(losses.values())

    with pytest.raises(UsageError, match=r"Idle\.backward\(losses\) must leave gradients"):
        run(None, Idle())


def test_a_backward_of_a_model_with_other_arguments_is_an_error() -> None:
    class Wrong(Stepper):
        def backward(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ArgumentTypeError, match=r"Wrong\.backward must take \(losses\), but takes"):
        run(None, Wrong())


def test_a_manual_model_may_have_a_backward_of_its_own() -> None:
    class Manual(Stepper):
        def train_step(self, batch: Any, state: Any) -> None:
            self.backward(batch, 2)

        def backward(self, batch: Any, factor: int) -> None:  # type: ignore[override]
            (self.net.weight * batch * factor).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    assert run(None, Manual()).weight == -30.0


def test_a_yield_loop_refuses_a_backward_of_the_model() -> None:
    with pytest.raises(UsageError, match=r"Surgeon\.backward must not be overridden with a Yield"):
        run(YieldLoop(), Surgeon())


def test_a_yield_loop_has_no_forward_of_its_own() -> None:
    class Yielding(Stepper):
        def train_step(self, batch: Any, state: Any) -> Any:
            yield (self.net.weight * batch).sum()

    kind = type("Own", (YieldLoop,), {"advance": plain})
    with pytest.raises(UsageError, match=r"Own\.advance must call super\(\)\.advance\(batch\), "):
        run(kind(), Yielding())


def test_a_manual_step_in_a_loop_of_ones_own_needs_neither_backward_nor_update() -> None:
    class Manual(Stepper):
        def train_step(self, batch: Any, state: Any) -> None:
            (self.net.weight * batch).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def only_forward(loop: Any, batch: Any) -> None:
        assert loop.forward(batch) is None

    assert run(only_forward, Manual()).weight == -15.0
    with pytest.raises(UsageError, match=r"must not call backward\(loss\) or update"):
        run(update_alone, Manual())


class Raw(Loop):
    """A batch loop that derives from none of Helios' own, and trains by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    @property
    def done(self) -> bool:
        return self.is_over

    def reset(self) -> None:
        self.is_over = False

    def advance(self, batch: Any) -> None:
        self.is_over = True
        by_hand(self, batch)


@pytest.mark.shows("L43")
@pytest.mark.parametrize(("num_replicas", "accumulation"), [(2, 1), (1, 2), (1, 1)])
def test_gradients_that_no_optimizer_loop_has_seen_are_an_error(
    num_replicas: int, accumulation: int
) -> None:
    def train() -> None:
        rows = [[1.0] * num_replicas] * 2
        session = make_session(
            Stepper(),
            accumulation=accumulation,
            replicas=Replicas(num_replicas),
            sources={Phase.TRAINING: [ListSource(rows)]},
            total_steps=1,
        )
        fit(session, FitLoop(EpochLoop(Raw(), ValidationLoop())))

    if num_replicas == accumulation == 1:
        train()
        return
    with pytest.raises(UsageError, match=r"Raw must run an OptimizerLoop on each batch"):
        train()
