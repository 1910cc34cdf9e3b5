"""What a checkpoint can hold, and how it says what it cannot (USERS.md 10, DESIGN R5)."""

from __future__ import annotations

import datetime
import enum
import gc
import io
import math
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("name", VALUES)
def test_a_tree_that_was_decoded_can_be_encoded_again(name: str) -> None:
    once = through_a_file(VALUES[name], _TYPES)
    assert is_same(through_a_file(once, _TYPES), VALUES[name])


def test_a_named_time_zone_comes_back() -> None:
    try:
        zone = zoneinfo.ZoneInfo("Europe/Paris")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("this machine knows no time zones")
    value = datetime.datetime(2024, 7, 1, 12, tzinfo=zone)
    assert through_a_file(value) == value
    assert through_a_file(value).tzinfo is zone


def test_a_path_of_another_system_becomes_a_path_of_this_one() -> None:
    code = {weights_only.TAG: "path", "value": "C:/runs/a"}
    assert codec.decode(code) == Path("C:/runs/a")


def test_arrays_come_back_writable_and_in_their_memory_order() -> None:
    array = through_a_file(np.asfortranarray(np.arange(6).reshape(2, 3)))
    array[0, 0] = 7
    assert array.flags.f_contiguous
    assert not array.flags.c_contiguous


def test_a_read_only_array_can_be_saved() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert through_a_file(array).tolist() == [0, 1, 2, 3]


def test_the_state_of_a_module_keeps_its_version_numbers() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    loaded = through_a_file(state)
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]
    nn.BatchNorm1d(3).load_state_dict(loaded)


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


def test_aliases_inside_tagged_containers_stay() -> None:
    shared = [1]
    loaded = through_a_file([deque([shared]), defaultdict(list, a=shared), {b"k": shared}])
    assert loaded[0][0] is loaded[1]["a"] is loaded[2][b"k"]


def test_equal_objects_stay_apart() -> None:
    loaded = through_a_file([[1], [1], {2}, {2}])
    assert loaded[0] is not loaded[1]
    assert loaded[2] is not loaded[3]


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


def test_cutting_a_storage_keeps_the_order_of_the_dimensions_in_memory() -> None:
    base = torch.arange(100.0)
    loaded = through_a_file(base[10:16].view(2, 3).t())
    assert loaded.stride() == (1, 3)
    assert loaded.tolist() == [[10, 13], [11, 14], [12, 15]]


def test_a_loss_with_a_graph_is_saved_without_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    loaded = through_a_file({"loss": (weight * 2).sum(), "weight": weight})
    assert loaded["loss"] == 6
    assert not loaded["loss"].requires_grad
    assert type(loaded["weight"]) is torch.Tensor


def test_a_leaf_that_requires_a_gradient_still_does() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert through_a_file(leaf).requires_grad
    assert not through_a_file(nn.Parameter(torch.zeros(2))).requires_grad


def test_encoding_leaves_the_tree_as_it_was() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    tree = {"a": [np.float64(1), (leaf,)], b"k": deque([1])}
    before = repr(tree)
    code = codec.encode(tree, where="")
    assert repr(tree) == before
    assert leaf.requires_grad
    assert code is not tree


def _own_array() -> Any:
    return np.ma.masked_array([1, 2], [0, 1])  # type: ignore[no-untyped-call]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (lambda: {"history": [1, 2, 3, Box(1)]}, r"model\.history\[3\] .*Box"),
    "lambda": (lambda: {"f": lambda: 1}, r"model\.f .*function"),
    "lambda factory": (lambda: {"d": defaultdict(lambda: 0)}, r"model\.d .*lambda"),
    "in a defaultdict": (lambda: defaultdict(int, {"a b": Box(1)}), r"model\['a b'\] .*Box"),
    "in a key": (lambda: {"t": {Box(1): 2}}, r"model\.t\[<.*Box.*\] .*Box"),
    "in a set": (lambda: {"s": {Box(1)}}, r"model\.s\[0\] .*Box"),
    "in an object array": (lambda: np.array([1, Box(2)], object), r"model\[1\] .*Box"),
    "enum": (lambda: (1, Colour.RED), r"model\[1\] .*Colour"),
    "named tuple": (lambda: [Point(1, 2)], r"model\[0\] .*Point"),
    "generator": (lambda: {"g": np.random.default_rng(0)}, r"model\.g .*Generator"),
    "torch generator": (lambda: [torch.Generator()], r"model\[0\] .*torch.*Generator"),
    "tensor type": (lambda: {"w": torch.zeros(2).as_subclass(Wider)}, r"model\.w .*Wider"),
    "array type": (lambda: [_own_array()], r"model\[0\] .*MaskedArray"),
    "unknown attribute": (lambda: nn.ParameterDict(), r"model .*ParameterDict"),
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


def test_an_object_of_a_safe_type_whose_content_would_be_refused_is_named_at_the_save() -> None:
    with pytest.raises(StateError, match=r"model\.box .*Box.*numpy"):
        codec.encode({"box": Box(np.float64(1))}, where="model", safe_types=[Box])


def test_a_cycle_through_a_tuple_is_an_error_and_no_endless_walk() -> None:
    ring: list[Any] = []
    ring.append((ring,))
    with pytest.raises(StateError, match=r"model.*contains itself"):
        codec.encode({"a": (ring[0],)}, where="model")


def test_a_tree_that_is_too_deep_is_an_error() -> None:
    tree: list[Any] = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(StateError, match=r"model .*too deep"):
        codec.encode(tree, where="model")


def test_one_memory_seen_as_two_dtypes_is_named_and_not_left_to_torch() -> None:
    base = torch.zeros(4)
    with pytest.raises(StateError, match=r"model\.b .*int32.*model\.a .*float32"):
        codec.encode({"a": base, "b": base.view(torch.int32)}, where="model")


def test_an_array_and_a_tensor_of_one_memory_can_be_saved_together() -> None:
    array = np.arange(3.0)
    loaded = through_a_file([array, torch.from_numpy(array), array])
    assert loaded[0].tolist() == loaded[1].tolist() == [0, 1, 2]
    assert loaded[0] is loaded[2]


@pytest.mark.parametrize("tag", ["enum", "flag", "tuple"])
def test_decoding_builds_only_what_the_safe_types_name(tag: str) -> None:
    code = {weights_only.TAG: tag, "type": "subprocess.Popen", "name": "x", "value": 1, "items": []}
    if tag != "tuple":
        code.pop("items")
    with pytest.raises(KeyError):
        codec.decode(code)
    code["type"] = weights_only.type_name(Box)
    with pytest.raises(TypeError):
        codec.decode(code, safe_types=[Box])


@pytest.mark.parametrize("is_on", [True, False])
def test_encoding_leaves_the_garbage_collector_as_it_was(is_on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        codec.encode({"a": [(1, 2)]}, where="it")
        assert gc.isenabled() == is_on
        with pytest.raises(StateError):
            codec.encode({"a": [object()]}, where="it")
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_collector_rests_while_a_tree_is_encoded() -> None:
    class Watching(tuple[int, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[int]:
            seen.append(gc.isenabled())
            return super().__iter__()

    seen: list[bool] = []
    codec.encode({"a": Watching((1, 2))}, where="it", safe_types=[Watching])
    assert seen
    assert not any(seen)
