"""The fingerprint of a batch: what it sees, and that it runs no code of the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helios.storage.content_hash import (
    Content,
    fingerprint,
    fingerprint_indices,
    read_safely,
    read_sums,
    weigh,
)


def _batch() -> dict[str, Any]:
    image = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    return {"image": image, "label": torch.tensor([3, 1]), "names": ["a", "b"], "scale": 0.5}


def _exchange(batch: Any) -> None:
    batch["image"][0, 0, 1], batch["image"][1, 2, 0] = 20.0, 1.0


def _flip_two(batch: Any) -> None:
    batch["image"][0, 1] *= torch.tensor([-1.0, -1.0, 1.0, 1.0])


def _by_one_ulp(batch: Any) -> None:
    batch["image"][1, 1, 1] = np.nextafter(np.float32(17), np.float32(18)).item()


def _reshape(batch: Any) -> None:
    batch["image"] = batch["image"].view(3, 2, 4)


def _retype(batch: Any) -> None:
    batch["image"] = batch["image"].view(torch.int32)


def _rename(batch: Any) -> None:
    batch["picture"] = batch.pop("image")


def _sign_of_zero(batch: Any) -> None:
    batch["image"][0, 0, 0] = -0.0


def _text(batch: Any) -> None:
    batch["names"] = ["ab", ""]


def _number(batch: Any) -> None:
    batch["scale"] = 1


def _array(batch: Any) -> None:
    batch["label"] = batch["label"].numpy()


def _as_tuple(batch: Any) -> None:
    batch["names"] = tuple(batch["names"])


_CHANGES = [_exchange, _flip_two, _by_one_ulp, _reshape, _retype, _rename, _sign_of_zero]
_CHANGES += [_text, _number, _array, _as_tuple]


@pytest.mark.shows("P9")
@pytest.mark.parametrize("change", _CHANGES)
def test_every_change_of_a_batch_is_seen(change: Any) -> None:
    batch, other = _batch(), _batch()
    assert fingerprint(batch) == fingerprint(other)
    change(other)
    assert fingerprint(batch) != fingerprint(other)


_X, _N = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.tensor([3, 1])


def test_a_batch_of_tensors_has_the_same_fingerprint_however_it_lies_in_memory() -> None:
    lying = _X.T.contiguous().T.requires_grad_()
    assert not lying.is_contiguous()
    for batch, other in (([_X, _N], [lying, _N]), ({"x": _X, "n": _N}, {"n": _N, "x": lying})):
        assert fingerprint(batch) == fingerprint(other)


_COMPLEX = torch.tensor([1 + 2j])
_FREED = torch.ones(4)
_FREED.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("tensor", "is_fast"),
    [
        (_X, True),
        (_X[1:], True),
        (_X.bfloat16(), True),
        (_X > 2, True),
        (torch.tensor(3.0, requires_grad=True), True),
        (_X.T, False),
        (torch.empty(0, 3), False),
        (_COMPLEX, False),
        (_COMPLEX.conj().imag, False),
        (_X.to_sparse(), False),
        (_X.to("meta"), False),
        (_FREED, False),
        (np.arange(3), False),
    ],
)
@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (_N, x), lambda x: {"x": x, "n": _N}])
def test_a_batch_read_for_later_has_the_same_fingerprint(
    tensor: Any, is_fast: bool, make: Any
) -> None:
    batch = make(tensor)
    found, expected = read_sums(batch), read_safely(batch)
    if type(found) is Content:
        assert not is_fast
        assert found == expected
    else:
        assert is_fast
        assert (weigh(*found), 0) == expected[:2]


@pytest.mark.shows("P71")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([_X, _N], 13404295760473791054),
        ((_X, _N), 5196242965202794407),
        (_X, 3875356705119164419),
        ([_X.bfloat16()], 14221897936767826333),
        ({"x": _X, "y": _N}, 14233226322579065303),
        ([_X.numpy()], 8309936268448062315),
        ([_X.to_sparse(), _N], 14280565209073062323),
        (list(range(40)), 16213360552157951837),
    ],
)
def test_a_fingerprint_stays_what_it_is_in_ledgers(value: Any, expected: int) -> None:
    assert fingerprint(value) == expected


@pytest.mark.shows("P71")
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([4, 2], 12261356266003372210),
        (7, 16449184117230192567),
        ([np.int64(5)], 9699811644867543237),
        (["a", 1], 12432580524109551621),
        ([1.5], 15360892063954347896),
    ],
)
def test_a_hash_of_indices_stays_what_it_is_in_ledgers(indices: Any, expected: int) -> None:
    assert fingerprint_indices(indices) == expected
