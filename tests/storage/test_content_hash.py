"""The fingerprint of a batch: what it sees, and that it runs no code of the values."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from helios.storage.content_hash import fingerprint, hash_bytes, hash_content, look, pack_indices

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


class Guarded:
    """Notices every look at it."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "__dataclass_fields__"):
            raise AssertionError(name)
        return object.__getattribute__(self, name)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_tensors_of_any_type_and_layout_have_a_fingerprint(dtype: torch.dtype) -> None:
    whole = (torch.arange(24) % 3).view(4, 6).to(dtype)
    assert fingerprint(whole.T) == fingerprint(whole.T.contiguous())
    assert fingerprint(whole).num_unseen == 0


def test_a_place_makes_a_difference() -> None:
    batch = _batch()
    assert (
        len({fingerprint(batch).value, fingerprint(batch, 0).value, fingerprint(batch, 1).value})
        == 3
    )
    assert hash_bytes(pack_indices([1, 2]), 0) != hash_bytes(pack_indices([1, 2]), 1)


def test_containers_are_entered() -> None:
    x = torch.ones(2)
    for make in (
        Sample,
        Pair,
        lambda x, y: [x, y],
        lambda x, y: UserDict(x=x, y=y),
        lambda x, y: OrderedDict(x=x, y={"y": (y,)}),
    ):
        same, other = make(x, 1), make(x, 2)
        assert fingerprint(same) == fingerprint(make(x.clone(), 1))
        assert fingerprint(same) != fingerprint(other)
        assert fingerprint(same).num_unseen == 0


def test_what_cannot_be_read_is_counted_and_not_asked() -> None:
    found = fingerprint([Guarded(), {1}, torch.ones(2).to_sparse(), np.array([None])])
    assert found.num_unseen == 4
    assert fingerprint(np.ma.masked_equal([1, 2], 2)).num_unseen == 1
    assert found == fingerprint([Guarded(), {2}, torch.zeros(2).to_sparse(), np.array([object()])])


def test_a_list_inside_of_itself_has_an_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) != fingerprint([1])


@pytest.mark.shows("P8")
def test_values_that_occur_many_times_are_read_once() -> None:
    """Seven nodes that refer to each other, as in a graph, have countless paths."""

    @dataclasses.dataclass
    class Node:
        number: int
        others: list[Any]

    nodes = [Node(number, []) for number in range(7)]
    for node in nodes:
        node.others = nodes
    assert fingerprint(nodes) == fingerprint(nodes)
    twice: list[Any] = [1, 2]
    for _ in range(60):
        twice = [twice, twice]
    assert fingerprint(twice).num_unseen == 0


def test_equal_values_are_equal_whether_they_are_one_object_or_two() -> None:
    one = (1, 2)
    assert fingerprint([one, one]) == fingerprint([one, tuple([1, 2])])  # noqa: C409 - another object


def test_entries_of_a_dictionary_have_no_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a": 2, "b": 1})


def test_long_lists_of_numbers_are_read_at_once() -> None:
    numbers = list(range(100))
    assert fingerprint(numbers) == fingerprint(list(range(100)))
    assert fingerprint(numbers) != fingerprint(numbers[::-1])
    assert fingerprint([*numbers, 1 << 70]) != fingerprint([*numbers, 1 << 71])


def test_methods_of_a_list_of_the_users_own_are_not_called() -> None:
    class Own(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("asked")

        __len__ = __iter__

    assert fingerprint(Own([1, 2])) == fingerprint([1, 2])


def test_indices_may_be_of_any_type() -> None:
    assert hash_bytes(pack_indices([3, 1])) == hash_bytes(pack_indices([np.int64(3), 1]))
    assert hash_bytes(pack_indices([3, 1])) != hash_bytes(pack_indices([1, 3]))
    kinds = [[3], 3.5, ["a"], [("a", 1)], [1 << 70]]
    assert len({hash_bytes(pack_indices(each)) for each in kinds}) == len(kinds)
    assert hash_bytes(pack_indices(3)) == hash_bytes(pack_indices([3]))


_X, _N = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.tensor([3, 1])


@pytest.mark.shows("P71")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([_X, _N], 8637285595334867531),
        ((_X, _N), 1994918334460049525),
        ([], 2886672781414374799),
        (_X, 17471035118155458055),
        ([_X, 1], 11588059872159585690),
        ([[_X], _N], 17321557199407119104),
        ([_X.T, _N], 17112707939740375755),
        ([_X.clone().requires_grad_(), _N], 8637285595334867531),
        ([_X.bfloat16()], 10501749929154179179),
        ([_N > 2, torch.tensor(1.5)], 12166528355089025376),
        ({"x": _X, "y": _N}, 5121733222641005290),
        ({"y": _N, "x": _X}, 5121733222641005290),
        ([_X.numpy()], 7443165633543843503),
        ([_X.to_sparse(), _N], 5858335459145362241),
        (list(range(40)), 9248586822348283460),
    ],
)
def test_a_fingerprint_stays_what_it_is_in_ledgers(value: Any, expected: int) -> None:
    assert fingerprint(value, 3).value == expected


def test_a_dictionary_of_tensors_is_hashed_alike_in_any_order_and_by_either_path() -> None:
    names = ["y", "x", "10", "9", "long name", "é", ""]
    tensors = {name: torch.full((number + 1,), number) for number, name in enumerate(names)}
    found = set()
    for order in (names, sorted(names), names[::-1]):
        batch = {name: tensors[name] for name in order}
        found |= {fingerprint(batch), fingerprint(UserDict(batch))}
    assert len(found) == 1


@pytest.mark.shows("P71")
def test_what_was_read_does_not_follow_later_changes() -> None:
    x, y = torch.ones(3), torch.zeros(2)
    for batch in ([x, y], (x, y), {"x": x, "y": y}, [x, [y]]):
        before, content = fingerprint(batch, 1), look(batch)
        x += 1
        assert hash_content(content, 1) == before.value != fingerprint(batch, 1).value


@pytest.mark.shows("P71")
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([4, 2], 12265578280899649975),
        (7, 11537534773456767528),
        ([np.int64(5)], 2714434441749549130),
        (["a", 1], 11296218970111189015),
        ([1.5], 8091397392959833349),
        ([], 10610619027356026955),
    ],
)
def test_a_hash_of_indices_stays_what_it_is_in_ledgers(indices: Any, expected: int) -> None:
    assert hash_bytes(pack_indices(indices), 2) == expected
