"""Gradients of several replicas: one sum along the tree, whoever carries which of them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from helios.errors import UsageError
from helios.replicas.gradients import GradientSum, make_gradients, norm_by_rows
from helios.replicas.replicas import Replicas
from tests.engines.joined import joined
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

Found = dict[str, bytes | None]

_MICRO_BATCHES = (1, 2, 3)
_REPLICAS = range(1, 7)


class Parts(nn.Module):
    """Parameters of two types; which of them a micro-batch uses depends on its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))
        self.number = nn.Parameter(torch.zeros(()))
        self.narrow = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.branch = nn.Parameter(torch.zeros(4))
        self.late = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.idle = nn.Parameter(torch.zeros(2, 2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def is_used(self, name: str, replica: int, micro: int) -> bool:
        """Say who uses what: a branch some replicas only, another in late micro-batches only."""
        if name == "branch":
            return replica % 3 == 1
        if name == "late":
            return micro == 1 and replica > 0
        return name not in ("idle", "frozen")

    def fill(self, replica: int, micro: int) -> None:
        """Let a micro-batch of a replica leave its gradients, as backward does."""
        for name, parameter in self.named_parameters():
            parameter.grad = self.draw(name, replica, micro)

    def draw(self, name: str, replica: int, micro: int) -> Tensor | None:
        """Return numbers of so different magnitude that their sum depends on its order."""
        if not self.is_used(name, replica, micro):
            return None
        parameter = self.get_parameter(name)
        draw = torch.Generator().manual_seed(hash((name.encode()[0], replica, micro)) % 2**31)
        shape = parameter.shape
        values = torch.randn(shape, generator=draw) * 10 ** (
            torch.rand(shape, generator=draw) * 4 - 2
        )
        return values.to(parameter.dtype)


def read(model: nn.Module) -> Found:
    """Return the bits of the gradients."""
    return {n: None if p.grad is None else bits(p.grad) for n, p in model.named_parameters()}


def expected_sum(num_replicas: int, num_micro: int) -> Found:
    """Add each replica's micro-batches in their order, then replicas as the tree is defined."""
    model = Parts()
    found: Found = {}
    for name, parameter in model.named_parameters():
        leaves, is_missing = [], True
        for replica in range(num_replicas):
            parts = [model.draw(name, replica, micro) for micro in range(num_micro)]
            there = [part for part in parts if part is not None]
            is_missing &= not there
            leaves.append(functools.reduce(torch.add, there or [torch.zeros_like(parameter.data)]))
        found[name] = None if is_missing else bits(by_definition(leaves))
    return found


def collect_window(model: Parts, summed: GradientSum, block: range, num_micro: int) -> None:
    """Go through a window, iteration by iteration, as the replicas of a process do."""
    for micro in range(num_micro):
        for replica in block:
            model.fill(replica, micro)
            summed.add_micro_batch(replica, ends_window=micro == num_micro - 1)
            assert set(read(model).values()) == {None}, "the next replica begins anew"


def sum_up(replicas: Replicas, num_micro: int, num_windows: int = 1) -> list[Found]:
    model = Parts()
    optimizer = SGD(model.parameters(), lr=1.0)
    summed = GradientSum(optimizer, replicas, {"net": model})
    found = []
    for _ in range(num_windows):
        collect_window(model, summed, replicas.local_replicas, num_micro)
        summed.finish()
        found.append(read(model))
    return found


@functools.cache
def _expected(num_replicas: int, num_micro: int) -> Found:
    return expected_sum(num_replicas, num_micro)


@pytest.mark.parametrize("num_micro", _MICRO_BATCHES)
@pytest.mark.parametrize("num_replicas", _REPLICAS)
def test_the_sum_follows_the_tree(num_replicas: int, num_micro: int) -> None:
    found = sum_up(Replicas(num_replicas), num_micro, num_windows=3)
    assert found == [_expected(num_replicas, num_micro)] * 3
    assert found[0]["idle"] is None
    assert found[0]["frozen"] is None
    assert (found[0]["branch"] is None) == (num_replicas == 1)
    assert (found[0]["late"] is None) == (num_replicas == 1 or num_micro == 1)


@pytest.mark.parametrize("num_done", [1, 4])
def test_a_window_that_is_dropped_leaves_nothing_behind(num_done: int) -> None:
    model = Parts()
    optimizer, gradients = SGD(model.parameters(), lr=1.0), make_gradients(Replicas(3))

    def collect(micro: int, *, ends_window: bool) -> None:
        for replica in range(3):
            model.fill(replica, micro)
            gradients.collect(optimizer, replica, lambda: {"net": model}, ends_window=ends_window)

    for micro in range(num_done):
        collect(micro, ends_window=False)
    gradients.drop_unused()
    collect(0, ends_window=True)
    gradients.finish(optimizer)
    assert read(model) == _expected(3, 1)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_the_norm_over_rows_is_close_to_that_in_float64(scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [(7, 5), (1, 3), (2,), (53, 11, 3), (1, 1), (4097,), (3, 0)]
    gradients = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    exact = sum(each.double().square().sum().item() for each in gradients) ** 0.5
    assert norm_by_rows(gradients).item() == pytest.approx(exact, rel=1e-6)


def _use_elsewhere(rank: int) -> Found:
    """Let each of two processes use a parameter of its own."""
    with joined(rank, 2) as info:
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        summed = GradientSum(SGD(model.parameters(), lr=1.0), Replicas(2, info), {})
        model[rank](torch.full((1, 1), 3.0 + rank)).sum().backward()
        summed.add_micro_batch(rank, ends_window=True)
        summed.finish()
        return read(model)


def test_a_gradient_of_one_process_is_there_on_all() -> None:
    first, second = (bits(torch.tensor([[number]])) for number in (3.0, 4.0))
    expected = {"0.weight": first, "1.weight": second, "2.weight": None}
    assert run_ranks(_use_elsewhere, 2) == [expected] * 2


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    summed = GradientSum(SGD(model.parameters(), lr=1.0), Replicas(2), {"net": model})
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match=r"'net.0.weight' must be dense .* num_replicas=1"):
        summed.add_micro_batch(0, ends_window=True)
