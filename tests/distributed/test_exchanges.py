"""What processes tell each other in a step, and what is refused because nobody would hear it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.replicas.tree_reducer import Message, PointToPoint, TreeReducer
from helios.state import TrainingState
from tests.support.models import Fitting
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition


class Net(Fitting):
    """A network with BatchNorm, so that buffers are exchanged, too."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Data(helios.DataModule):
    def setup(self) -> None:
        rows = torch.arange(640.0).view(-1, 2) / 640
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(torch.utils.data.TensorDataset(rows), params)


class Clock(Plugin):
    """Knows the last iteration."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.last = 0

    def setup(self) -> None: ...

    def on_training_batch_start(self, state: TrainingState) -> None:
        self.last = state.global_iteration


def _ask_in_a_step(rank: int, num_replicas: int, act: str) -> str:
    class Hooked(Net):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.optimizer.register_step_post_hook(lambda *_: acts[act]())

    clock = Clock()
    model = Hooked("net")
    acts: dict[str, Callable[[], object]] = {
        "request_stop": lambda: clock.context.request_stop("enough"),
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
        ("losses", r"['norm'] in Model.loss_items changed after the losses"),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_nobody_expects_to_ask_is_refused(act: str, text: str, num_processes: int) -> None:
    """It would count one boundary later than on one replica, or be lost."""
    for found in run_ranks(_ask_in_a_step, num_processes, 2, act):
        assert text in found


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
@pytest.mark.parametrize("num_processes", [2, 3])
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


@pytest.mark.parametrize(("num_processes", "rounds"), [(3, 1), (4, 2)])
def test_a_sum_carries_the_message_that_is_attached(num_processes: int, rounds: int) -> None:
    """In its rounds, and not once more behind it."""
    assert run_ranks(_sends, num_processes, num_processes) == [(rounds, rounds)] * num_processes
