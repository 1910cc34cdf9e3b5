"""Processes that call different units end with an error, not with shards of two units mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.errors import UsageError
from helios.sharding import sharded_gradients
from helios.state import TrainingState
from tests.support.ranks import run_ranks


class Experts(nn.Module):
    """Two units of one size and a third one, which a call names in its order; ~ detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.large = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 4))

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names.split():
            x = x.detach() if name == "~" else self.get_submodule(name)(x)
        return x


class Routed(helios.Model):
    """Calls units: for each step, what each rank calls, in several forwards separated by ``|``."""

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        super().__init__("routed")
        self.calls = calls

    def setup(self, fast_init: bool = False) -> None:
        self.num_updates = 0
        self.net = Experts()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def shard(self) -> list[nn.Module]:
        return [*self.net.children()]

    def train_step(self, batch: Tensor, state: TrainingState) -> Tensor:
        self.num_updates = state.global_step
        result = batch
        for names in self.calls[state.global_iteration - 1][self.global_rank].split("|"):
            result = self.net(result, names)
        # What nothing is called for has a loss of its own.
        return result.sum() if result.requires_grad else torch.zeros((), requires_grad=True)


class Data(helios.DataModule):
    def setup(self) -> None:
        rows = torch.arange(16.0).reshape(4, 4)
        self._train_dataset = self._create_dataset(rows, helios.DataLoaderParams())


def train(rank: int, limit: int, num_replicas: int, calls: list[tuple[str, str]]) -> str:
    """Train; returns the error, and the updates before the last step."""
    sharded_gradients._COMPARED_AT_ONCE = limit
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=len(calls),
        num_replicas=num_replicas,
        sharding="full",
        use_cpu=True,
        print_banner=False,
    )
    model = Routed(calls)
    with pytest.raises(UsageError, match="same order") as caught:
        trainer.fit(model, Data())
    return f"{str(caught.value).split('but ')[1].split('. ')[0]} after {model.num_updates}"


pytestmark = pytest.mark.timeout(150)
"""Where different calls are not named, processes wait for each other."""

A, B, LARGE = "first", "second", "large"


@pytest.mark.shows("P88")
@pytest.mark.parametrize("calls", [(A, B), (A, LARGE), (f"{A} {B}", A)])
def test_other_units_are_named_before_they_are_gathered(calls: tuple[str, str]) -> None:
    texts = run_ranks(train, 2, 1000, 2, [(A, A), calls])
    assert texts[0] == texts[1]
    assert texts[0].endswith("after 1")
    assert "of net" in texts[0]


_SAME = [(A, A)]


@pytest.mark.shows("P88")
@pytest.mark.parametrize(
    ("limit", "num_replicas", "calls", "one", "other"),
    [
        (1000, 2, [*_SAME, (A, f"{A} ~")], "the backward of net.first", "the end of its calls"),
        (0, 4, [*_SAME, (A, f"{A} ~")], "the backward of net.first", "the end of its calls"),
        (1000, 2, [*_SAME, (A, f"{A} | {A}")], "the forward of net", "the backward of net.first"),
        (
            *(0, 2, [*_SAME, *_SAME, (f"{A} {B}", f"{B} {A}")]),
            *("the forward of net.first", "the forward of net.second"),
        ),
    ],
)
def test_other_calls_are_named_before_the_update(
    limit: int, num_replicas: int, calls: list[tuple[str, str]], one: str, other: str
) -> None:
    texts = run_ranks(train, 2, limit, num_replicas, calls)
    assert texts == [f"one came to {one} while another came to {other} after {len(calls) - 1}"] * 2


@pytest.mark.shows("P88")
def test_results_that_not_all_use_are_named_in_backward() -> None:
    calls = (f"{LARGE} {B} {LARGE}", f"{LARGE} {B} ~ {LARGE}")
    texts = run_ranks(train, 2, 1000, 2, [*_SAME, calls])
    assert texts[0] == texts[1]
    assert "the backward of net" in texts[0]
    assert texts[0].endswith("after 1")
