"""Values become plain codes and come back with type, bits and sharing, also in place."""

from __future__ import annotations

import datetime
import enum
import io
import math
import random
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from helios.errors import StateError
from helios.storage.building import Builder
from helios.storage.codes import TAG, Coder
from helios.storage.memory_layout import place_views


class Colour(enum.Enum):
    RED = "r"
    GREEN = "g"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and other.content == self.content

    def __hash__(self) -> int:
        return 0


class Wider(torch.Tensor):
    pass


_TYPES = (Colour, Access, Point, Box)
_UTC = datetime.timezone.utc


def is_same(left: Any, right: Any) -> bool:
    """Equal in type and value, to the bit; also NaN and the sign of zero."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        a, b = np.asarray(left), np.asarray(right)
        if a.dtype == object:
            return a.shape == b.shape and is_same(a.ravel().tolist(), b.ravel().tolist())
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(left, dict):
        keys, others = list(left), list(right)
        return is_same(keys, others) and all(is_same(left[k], right[k]) for k in keys if k == k)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, Decimal):
        return str(left) == str(right)
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and repr(left) == repr(right)
    return bool(left == right)


_STRUCTURED = np.zeros(3, np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", "U3")], align=True))
_STRUCTURED["a"] = [1, 2, 3]

VALUES: dict[str, Any] = {
    "numbers": [0, -1, 2**31, -(2**63), 2**1999, 2**5000, -(3**4000), 1.5, -0.0, math.inf],
    "nan": math.nan,
    "words": [None, True, False, "", "ä\udc80\0", "x" * 300],
    "bytes": [b"", b"\x00\xff", bytes(range(256)) * 40, bytearray(b"abc"), bytearray()],
    "complex": [1 + 2j, complex(-0.0, math.inf)],
    "nested": {"a": [1, (2, [3, {"b": ()}])], "": {}},
    "keys": {1: "a", 2.5: "b", None: "c", False: "d", (1, ("x", None)): "e", 2**3000: "f"},
    "pairs": [[(1, "a"), (), (None,)], [(2**5000,), (1,)], {(1, 2): "x", ("a",): 2**4000}],
    "plain pairs": {(1, 2): "x", ("a", None): 1.5, (): True},
    "other keys": {np.int64(4): 1, frozenset({1}): 2, PurePosixPath("p"): 3, b"k": 4, (b"z",): 5},
    "tag as key": {TAG: "set", "items": [1]},
    "nested tags": [
        {TAG: {TAG: 1}},
        OrderedDict([(TAG, 2)]),
    ],
    "ordered": OrderedDict([("z", 1), ("a", OrderedDict())]),
    "ordered by other keys": OrderedDict([(np.int64(2), 1), (np.int64(1), 2)]),
    "counter": Counter("abracadabra"),
    "defaultdict": defaultdict(list, {"loss": [np.float32(1.5)], 3: []}),
    "defaultdict without factory": defaultdict(None, {1: 2}),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({frozenset({1}), None})],
    "deque": deque([np.float64(1), {"a": deque()}], maxlen=7),
    "deque without limit": deque("abc"),
    "ranges": [range(3), range(10, -5, -3), slice(None, 3), slice(1, None, -1)],
    "exact": [Fraction(1, 3), Decimal("0.10"), Decimal("NaN"), uuid.UUID(int=5)],
    "paths": [
        Path("a/b.txt"),
        Path("/x/ä \udc80"),
        PurePosixPath("a\\b"),
        PureWindowsPath("c:\\d"),
    ],
    "times": [
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1),
        datetime.datetime(2024, 1, 2, tzinfo=_UTC),
        datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "X")),
        datetime.timedelta(days=-1, microseconds=7),
        datetime.datetime(2024, 1, 2, tzinfo=ZoneInfo("UTC")),
        _UTC,
    ],
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "enums": [Colour.RED, {Colour.GREEN: 1}, Access.READ | Access.WRITE, Access(0)],
    "named tuples": [Point(1, [np.int8(2)]), Point(Point(0, None), b"")],
    "objects": [Box(3), Box([1, {"a": None}])],
    "NumPy scalars": [
        np.float64(1.1),
        np.float16("nan"),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 1j),
        np.str_("ä"),
        np.bytes_(b"x"),
        np.datetime64("2024-01-02T03:04", "m"),
        np.timedelta64(3, "D"),
        _STRUCTURED[1],
    ],
    "NumPy arrays": [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
        np.zeros((0, 3)),
        np.zeros((), np.int32),
        np.array(["a", "bcd"]),
        np.array([], "U"),
        np.arange(3, dtype=">i4"),
        np.array([np.nan, -0.0], np.float32),
        np.arange(20000),
        np.array(["2024-01-01"], "M8[D]"),
        _STRUCTURED,
        np.array([1, "a", None, np.float64(2), [1, 2]], object),
        np.array([[b"x"], [set()]], object),
    ],
    "tensors": [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(0, 3),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.arange(4)[::2],
        torch.ones(1).expand(4),
    ],
}


def write(value: Any, coder: Coder | None = None) -> Any:
    """Return a value's code, as it comes from a file."""
    coder = coder or Coder()
    code = coder.code("x", value)
    place_views(coder)
    buffer = io.BytesIO()
    torch.save(code, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_a_file(value: Any) -> Any:
    return Builder(_TYPES).build("x", write(value))


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_type_and_bits_whatever_is_there(name: str) -> None:
    code = write(VALUES[name])
    assert is_same(Builder(_TYPES).build("x", code), VALUES[name])
    for other in (name, "NumPy arrays", "tensors"):
        live = Coder()
        live.code("x", through_a_file(VALUES[other]))
        place_views(live)
        first = Builder(_TYPES, live).build("x", code)
        assert is_same(first, VALUES[name])


@pytest.mark.shows("S77")
def test_what_is_read_by_eye_is_plain() -> None:
    plain = {"epoch": 3, "names": ["a", "b"], "shape": (2, [1.5, None]), "best": {7: True}}
    assert write(plain) == plain
    assert write({"at": Path("a/b")}) == {"at": {TAG: "path", "value": "a/b"}}
    assert write(Box([1])) == {TAG: "object", "type": f"{__name__}.Box", "fields": {"content": [1]}}
    twice = [1]
    assert write({"a": twice, "b": twice}) == {"a": [1], "b": {TAG: "ref", "name": "x.a"}}


def make_knot() -> Any:
    """Return objects that lead to each other in every way."""
    ring: list[Any] = [1]
    box, table = Box(ring), {"ring": ring, b"k": (ring, [2])}
    point = Point(box, table)
    ring.append((point, ring))
    members: list[Any] = [ring, box, table, {1}, deque([box]), bytearray(b"a"), bytes(5000)]
    members += [np.arange(3), torch.zeros(2), defaultdict(list, {1: box}), random.Random(3)]
    members += [np.random.default_rng(4), torch.Generator(), np.array([box, None], object)]
    return {"1": members, 1: [*members], "a.b": [box, {"c": []}], "a": {"b": [ring]}}


def check_knot(found: Any) -> None:
    members = found["1"]
    assert all(one is two for one, two in zip(members, found[1], strict=True))
    ring, box, table = members[:3]
    assert box.content is ring
    assert ring[1][1] is ring
    assert ring[1][0].x is box
    assert ring[1][0].y is table
    assert table[b"k"][0] is ring
    assert members[4][0] is box
    assert members[9][1] is box
    assert members[13][0] is box
    assert found["a.b"][0] is box
    assert found["a"]["b"][0] is ring
    assert found["a.b"][1] == {"c": []}
    assert members[10].random() == random.Random(3).random()
    assert members[11].random() == np.random.default_rng(4).random()


def test_aliases_and_cycles_come_back() -> None:
    check_knot(through_a_file(make_knot()))


def test_objects_that_are_there_are_filled_in_place() -> None:
    code, present = write(make_knot()), make_knot()
    live = Coder()
    live.code("x", present)
    place_views(live)
    members, box = [*present["1"]], present["1"][1]
    box.more = 1
    members[3].add(9)
    members[7][:] = 5
    members[10].random()
    found = Builder(_TYPES, live).build("x", code)
    assert all(one is two for one, two in zip(members[:6], found["1"], strict=False))
    assert all(one is two for one, two in zip(members[7:], found["1"][7:], strict=True))
    assert not hasattr(box, "more")
    assert members[3] == {1}
    assert members[7].tolist() == [0, 1, 2]
    check_knot(found)


def test_sets_keep_the_order_of_numbers_and_sort_what_differs_between_processes() -> None:
    numbers = set()
    for number in (8, 0, 16):
        numbers.add(number)
    assert [*through_a_file(numbers)] == [*numbers]
    assert write({"b", "a", "c"})["items"] == ["a", "b", "c"]
    one, two = Point(1, ()), Point(2, ())
    boxes = {Box(2), Box(1)}
    held = [*boxes]
    found, again = through_a_file([boxes, held, {one, two}])[:2]
    assert all(each in again for each in found)
    assert {id(each) for each in found} == {id(each) for each in again}


def make_views() -> dict[str, Any]:
    """Return tensors and arrays that share memory in every way that has a code."""
    base, table = torch.arange(12.0), np.arange(20, dtype=np.int64)
    column = np.arange(60, dtype=np.int32).reshape(20, 3)[:, 1]
    whole = torch.from_numpy(table)
    return {
        "rows": base.view(3, 4)[1:],
        "transposed": base.view(3, 4).t(),
        "bits": base.view(torch.int32)[2:9],
        "expanded": base[4:5].expand(7),
        "table": table[3:],
        "backwards": table[::-2],
        "bytes": table.view(np.uint8)[8:24],
        "tensor": whole[5:9],
        "alone": column,
        "fixed": np.broadcast_to(np.float32(2), (3, 3)),
        "empty": [np.zeros((0, 3)), torch.zeros(0, 2), np.zeros(4)[4:]],
        "record": _STRUCTURED[::-1]["b"],
    }


def check_views(found: dict[str, Any]) -> None:
    for name, value in make_views().items():
        assert is_same(found[name], value), name
    assert not found["fixed"].flags.writeable
    found["rows"][0, 0] = 77
    assert found["transposed"][0, 1] == 77
    assert (found["expanded"] == 77).all()
    assert found["bits"][2] == found["rows"].view(torch.int32)[0, 0]
    found["tensor"][0] = -1
    assert found["table"][2] == -1
    assert found["backwards"][7] == -1
    found["bytes"][:8] = 0
    found["backwards"][-1] = 500
    assert found["table"][0] == 3


def test_views_share_memory_again() -> None:
    check_views(through_a_file(make_views()))


@pytest.mark.parametrize("form", ["same", "other"])
def test_views_that_are_there_are_written_to(form: str) -> None:
    code, present = write(make_views()), make_views()
    if form == "other":
        present["rows"] = torch.zeros(2, 4)
        present["bytes"] = np.zeros(16, np.uint8)
    live = Coder()
    live.code("x", present)
    place_views(live)
    for name in ("rows", "tensor", "alone"):
        present[name][...] = 3
    before = dict(present)
    builder = Builder(_TYPES, live)
    builder.check({"x": code})
    assert (before["alone"] == 3).all(), "a check changes nothing"
    found = builder.build("x", code)
    same = {name for name, each in before.items() if found[name] is each}
    if form == "same":
        assert same == {*before} - {"empty"} | {"empty"}
    assert {"tensor", "alone", "backwards"} <= same
    check_views(found)


def test_a_small_view_is_written_without_the_rest_of_its_memory() -> None:
    big = np.zeros((1000, 1000))
    coder = Coder()
    coder.code("x", [big[:, 3], big[5]])
    place_views(coder)
    assert sum(each.numel() for held in coder.tensors.values() for each in held) < 10_000_000
    alone = Coder()
    alone.code("x", big[:, 3])
    place_views(alone)
    assert sum(each.numel() for held in alone.tensors.values() for each in held) == 8000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value, [2]]
    return value


def test_a_tuple_that_is_met_often_is_written_once() -> None:
    value: Any = ([],)
    for _ in range(60):
        value = (value, value)
    found = through_a_file(value)
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ({TAG: "ref", "name": "y"}, "y, which does not exist"),
        ({TAG: "object", "type": "subprocess.Popen", "fields": {}}, "types_for_safe_load"),
        ({TAG: "enum", "type": f"{__name__}.Box", "name": "a"}, "no longer a kind of Enum"),
        ({TAG: "set", "items": [[]]}, "damaged"),
        ({TAG: "unheard of"}, "unknown kind"),
        ({TAG: "array", "dtype": "O", "shape": [1], "memory": "x" * 8}, "damaged"),
        ({TAG: "array", "dtype": "<f8", "shape": [1 << 40], "memory": "x"}, "damaged"),
        ({TAG: "array", "dtype": "<f8", "shape": [1], "memory": "x" * 8, "offset": 1}, "damaged"),
        (
            {TAG: "tensor", "grad": False, "dtype": torch.float32, "shape": [1 << 40]}
            | {"strides": [1], "offset": 0, "memory": "x" * 8},
            "must lie in its memory",
        ),
    ],
)
def test_a_code_is_refused_before_anything_is_changed(code: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        Builder(_TYPES).check({"a": [1], "x": {"y": code}})
