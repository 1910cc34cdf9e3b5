"""How often processes wait for each other in a step: as seldom as what hooks may ask for allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helios
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.hooks.bus import Bus
from helios.plugins import Plugin
from helios.plugins.gradient_norm import GradientNormMonitor
from helios.replicas.messages import Message, PointToPoint
from helios.replicas.tree_reducer import TreeReducer
from helios.state import TrainingState
from tests.support.models import Fitting
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")
# What steps change is looked for at powers of two; between them every iteration is like the others.
FIRST, LAST = 9, 15


class Net(Fitting):
    """A network with BatchNorm, so that buffers are exchanged, too."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class ManualNet(Net):
    """Does backward itself, and no step: that would need a wrapped network."""

    def train_step(self, batch: Any, state: TrainingState) -> None:
        loss = super().train_step(batch, state)
        self._loss_items["loss"] = loss.detach()
        loss.backward()
        self.net.zero_grad()


class Data(helios.DataModule):
    def setup(self) -> None:
        rows = torch.arange(640.0).view(-1, 2) / 640
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(torch.utils.data.TensorDataset(rows), params)


def hearing(*events: str) -> Plugin:
    """Return a plugin that hears events, and asks for nothing."""
    methods: dict[str, Any] = {name: lambda self, *args: None for name in ("setup", *events)}
    return type("Hearing", (Plugin,), methods)("hearing")


def count(rank: int, num_processes: int, make: type[Net], events: tuple[str, ...]) -> Counter[str]:
    counts: Counter[str] = Counter()
    is_counting = False

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_counting:
                counts[name] += 1
            return function(*args, **kwargs)

        return call

    class Counted(make):  # type: ignore[misc, valid-type]
        def on_training_batch_start(self, state: TrainingState) -> None:
            nonlocal is_counting
            is_counting = FIRST <= state.global_iteration <= LAST
            super().on_training_batch_start(state)

    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=LAST + 1,
        num_replicas=num_processes,
        use_cpu=True,
        print_banner=False,
        plugins=[hearing(*events)] if events else [],
    )
    trainer.fit(Counted("net"), Data())
    return Counter({name: number / (LAST - FIRST + 1) for name, number in counts.items()})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param(("on_training_batch_start", "on_backward_end"), {}, id="before"),
        pytest.param(("on_training_batch_end",), {"all_reduce": 1}, id="behind the update"),
        pytest.param(("should_training_stop",), {"all_reduce": 1}, id="a poll"),
        pytest.param(
            ("on_before_zero_grad",), {"all_gather": 1, "all_reduce": 1}, id="in the update"
        ),
        pytest.param(
            ("on_optimizer_step_start",),
            {"all_gather": 1, "all_reduce": 2},
            id="before the update",
        ),
    ],
)
def test_a_step_takes_as_few_exchanges_as_what_is_heard_allows(
    num_processes: int, events: tuple[str, ...], expected: dict[str, float]
) -> None:
    """Beside the messages that carry the gradients."""
    for found in run_ranks(count, num_processes, num_processes, Net, events):
        assert found == expected


def test_a_manual_step_tells_everything_at_its_end() -> None:
    for found in run_ranks(count, 2, 2, ManualNet, ()):
        assert found == {}


class Norms(Plugin):
    """Puts a number into the losses behind the gradients, and keeps what it finds at the end."""

    unsaved = ("seen",)

    def __init__(self, event: str) -> None:
        super().__init__("norms")
        self.seen: list[tuple[dict[str, float], bytes]] = []
        vars(self)[event] = self.put

    def setup(self) -> None:
        self.seen = []

    def put(self, *args: Any) -> None:
        self.context.model.loss_items["norm"] = 0.1 * self.context.state.global_iteration

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        items = self.context.model.loss_items
        self.seen.append((sorted(items), bits(torch.stack([items[x] for x in sorted(items)]))))


def _see_losses(rank: int, num_processes: int, event: str) -> list[Any]:
    plugin = Norms(event)
    options = {"train_unit": "iteration", "total_steps": 3, "use_cpu": True}
    trainer = helios.Trainer(**options, num_replicas=4, print_banner=False, plugins=[plugin])
    trainer.fit(Net("net"), Data())
    return plugin.seen


@pytest.mark.parametrize("event", ["on_backward_end", "on_before_zero_grad"])
def test_losses_that_a_hook_puts_there_are_in_the_means(event: str) -> None:
    """In front of the gradients and behind them, on any number of processes."""
    found = [run_ranks(_see_losses, number, number, event) for number in (1, 2, 3, 4)]
    seen = [one for ranks in found for one in ranks]
    assert [names for names, _ in seen[0]] == [["loss", "norm"]] * 3
    assert all(one == seen[0] for one in seen)


class Asking(helios.loops.BatchLoop):
    """Asks for the end behind the update."""

    def advance(self, batch: Any) -> None:
        super().advance(batch)
        ask(self)


def ask(loop: helios.loops.BatchLoop) -> None:
    session = loop.session
    if session.replicas.rank == 0 and session.state.global_iteration == 4:
        session.context.request_stop("a loop says so")


class Clock(Plugin):
    """Knows the last iteration, and connects a loop in the third one."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        super().__init__("clock")
        self.act = act
        self.last = 0

    def setup(self) -> None: ...

    def on_training_batch_start(self, state: TrainingState) -> None:
        self.last = state.global_iteration
        if self.last == 3:
            self.act(self)


class Clipping(Engine):
    """Asks where an engine of Helios asks for nothing; puts a number into the losses."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        MODELS[-1].loss_items["norm"] = 0.5
        if MODELS[-1].trainer_context.state.global_iteration == 4 and self.replicas.rank == 0:
            MODELS[-1].trainer_context.request_stop("an engine says so")
        return super().optimizer_step(optimizer)


MODELS: list[Any] = []


def _stop_late(rank: int, num_replicas: int, way: str) -> tuple[int, list[list[str]]]:
    engine = Clipping("cpu") if way == "engine" else None
    options = {"train_unit": "iteration", "total_steps": 9, "engine": engine}
    epoch_loop: Any = None
    connect = way == "connected in mid-run"
    clock = Clock(lambda _: epoch_loop.connect(batch_loop=Asking()) if connect else None)
    seen: list[list[str]] = []

    class Seeing(Net):
        def on_training_batch_start(self, state: TrainingState) -> None:
            self.trainer_context = clock.context
            super().on_training_batch_start(state)

        def on_training_epoch_end(self, current_epoch: int) -> None:
            seen.append(sorted(self.loss_items))

    trainer = helios.Trainer(
        **options,
        use_cpu=None if engine else True,
        num_replicas=num_replicas,
        print_banner=False,
        plugins=[clock],
    )
    epoch_loop = trainer.fit_loop.epoch_loop
    if way == "subclass":
        epoch_loop.connect(batch_loop=Asking())
    if way == "method":
        loop = epoch_loop.batch_loop
        usual = loop.advance

        def advance(batch: Any) -> None:
            usual(batch)
            ask(loop)

        loop.advance = advance
    MODELS.append(Seeing("net"))
    MODELS[-1].unsaved = ("trainer_context",)
    trainer.fit(MODELS[-1], Data())
    return clock.last, seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["subclass", "method", "connected in mid-run", "engine"])
@pytest.mark.parametrize(("num_replicas", "num_processes"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_what_the_code_of_users_asks_for_counts_at_the_next_boundary(
    way: str, num_replicas: int, num_processes: int
) -> None:
    """Loops and engines of their own may ask at any place, and change the losses."""
    found = run_ranks(_stop_late, num_processes, num_replicas, way)
    names = ["loss", "norm"] if way == "engine" else ["loss"]
    assert found == [(4, [names])] * num_processes


def _ask_in_a_step(rank: int, num_replicas: int, act: str) -> str:
    class Hooked(Net):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.optimizer.register_step_post_hook(lambda *_: acts[act]())

    clock = Clock(lambda _: None)
    model = Hooked("net")
    acts: dict[str, Callable[[], object]] = {
        "request_stop": lambda: clock.context.request_stop("enough"),
        "interrupt": lambda: clock.context.interrupt("enough"),
        "request_checkpoint": lambda: clock.context.request_checkpoint(),
        "losses": lambda: model.loss_items.update(norm=0.5),
    }
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=2,
        num_replicas=num_replicas,
        use_cpu=True,
        print_banner=False,
        plugins=[clock],
    )
    with pytest.raises(UsageError, match=r"Call it in|Change them in") as info:
        trainer.fit(model, Data())
    return str(info.value)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("request_stop", r"Context.request_stop() must be called in an event"),
        ("interrupt", r"Context.interrupt() must be called in an event"),
        ("request_checkpoint", r"Context.request_checkpoint() must be called in an event"),
        ("losses", r"['norm'] in Model._loss_items changed after the losses"),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_nobody_expects_to_ask_is_refused(act: str, text: str, num_processes: int) -> None:
    """It would count one boundary later than on one replica, or be lost."""
    for found in run_ranks(_ask_in_a_step, num_processes, 2, act):
        assert text in found


def test_a_thread_may_ask_at_any_time() -> None:
    (last,) = run_ranks(_ask_in_a_thread, 1)
    assert last in (2, 3)


def _ask_in_a_thread(rank: int) -> int:
    class Hooked(Net):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.optimizer.register_step_post_hook(self.ask)

        def ask(self, *_: Any) -> None:
            if clock.last == 2:
                thread = Thread(target=clock.context.request_stop, args=("enough",))
                thread.start()
                thread.join()

    clock = Clock(lambda _: None)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=9,
        num_replicas=2,
        use_cpu=True,
        print_banner=False,
        plugins=[clock],
    )
    trainer.fit(Hooked("net"), Data())
    return clock.last


def test_who_overrides_a_method_that_asks_for_nothing_may_ask() -> None:
    class Louder(GradientNormMonitor):
        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            super().on_training_batch_end(state, should_log)

    assert not Bus(plugins=[GradientNormMonitor()]).asking & {"on_training_batch_end"}
    assert "on_training_batch_end" in Bus(plugins=[Louder()]).asking
    assert "on_training_batch_end" not in Bus(model=Net("net")).asking


def _carry(rank: int, num_processes: int, size: int, has_gradients: bool) -> Any:
    reducer = TreeReducer(num_processes, num_processes=num_processes, rank=rank)
    row = torch.arange(3, dtype=torch.float64) + 10 * rank
    content = torch.full((5,), 7 if rank == 0 else 0, dtype=torch.uint8)
    message = Message(PointToPoint(num_processes, rank, None), row, content)
    reducer.attach(message)
    leaf = torch.full((size,), 0.1 * (rank + 1))
    if has_gradients:
        leaf = reducer.all_reduce({reducer.nodes[0]: leaf})
    reducer.deliver()
    reducer.deliver()
    return message.rows.tolist(), message.content.tolist(), bits(leaf)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("size", "has_gradients"), [(4, True), (200_000, True), (0, True), (4, False)]
)
def test_a_message_arrives_everywhere(num_processes: int, size: int, has_gradients: bool) -> None:
    """Along a sum, whether that goes in one part or in halves; alone where there is none."""
    ranks = run_ranks(_carry, num_processes, num_processes, size, has_gradients)
    rows = [[10.0 * rank + place for place in range(3)] for rank in range(num_processes)]
    leaves = [torch.tensor(0.1 * (rank + 1)) for rank in range(num_processes)]
    for rank, (found, content, total) in enumerate(ranks):
        assert found == rows
        assert content == [7] * 5
        value = by_definition(leaves) if has_gradients else leaves[rank]
        assert total == bits(value.repeat(size))


def _sends(rank: int, num_processes: int) -> tuple[int, int]:
    reducer = TreeReducer(num_processes, num_processes=num_processes, rank=rank)
    ranks = PointToPoint(num_processes, rank, None)
    starts = []
    start = ranks.start
    ranks.start = lambda *args: starts.append(1) or start(*args)  # type: ignore[method-assign]
    reducer.attach(Message(ranks, torch.zeros(1), torch.zeros(0, dtype=torch.uint8)))
    reducer.all_reduce({reducer.nodes[0]: torch.ones(4)})
    carried = len(starts)
    reducer.deliver()
    return carried, len(starts)


@pytest.mark.parametrize(("num_processes", "rounds"), [(2, 1), (3, 1), (4, 2), (8, 3)])
def test_a_sum_carries_the_message_that_is_attached(num_processes: int, rounds: int) -> None:
    """In its rounds, and not once more behind it."""
    assert run_ranks(_sends, num_processes, num_processes) == [(rounds, rounds)] * num_processes
