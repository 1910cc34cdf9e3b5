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
from helios.plugins import Plugin
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
