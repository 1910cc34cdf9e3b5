"""How often processes wait for each other in a step: as seldom as what hooks may ask for allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helios
from helios.engines.message import Message
from helios.engines.ranks import Ranks
from helios.engines.reduce import TreeReducer
from helios.hooks.bus import Bus
from helios.plugins import Plugin
from helios.plugins.gradient_norm import GradientNormMonitor
from helios.state import TrainingState
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")
# What steps change is looked for at powers of two; between them every iteration is like the others.
FIRST, LAST = 9, 15


class Net(helios.Model):
    """A network with BatchNorm, so that buffers are exchanged, too."""

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        (rows,) = batch
        return self.net(rows).square().mean()


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

    last = 0

    def advance(self, batch: Any) -> None:
        super().advance(batch)
        session = self.session
        self.last = session.state.global_iteration
        if session.replicas.rank == 1 and session.state.global_iteration == 2:
            session.context.request_stop("a loop says so")


def _stop_in_loop(rank: int) -> int:
    options = {"train_unit": "iteration", "total_steps": 9, "use_cpu": True}
    trainer = helios.Trainer(**options, num_replicas=2, print_banner=False)
    trainer.fit_loop.epoch_loop.connect(batch_loop=(loop := Asking()))
    trainer.fit(Net("net"), Data())
    return loop.last


def test_what_a_loop_of_a_user_asks_for_counts_at_the_next_boundary() -> None:
    assert run_ranks(_stop_in_loop, 2) == [2, 2]


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
    message = Message(Ranks(num_processes, rank, None), row, content)
    reducer.attach(message)
    leaf = torch.full((size,), 0.1 * (rank + 1))
    if has_gradients:
        leaf = reducer.all_reduce({reducer.nodes[0]: leaf})
    reducer.deliver()
    reducer.deliver()
    return message.rows.tolist(), message.content.tolist(), bits(leaf)


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
    ranks = Ranks(num_processes, rank, None)
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
