"""Gradients that are sent while backward goes on: the same bits, and really before its end.

It is meant for accelerators; on the CPU the same code runs, without a gain.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.engines.engine import Engine
from helios.replicas.tree_reducer import TreeReducer
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.sums import bits


class Net(nn.Module):
    """Two types, a branch that some batches leave out, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.branch = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 4).double()
        self.idle = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        inner = self.first(rows).tanh()
        if int(numbers[0]) % 3:
            inner = inner + self.branch(inner)
        return self.last(self.wide(inner.double()).float())


class Learner(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(3)
        self.net = Net()
        self.net.first.bias.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        rows, numbers = batch
        if state.global_iteration == 4:
            # A part of the gradients is there before Helios' own backward.
            self.net.first(rows).mean().backward()
        return self.net(rows, numbers).square().mean()


class Data(helios.DataModule):
    def setup(self) -> None:
        generator = torch.Generator().manual_seed(1)
        numbers = torch.arange(120)
        rows = torch.randn(120, 3, generator=generator)
        params = helios.DataLoaderParams(batch_size=1, shuffle=True)
        data = torch.utils.data.TensorDataset(rows, numbers)
        self._train_dataset = self._create_dataset(data, params)


class Looking(Quiet):
    """Hears what replicas' gradients are."""

    def on_backward_end(self) -> None: ...


def _train(
    rank: int, num_replicas: int, window: int, bucket_bytes: int | None, way: str
) -> tuple[dict[str, bytes], dict[str, bytes], int]:
    engine = Engine("cpu", bucket_bytes=bucket_bytes, clip_norm=0.5)
    in_backward, num_early = False, 0
    backward, all_reduce = engine.backward_loss, TreeReducer.all_reduce

    def going_backward(*args: Any, **options: Any) -> None:
        nonlocal in_backward
        in_backward = True
        backward(*args, **options)
        in_backward = False

    def reducing(self: TreeReducer, sums: Any) -> Any:
        nonlocal num_early
        num_early += in_backward
        return all_reduce(self, sums)

    engine.backward_loss = going_backward  # type: ignore[method-assign]
    TreeReducer.all_reduce = reducing  # type: ignore[method-assign]
    model = Learner("net")
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=6,
        num_replicas=num_replicas,
        accumulation_steps=window,
        engine=engine,
        print_banner=False,
        plugins=[Looking()] if way == "heard" else [],
    )
    if way == "hooked":
        setup = model.setup

        def hooked(fast_init: bool = False) -> None:
            setup(fast_init)
            if rank == 1:
                model.net.last.weight.register_post_accumulate_grad_hook(lambda p: None)

        model.setup = hooked  # type: ignore[method-assign]
    trainer.fit(model, Data())
    state = model.optimizer.state_dict()["state"]
    moments = {f"{n}.{k}": bits(v) for n, part in state.items() for k, v in part.items()}
    return {name: bits(p.detach()) for name, p in model.net.named_parameters()}, moments, num_early


def _train_with_each(
    rank: int, num_replicas: int, window: int, sizes: tuple[int, ...]
) -> list[tuple[dict[str, bytes], dict[str, bytes], int]]:
    return [_train(rank, num_replicas, window, size, "") for size in sizes]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("num_replicas", "num_processes"), [(3, 2), (3, 3), (5, 3)])
@pytest.mark.parametrize("window", [1, 3])
def test_buckets_change_no_bit(num_replicas: int, num_processes: int, window: int) -> None:
    """Of one parameter each, of a few, and of all; beside one process without any."""
    (usual,) = run_ranks(_train, 1, num_replicas, window, None, "")
    assert usual[2] == 0
    sizes = (1, 200, 10**6)
    for rank in run_ranks(_train_with_each, num_processes, num_replicas, window, sizes):
        for size, found in zip(sizes, rank, strict=True):
            assert found[:2] == usual[:2]
            assert found[2] > 0 or size > 200


@pytest.mark.parametrize("way", ["heard", "hooked"])
def test_gradients_stay_where_somebody_looks_at_them(way: str) -> None:
    """In one process is enough: all of them must send alike."""
    usual = run_ranks(_train, 2, 2, 1, None, way)
    assert run_ranks(_train, 2, 2, 1, 1, way) == usual
    assert usual[0][2] == 0
