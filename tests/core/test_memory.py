"""What has the same bits is the same, wherever it is and however it lies in memory."""

from __future__ import annotations

import itertools
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helios.core.memory import same
from tests.support.ranks import run_ranks

_OTHER_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8000000000001))[0]

_TYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_tensors_are_the_same_if_their_elements_have_the_same_bytes(dtype: torch.dtype) -> None:
    one = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    assert same(one, one.clone())
    assert same(one, one.t().contiguous().t()), "in another order in memory"
    assert same(nn.Parameter(one) if dtype.is_floating_point else one, one.clone())
    assert same(one[:, 1:], one.clone()[:, 1:])
    assert same(one[:0], one[:0].clone())
    assert not same(one, one.reshape(3, 2))
    assert not same(one, torch.zeros(2, 3, dtype=torch.int32))
    changed = one.clone()
    changed[1, 2] = 1
    assert not same(one, changed)


def test_zeros_have_a_sign_and_a_nan_equals_itself() -> None:
    values = [0.0, -0.0, math.nan, _OTHER_NAN]
    as_types: list[Any] = [torch.tensor, np.array, np.float64, float, lambda v: [(v,)]]
    as_types += [lambda v: torch.tensor([v, 1]).expand(3, 2), lambda v: {"a": np.array([v])}]
    as_types += [lambda v: complex(0, v), lambda v: torch.complex(torch.zeros(()), torch.tensor(v))]
    for make in as_types:
        for one, other in itertools.product(range(4), repeat=2):
            left, right = (
                make(struct.unpack("d", struct.pack("d", values[n]))[0]) for n in (one, other)
            )
            if isinstance(left, Tensor) and left.dtype is not torch.float64:
                # Narrower types keep less of a NaN.
                continue
            assert same(left, right) == (one == other), (left, right)


def _compare_shards(rank: int) -> tuple[bool, ...]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    # Not by distribute_tensor, whose random numbers PyTorch 2.6 warns of on a CPU.
    rows = whole.tensor_split((2,))[rank]
    one, other = (
        DTensor.from_local(rows.clone(), mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
        for _ in range(2)
    )
    found = [same(one, other), same(nn.Parameter(one), other), same(one, whole)]
    found.append(same(one, DTensor.from_local(whole, mesh, [Replicate()])))
    if rank == 1:
        other.to_local()[0] += 1
    found.append(same(one, other))
    dist.barrier()
    return tuple(found)


def test_of_sharded_tensors_each_process_compares_its_shard() -> None:
    equal, unequal = run_ranks(_compare_shards, 2)
    assert equal == (True, True, False, False, True)
    assert unequal == (True, True, False, False, False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (torch.zeros(1), np.zeros(1, np.float32)),
    ],
)
def test_values_of_other_types_or_members_are_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)
