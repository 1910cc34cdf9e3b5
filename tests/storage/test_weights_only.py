"""What a checkpoint can hold, and how it says what it cannot (USERS.md 10, DESIGN R5)."""

from __future__ import annotations

import datetime
import enum
import io
import math
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helios.errors import StateError
from helios.storage import codec, weights_only


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


def through_a_file(tree: Any, safe_types: tuple[type, ...] = ()) -> Any:
    buffer = io.BytesIO()
    codec.write_encoded(buffer, codec.encode(tree, where="root", safe_types=safe_types))
    buffer.seek(0)
    with torch.serialization.safe_globals(list(safe_types)):
        code = torch.load(buffer, weights_only=True)
    return codec.decode(code, safe_types=safe_types)


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
    "other keys": {np.int64(4): 1, frozenset({1}): 2, PurePosixPath("p"): 3, b"k": 4, (b"z",): 5},
    "tag as key": {weights_only.TAG: "set", "items": [1]},
    "nested tags": [
        {weights_only.TAG: {weights_only.TAG: 1}},
        OrderedDict([(weights_only.TAG, 2)]),
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


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_type_and_bits(name: str) -> None:
    value = VALUES[name]
    assert is_same(through_a_file(value, _TYPES), value)


def test_an_object_that_occurs_twice_is_one_object_again() -> None:
    table: dict[str, Any] = {"n": 1}
    members: list[Any] = [
        [],
        table,
        {1},
        deque(),
        np.arange(3),
        defaultdict(list),
        b"abc",
        (1, [2]),
    ]
    loaded = through_a_file({"first": members, "second": list(members), "key": {("k",): table}})
    assert all(a is b for a, b in zip(loaded["first"], loaded["second"], strict=True))
    assert loaded["key"][("k",)] is loaded["first"][1]


def test_lists_and_dictionaries_that_contain_themselves_come_back() -> None:
    ring: list[Any] = [1]
    table: dict[Any, Any] = {"ring": ring, b"not plain": 1}
    table["self"] = table
    ring.append(ring)
    loaded = through_a_file(table)
    assert loaded["self"] is loaded
    assert loaded["ring"][1] is loaded["ring"]


def test_one_tensor_in_two_places_is_one_tensor_again() -> None:
    tensor = torch.arange(3)
    first, second = through_a_file([tensor, {"x": tensor}])
    assert first is second["x"]


def test_tensors_that_share_a_storage_share_it_again() -> None:
    base = torch.arange(10.0)
    loaded = through_a_file({"a": base[:3], "b": base[2:], "c": base.view(2, 5)})
    loaded["a"][2] = 77
    assert loaded["b"][0] == 77
    assert loaded["c"][0, 2] == 77


def test_a_small_view_is_saved_without_the_rest_of_its_storage() -> None:
    base = torch.zeros(100_000)
    buffer = io.BytesIO()
    codec.write_encoded(
        buffer, codec.encode({"row": base[5:8], "t": base[:6].view(2, 3).t()}, where="")
    )
    assert buffer.tell() > 400_000, "two views share the storage, so it stays whole"
    buffer = io.BytesIO()
    codec.write_encoded(buffer, codec.encode({"row": base[5:8]}, where=""))
    assert buffer.tell() < 10_000
    assert base.untyped_storage().nbytes() == 400_000, "the live tensor is left alone"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (lambda: {"history": [1, 2, 3, Box(1)]}, r"model\.history\[3\] .*Box"),
    "lambda": (lambda: {"f": lambda: 1}, r"model\.f .*function"),
    "enum": (lambda: (1, Colour.RED), r"model\[1\] .*Colour"),
    "tensor type": (lambda: {"w": torch.zeros(2).as_subclass(Wider)}, r"model\.w .*Wider"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_loaded_again_is_named_with_path_type_and_remedy(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(StateError, match=text) as caught:
        codec.encode(make(), where="model")
    assert "unsaved" in str(caught.value)


def test_the_remedy_for_a_type_is_types_for_safe_load() -> None:
    with pytest.raises(StateError, match="types_for_safe_load"):
        codec.encode([Colour.RED], where="model")
    assert through_a_file([Colour.RED], (Colour,)) == [Colour.RED]


@pytest.mark.parametrize("tag", ["enum", "tuple"])
def test_decoding_builds_only_what_the_safe_types_name(tag: str) -> None:
    code = {weights_only.TAG: tag, "type": "subprocess.Popen", "name": "x", "value": 1, "items": []}
    if tag != "tuple":
        code.pop("items")
    with pytest.raises(KeyError):
        codec.decode(code)
    code["type"] = weights_only.type_name(Box)
    with pytest.raises(TypeError):
        codec.decode(code, safe_types=[Box])
