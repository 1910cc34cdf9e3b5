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
from torch import Tensor

from helios.core.memory import same

_OTHER_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8000000000001))[0]

_TYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_tensors_are_the_same_if_their_elements_have_the_same_bytes(dtype: torch.dtype) -> None:
    one = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    assert same(one, one.clone())
    assert same(one, one.t().contiguous().t()), "in another order in memory"
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
