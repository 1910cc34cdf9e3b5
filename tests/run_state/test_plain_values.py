"""Which values are plain, and what their digests tell apart (DESIGN section 6)."""

from __future__ import annotations

import datetime
import threading
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn

from helios.run_state.plain_values import Identities, Storages, tensors_in
from helios.run_state.value_hash import Look
from helios.run_state.value_scan import look_at
from helios.storage import codec


class Colour(Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Thing:
    def __init__(self, content: Any = None) -> None:
        self.content = content


class Refusing:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ZeroDivisionError


class Nothing:
    """Surroundings in which nothing is saved on its own account."""

    def name_of(self, value: object) -> str | None:
        return None

    storages = Storages({})


_NOWHERE = Nothing()
_IDENTITIES = Identities()

_PLAIN = [
    *(None, True, 7, -(10**700), 2.5, 1j, "text", b"bytes", range(3), slice(1, 2)),
    *(np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2024-01-01")),
    *(np.zeros((2, 3)), np.array([1, "a", None], dtype=object), np.zeros(0, dtype=np.int8)),
    *(Path("a/b"), PurePosixPath("c"), Decimal("1.5"), Fraction(1, 3), uuid.UUID(int=5)),
    *(datetime.date(2024, 1, 2), datetime.timedelta(days=1), datetime.time(3, 4)),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 1, 2, tzinfo=ZoneInfo("UTC")),
    *(torch.float16, torch.device("cpu"), torch.Size([2, 3])),
    *(torch.zeros(3), torch.tensor(2.0), torch.zeros(2, dtype=torch.bfloat16)),
    torch.zeros(2, requires_grad=True),
    *([1, [2, (3, {"a": 4})]], {1: {2: 3}, (1, "b"): 2}, {1, 2}, frozenset((1, 2)), deque([1], 3)),
    *(defaultdict(int, a=1), defaultdict(None), Counter("aab"), OrderedDict(b=1, a=2)),
]


def _look(value: Any, surroundings: Any = _NOWHERE) -> Look:
    return look_at(value, surroundings, _IDENTITIES)


def _digest(value: Any, surroundings: Any = _NOWHERE) -> tuple[bool, bytes]:
    return _look(value, surroundings).digest[:2]


@pytest.mark.parametrize("value", _PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_is_one_that_a_checkpoint_takes_and_gives_back(value: Any) -> None:
    assert _look(value).is_plain
    again = codec.decode(codec.encode(value, where="value"))
    assert _digest(again) == _digest(value)


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        Point(1),
        [1, {"a": Thing()}],
        {Thing(): 1},
        len,
        int,
        defaultdict(lambda: 0),
        nn.Parameter(torch.zeros(1)),
        torch.zeros(2, requires_grad=True) * 2,
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        {torch.zeros(1)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_checkpoint_could_not_give_back_is_not_plain(value: Any) -> None:
    assert not _look(value).is_plain


def test_an_enum_member_of_a_type_declared_safe_comes_back_equal() -> None:
    assert _look(Colour.RED).is_plain
    code = codec.encode(Colour.RED, where="value", safe_types=[Colour])
    assert codec.decode(code, safe_types=[Colour]) is Colour.RED


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (deque([1]), deque([1], 3)),
        (np.float32(1), np.float64(1)),
        (1.0, np.float64(1)),
        (np.zeros(3), np.zeros((3, 1))),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)),
        (torch.tensor([1j]), torch.tensor([-1j])),
        (Path("a"), "a"),
        (Colour.RED, 1),
    ],
)
def test_values_of_other_type_order_or_bytes_have_another_digest(one: Any, other: Any) -> None:
    assert _digest(one) != _digest(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: [float("nan"), float("inf")],
        lambda: torch.tensor([float("nan"), float("-inf")]),
        lambda: torch.tensor([float("nan")], dtype=torch.bfloat16),
        lambda: torch.zeros(4, 6)[1:, ::2],
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: ["".join(["a", "b"]), "".join(["a", "b"])],
        lambda: {"a": [1, 2], "b": {"c": None}},
        lambda: torch.tensor(3),
        lambda: torch.zeros(0),
    ],
)
def test_values_built_again_have_the_same_digest(make: Any) -> None:
    assert _digest(make()) == _digest(make())


def test_shared_parts_and_equal_parts_have_one_digest() -> None:
    text = "".join(["lo", "ss"])
    shared = [text, text]
    assert _digest(shared) == _digest(["".join(["lo", "ss"]), "loss"])


def test_a_value_that_contains_itself_has_a_digest_that_follows_its_content() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    before = _digest(circle)
    assert before[0]
    assert _digest(circle) == before
    circle[0] = 2
    assert _digest(circle) != before


def test_an_object_is_digested_by_content_and_what_refuses_pickle_by_identity() -> None:
    lock = threading.Lock()
    thing = Thing([lock, lambda: 0, Refusing(), {"count": 1}])
    before = _digest(thing)
    assert _digest(thing) == before
    thing.content[3]["count"] = 2
    assert _digest(thing) != before
    thing.content[3]["count"] = 1
    assert _digest(thing) == before
    thing.content[0] = threading.Lock()
    assert _digest(thing) != before


def test_a_dictionary_with_an_unpicklable_factory_is_still_digested_by_content() -> None:
    counts: defaultdict[str, int] = defaultdict(lambda: 0)
    before = _digest(counts)
    assert _digest(counts) == before
    counts["a"] += 1
    assert _digest(counts) != before


@pytest.mark.parametrize("make", [torch.Generator, lambda: np.random.default_rng(3)])
def test_a_generator_of_random_numbers_changes_when_it_is_drawn_from(make: Any) -> None:
    generator = make()
    before = _digest(generator)
    assert _digest(generator) == before
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator)
    else:
        generator.random()
    assert _digest(generator) != before


def test_no_number_is_given_to_two_objects_even_at_one_address() -> None:
    identities = Identities()
    numbers = {identities.number(Thing()) for _ in range(100)}
    assert len(numbers) == 100
    lasting = Thing()
    alive = weakref.ref(lasting)
    assert identities.number(lasting) == identities.number(lasting)
    del lasting
    assert alive() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((600, 500)),
        lambda: np.zeros((600, 500)).T,
        lambda: np.zeros((600, 500))[::2],
        lambda: np.frombuffer(bytes(2_400_000)),
        lambda: bytes(2_400_000),
        lambda: "x" * 2_400_000,
        lambda: list(range(300, 600_000)),
    ],
)
def test_a_large_value_is_read_to_its_end(make: Any) -> None:
    value = make()
    digest = _look(value).digest
    assert digest.is_plain
    assert 1_000_000 < digest.size < 3_000_000
    again = make()
    assert _look(again).digest == digest
    if isinstance(again, np.ndarray):
        again = again.copy()
        again.flat[-1] = 1
    else:
        again = again[:-1] + type(again)({str: "y", bytes: b"y", list: [0]}[type(again)])
    assert _look(again).digest != digest


def test_a_value_that_is_nested_too_deeply_for_a_file_is_not_plain() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    before = _look(deep)
    assert before.obstacle == "it is nested more than 100 levels deep: flatten it"
    assert _digest(deep) == before.digest[:2]
    innermost = deep
    while innermost:
        innermost = innermost[0]
    innermost.append(1)
    assert _digest(deep) != before.digest[:2]
    while isinstance(deep, list):  # taken apart by hand, since the interpreter would recurse
        deep = deep[0]


def test_aliases_have_parts_in_common_and_equal_values_do_not() -> None:
    shared = [1]
    one, other = _look({"a": shared}).parts, _look((shared,)).parts
    assert one & other
    assert not one & _look([1]).parts
    base = torch.zeros(4)
    assert _look(base[1:]).parts == _look((base[:2],)).parts


def test_tensors_of_a_value_come_in_a_fixed_order_each_once() -> None:
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    value = {"a": [first, {"b": (second, first)}], "c": deque([third])}
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3]
