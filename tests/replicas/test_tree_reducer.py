"""Sums over replicas have the bits of the tree on any number of processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

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
