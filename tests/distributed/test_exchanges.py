"""What processes tell each other in a step, and what is refused because nobody would hear it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import helios
from helios.errors import UsageError
from helios.replicas.tree_reducer import Message, PointToPoint, TreeReducer
from tests.support.models import Fitting
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks


class Net(Fitting):
    """A network with BatchNorm, so that buffers are exchanged, too."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Data(helios.DataModule):
    def setup(self) -> None:
        rows = torch.arange(640.0).view(-1, 2) / 640
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(torch.utils.data.TensorDataset(rows), params)


def _ask_in_a_step(rank: int, num_replicas: int, act: str) -> str:
    class Hooked(Net):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.optimizer.register_step_post_hook(lambda *_: acts[act]())

    clock = Quiet()
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
