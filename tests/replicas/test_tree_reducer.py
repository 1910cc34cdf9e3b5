"""Sums over replicas have the bits of the tree on any number of processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helios.errors import UsageError
from helios.replicas.flat_gradients import FlatBuffer, FlatGradients
from helios.replicas.named_sums import NumberReducer
from helios.replicas.reduction_tree import TreeStack
from helios.replicas.tree_reducer import TreeReducer
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition

pytestmark = pytest.mark.full  # several processes: the second tier of the tests

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
}
_SIZES = (0, 1, 2, 5, 1001)
_REPLICAS = range(1, 9)


def make_leaf(replica: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of so different magnitude that their sum depends on its order."""
    generator = torch.Generator().manual_seed(1000 * size + replica)
    draw = functools.partial(torch.rand, size, generator=generator, dtype=torch.float64)
    limit = 3 if dtype is torch.float16 else 30
    parts = [(draw() - 0.5) * 10 ** (draw() * 2 * limit - limit) for _ in range(2)]
    if dtype.is_complex:
        return torch.complex(*parts).to(dtype)
    leaf = parts[0].to(dtype)
    if size > 2:
        leaf[1] = -0.0
        leaf[2] = math.inf if replica == 1 else 1.0
    return leaf


def cases(num_processes: int) -> Iterator[tuple[int, str, int]]:
    """Yield number of replicas, type and size."""
    for num_replicas in _REPLICAS:
        if num_replicas >= num_processes:
            for name in _DTYPES:
                yield from ((num_replicas, name, size) for size in _SIZES)


def sum_block(reducer: TreeReducer, num_replicas: int, size: int, dtype: torch.dtype) -> Tensor:
    """Reduce the leaves of this process' replicas."""
    stack: TreeStack[Tensor] = TreeStack(reducer.block, num_replicas)
    for replica in reducer.block:
        stack.push(make_leaf(replica, size, dtype))
    return reducer.all_reduce(stack.take())


def _sum_all(rank: int, num_processes: int, way: str) -> dict[Any, bytes]:
    found = {}
    for num_replicas, name, size in cases(num_processes):
        reducer = TreeReducer(num_replicas, num_processes=num_processes, rank=rank)
        if way == "halves":
            reducer._whole_bytes = (0, 0)
        elif way == "chunks":
            reducer._distances = None
        total = sum_block(reducer, num_replicas, size, _DTYPES[name])
        found[num_replicas, name, size] = bits(total)
    return found


@functools.cache
def expected_bits(num_replicas: int, name: str, size: int) -> bytes:
    leaves = [make_leaf(replica, size, _DTYPES[name]) for replica in range(num_replicas)]
    return bits(by_definition(leaves))


@pytest.mark.parametrize(
    ("num_processes", "way"),
    [
        *((2, "wholes"), (2, "halves"), (2, "chunks")),
        (3, "chunks"),
        *((4, "wholes"), (4, "halves"), (4, "chunks")),
    ],
)
def test_sums_have_the_bits_of_the_definition_on_every_rank(num_processes: int, way: str) -> None:
    results = run_ranks(_sum_all, num_processes, num_processes, way)
    for found in results:
        assert list(found) == list(cases(num_processes))
        different = [case for case, value in found.items() if value != expected_bits(*case)]
        assert different == []


def _sum_large(rank: int) -> list[bool]:
    are_equal = []
    for size in (2**17, 2**17 + 1, 2**22 + 3):
        leaf = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        total = TreeReducer(4, num_processes=4, rank=rank).all_reduce({range(rank, rank + 1): leaf})
        leaves = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        are_equal.append(torch.equal(total, by_definition(leaves)))
    return are_equal


def test_large_tensors_have_the_bits_of_the_definition() -> None:
    assert run_ranks(_sum_large, 4) == [[True] * 3] * 4


def _sum_in_a_part(rank: int) -> bytes | None:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    reducer = TreeReducer(5, num_processes=3, rank=rank - 1, group=group)
    scores = NumberReducer(5, num_processes=3, rank=rank - 1, group=group)
    tables = [{"x": (float(replica), 1)} for replica in reducer.block]
    assert scores.sum_scores(tables) == {"x": (10.0, 5.0)}
    return bits(sum_block(reducer, 5, 64, torch.float32))


def test_a_group_may_be_a_part_of_all_processes() -> None:
    expected = expected_bits(5, "float32", 64)
    assert run_ranks(_sum_in_a_part, 4) == [None, expected, expected, expected]


class Branches(nn.Module):
    """A network in which each replica uses other parts, and nobody the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def loss(self, step: int, replica: int) -> Tensor:
        generator = torch.Generator().manual_seed(step * 100 + replica)
        hidden = torch.tanh(self.trunk(torch.randn(5, 6, generator=generator) * 10**replica))
        out = self.branches[(step + replica) % 2 * (replica % 3)](hidden * self.scale.float())
        return (out**3).sum() * 10 ** (3 - replica)


def _train_in_flat_buffers(rank: int, num_processes: int, num_replicas: int) -> dict[str, Any]:
    """Train with two micro-batches a step; return gradients, weights and unused parameters."""
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    reducer = TreeReducer(num_replicas, num_processes=num_processes, rank=rank)
    flat = FlatGradients(model.named_parameters())
    gradients = []
    for step in range(3):
        leaves: dict[int, FlatBuffer | None] = dict.fromkeys(reducer.block)
        for micro_batch in range(2):
            for replica in reducer.block:
                model.loss(2 * step + micro_batch, replica).backward()
                leaves[replica] = flat.move_all(leaves[replica])
        stack = TreeStack(reducer.block, num_replicas, flat.add)
        for leaf in leaves.values():
            stack.push(leaf)
        flat.set_gradients(flat.reduce(stack.take(), reducer))
        gradients.append(
            {n: bits(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "weights": {n: bits(p) for n, p in weights_of(model)}}


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def train_by_definition(num_replicas: int) -> dict[str, Any]:
    """Do the same without any of the code under test."""
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    names = [name for name, _ in model.named_parameters()]
    gradients = []
    for step in range(3):
        leaves: list[dict[str, Tensor]] = []
        for replica in range(num_replicas):
            for micro_batch in range(2):
                model.loss(2 * step + micro_batch, replica).backward()
            leaves.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            optimizer.zero_grad()
        used = [name for name in names if any(name in leaf for leaf in leaves)]
        for name, parameter in model.named_parameters():
            if name in used:
                zero = torch.zeros_like(parameter)
                parameter.grad = by_definition([leaf.get(name, zero) for leaf in leaves])
        gradients.append({n: bits(p.grad) for n, p in model.named_parameters() if n in used})
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "weights": {n: bits(p) for n, p in weights_of(model)}}


@pytest.mark.parametrize("num_replicas", [4, 6])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_training_with_missing_gradients_has_the_same_bits(
    num_processes: int, num_replicas: int
) -> None:
    expected = train_by_definition(num_replicas)
    used = [set(gradients) for gradients in expected["gradients"]]
    assert all("branches.3.weight" not in names for names in used)
    assert all("branches.0.weight" in names for names in used)
    for found in run_ranks(_train_in_flat_buffers, num_processes, num_processes, num_replicas):
        assert found == expected


def _check_descriptions(rank: int, lines: list[list[str]]) -> str:
    reducer = TreeReducer(3, num_processes=3, rank=rank)
    reducer.check_equal("parameters", ["same"])
    try:
        reducer.check_equal("parameters", lines[rank])
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([["a", "b"], ["a", "b"], ["a", "c"]], "rank 2 has c where rank 0 has b"),
        ([["a", "b"], ["a"], ["a", "b"]], "rank 1 has nothing where rank 0 has b"),
        ([["a"], ["a", "b"], ["a"]], "rank 1 has b where rank 0 has nothing"),
    ],
)
def test_processes_with_other_parameters_are_told_apart_on_all_ranks(
    lines: list[list[str]], message: str
) -> None:
    for found in run_ranks(_check_descriptions, 3, lines):
        assert f"must have the same parameters, but {message}" in found
