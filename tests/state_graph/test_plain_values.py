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

from helios.state_graph.scanning import ContentScanner
from helios.state_graph.values import Identities
from helios.storage import codec
from tests.state_graph.owners import Owner, changed, resumed, started, through_a_file


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


def _digest(value: Any) -> bytes:
    return ContentScanner(_IDENTITIES).mark(value)


def _saved(value: Any, *safe_types: type) -> dict[str, Any]:
    """Return the state of an owner to which training gave a value."""
    owner = Owner(value=None)
    discovery = started(owner)
    discovery.values.safe_types = safe_types
    owner.value = value
    return discovery.capture()


@pytest.mark.parametrize("value", _PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_is_one_that_a_checkpoint_takes_and_gives_back(
    value: Any, tmp_path: Path
) -> None:
    owner = Owner(value=threading.Lock())
    discovery = started(owner)
    owner.value = value
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert not state["missing"]
    again = resumed(lambda: Owner(value=None), state).value
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
def test_what_a_checkpoint_could_not_give_back_is_named(value: Any) -> None:
    state = _saved(value)
    assert "value" in {**state["missing"], **state["misfits"]}


def test_an_enum_member_of_a_type_declared_safe_comes_back_equal() -> None:
    assert not _saved(Colour.RED, Colour)["missing"]
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
    owner = Owner(value=make())
    discovery = started(owner)
    again = make()
    owner.value = again
    assert not changed(discovery)
    if isinstance(again, np.ndarray):
        again = again.copy()
        again.flat[-1] = 1
    else:
        again = again[:-1] + type(again)({str: "y", bytes: b"y", list: [0]}[type(again)])
    owner.value = again
    assert changed(discovery)


def test_a_value_may_be_nested_as_deeply_as_it_likes(tmp_path: Path) -> None:
    def make() -> Any:
        deep: list[Any] = []
        for _ in range(20_000):
            deep = [deep]
        return Owner(value=deep)

    def find_innermost(value: list[Any]) -> list[Any]:
        while value and isinstance(value[0], list):
            value = value[0]
        return value

    owner, again = make(), make()
    discovery = started(owner)
    assert not changed(discovery)
    find_innermost(owner.value).append(1)
    state = through_a_file(discovery.capture(), tmp_path / "state")
    assert len(state["values"]["nodes"]) == 1
    started(again).restore(state)
    assert find_innermost(again.value) == [1]
    for each in (owner, again):  # taken apart by hand, since the interpreter would recurse
        while isinstance(each.value, list) and each.value:
            each.value = each.value[0]


def test_tuples_in_tuples_beyond_what_is_read_are_named() -> None:
    deep: Any = ()
    for _ in range(150):
        deep = (deep, [])
    reason = _saved(deep)["missing"]["value"]
    assert reason == "it is nested more than 100 levels deep: flatten it"
