"""Writes down what an owner holds: one walk makes plain codes, and a digest of each.

A code consists of what ``torch.load(weights_only=True)`` accepts, and can be read by eye. What is
met a second time is a reference to the path where it was met first, so two owners hold the same if
and only if their codes are equal: aliases, cycles and sharing need no code of their own.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import struct
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, Flag
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator, kind_of_generator, state_of_generator
from helios.core.memory import bytes_in, has_plain_bytes, is_expanded, span_of
from helios.core.sharded_tensors import is_sharded
from helios.core.wrappers import unwrap
from helios.state import reasons
from helios.state.anchors import Anchors, has_state, path_of
from helios.state.networks import hooks_of, is_odd_optimizer, is_of_the_house, left_out
from helios.state.optimizers import tables_of
from helios.state.values import (
    OUTSIDE,
    SCALARS,
    attributes_of,
    comes_from,
    is_plain_object,
    refer_to,
    table_of,
)
from helios.storage.checksums import array_sum, tensor_sum
from helios.storage.type_converters import BY_TYPE, array_to_parts, scalar_to_parts, type_name

TAG = "~"
"""The key of a dict that stands for something else; its value says for what."""

HOLE: dict[str, Any] = {TAG: "hole"}
PARTS = "<parts>"
"""The key of a module under which the names of its parts stand."""

_NATIVE = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
_BIG = 1 << 2000
_SMALL = 1 << 12
_HOST = torch.device("cpu")
FACTORIES: dict[str | None, Any] = {None: None} | {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
        *(OrderedDict, Counter, deque),
    )
}
_MAPPINGS = {OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict", dict: "dict"}
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""What is compared by identity: it is made when modules are imported, and never changes."""


class Unsavable(Exception):  # noqa: N818 - what it says is the reason
    """A value that is named instead of saved."""


class View(NamedTuple):
    """A tensor or array in memory, and the code that says where it lies."""

    path: str
    part: Any
    code: dict[str, Any]


@final
class Walk:
    """What an owner holds beside its anchors.

    Attributes:
        codes: by holder (the owner, an anchor, a function) and key, the code of each value.
        holders: the holders by name.
        parts: values with an identity, by path; ``names`` has their paths by id.
        opaque: what is only compared, by path, with the reason why it cannot be saved.
        hooks: those of user code, by the name of what has them and the table.
        kinds: classes of the enums and objects that were met.
        views: tensors and arrays by path.
        overlaps: those that share memory in a way that no code describes, by path.
    """

    def __init__(self, owner: object, anchors: Anchors) -> None:
        self.anchors = anchors
        self.codes: dict[str, dict[Any, Any]] = {}
        self.holders: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.opaque: dict[str, tuple[Any, str]] = {}
        self.hooks: dict[tuple[str, str], list[Any]] = {}
        self.kinds: set[type] = set()
        self.views: dict[str, View] = {}
        self.overlaps: dict[str, tuple[str, Any]] = {}
        self._unsaved = anchors.rules.unsaved
        self._queue: deque[tuple[str, Any, Any]] = deque()
        self._reached: set[str] = set()
        # Temporary objects must live as long as their ids are remembered.
        self._kept: list[Any] = []
        # What loading may replace has the name that it has there.
        for path, part in [*anchors.objects.items(), *anchors.inner.items()]:
            self._enter(path, part)
        self._hold("", owner, anchors.rules.members_of(owner))
        for path, part in anchors.loose.items():
            self._hold_extras(path, part)
        while self._queue:
            name, part, members = self._queue.popleft()
            self._hold(name, part, members() if callable(members) else members)
        self._place_views()

    def find(self, name: str) -> Any:
        """Return the anchor, value or holder with a name."""
        found = self.anchors.find(name)
        found = self.parts.get(name) if found is None else found
        return self.holders.get(name) if found is None else found

    # ---- holders

    def _enter(self, path: str, part: Any) -> None:
        """Walk over what the ``state_dict`` of an anchor leaves out."""
        if self.anchors.rules.is_declared(path):
            return
        if not isinstance(part, nn.Module):
            tables = tables_of(part) if isinstance(part, Optimizer) and is_odd_optimizer(part) else []
            self._hold(path, part, [*left_out(part), *tables])
            self._hold_hooks(path, part)
            return
        names = self.anchors.names
        for place, inner in self.anchors.network(part).modules:
            if unwrap(inner) is not inner:
                # It has the name of the module that it wraps.
                continue
            full = path_of(path, place) if place else path
            name = names.get(id(inner), full)
            if name in self.holders or self.anchors.rules.is_declared(full):
                continue
            self._hold(name, inner, left_out(inner))
            table = vars(inner)
            kids, parameters = table.get("_modules"), table.get("_parameters")
            if isinstance(kids, dict) and isinstance(parameters, dict):
                hidden = table["_non_persistent_buffers_set"]
                buffers = {k: v for k, v in table["_buffers"].items() if k not in hidden}
                self.codes[name][PARTS] = [
                    *(
                        {
                            key: None if each is None else names.get(id(each))
                            for key, each in held.items()
                        }
                        for held in (kids, parameters, buffers)
                    ),
                    sorted(hidden),
                ]
                for held in (parameters, buffers):
                    for tensor in held.values():
                        if tensor is not None and id(tensor) in names:
                            self._hold_extras(names[id(tensor)], tensor)
            self._hold_hooks(name, inner)

    def _hold_extras(self, name: str, tensor: Tensor) -> None:
        """Walk over the attributes that users have given a tensor, and its hooks."""
        table = vars(tensor)
        if table:
            own = [(key, table[key]) for key in sorted(table) if not key.startswith(_OF_OTHERS)]
            if own:
                self._hold(name, tensor, own)
        self._hold_hooks(name, tensor)

    def _hold_hooks(self, name: str, part: Any) -> None:
        for table, hooks in hooks_of(part).items():
            self.hooks[name, table] = hooks
            for number, hook in enumerate(hooks):
                path = f"{name}.{table}.{number}"
                if path not in self._unsaved and f"{name}.{table}" not in self._unsaved:
                    # One that training has registered is named as a hook.
                    with contextlib.suppress(Unsavable):
                        self._reach(self._name_anchor(path, hook), hook)

    def _hold(self, name: str, part: Any, members: Iterable[tuple[Any, Any]]) -> None:
        table = self.codes.setdefault(name, {})
        self.holders[name] = part
        for key, value in members:
            kind = type(value)
            if kind in _NATIVE and (kind is not int or -_BIG < value < _BIG):
                if not self._unsaved or path_of(name, key) not in self._unsaved:
                    table[key] = value
                continue
            path = path_of(name, key)
            if path in self._unsaved:
                continue
            if is_of_the_house(value) and self.anchors.name_of(value) is None:
                continue
            table[key] = self._code_or_hole(path, value)

    def _code_or_hole(self, path: str, value: Any) -> Any:
        try:
            return self.code(path, value)
        except Unsavable as error:
            reason = str(error)
        except RecursionError:
            reason = reasons.TOO_DEEP
        except Exception as error:  # user code, called while a value is taken apart
            reason = reasons.BROKEN.format(type(error).__name__)
        self.opaque[path] = (value, reason)
        return HOLE

    # ---- values

    def code(self, path: str, value: Any) -> Any:
        """Return the code of a value; raises ``Unsavable`` with the reason why there is none."""
        kind = type(value)
        if kind in _NATIVE and (kind is not int or -_BIG < value < _BIG):
            return value
        make = _MAKERS.get(kind)
        return self._other(path, value) if make is None else make(self, path, value)

    def _again(self, path: str, part: Any) -> dict[str, Any] | None:
        """Return a reference to what has a name already; anything else gets one."""
        number = id(part)
        name = self.names.get(number) or self.anchors.name_of(part)
        if name is not None:
            return {TAG: "ref", "name": name}
        self._kept.append(part)
        self.names[number], self.parts[path] = path, part
        return None

    def _int(self, path: str, value: int) -> Any:
        return {TAG: "int", "value": hex(value)}

    def _converted(self, path: str, value: Any) -> Any:
        converter = BY_TYPE[type(value)]
        if type(value) is bytearray and (ref := self._again(path, value)):
            return ref
        parts = converter.to_parts(value)
        if type(parts) is list:
            parts = [self.code(f"{path}.{number}", each) for number, each in enumerate(parts)]
        return {TAG: converter.tag, "value": parts}

    def _scalar(self, path: str, value: Any) -> Any:
        return {TAG: "scalar", "value": scalar_to_parts(value)}

    def _tuple(self, path: str, value: Any) -> Any:
        return value if _are_native(value) else tuple(self._members(path, value))

    def _members(self, path: str, value: Iterable[Any]) -> list[Any]:
        return [self.code(f"{path}.{number}", each) for number, each in enumerate(value)]

    def _list(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        return list(value) if _are_native(value) else self._members(path, value)

    def _sequence(self, path: str, value: Any) -> Any:
        kind = type(value)
        if kind is not frozenset and (ref := self._again(path, value)):
            return ref
        if kind is deque:
            return {TAG: "deque", "items": self._members(path, value), "maxlen": value.maxlen}
        if any(isinstance(each, Tensor) and self.anchors.name_of(each) is None for each in value):
            raise Unsavable(reasons.IN_SET)
        items = self._members(path, value)
        if items and {str, dict} & {*map(type, items)}:
            # The order of strings differs between processes, and that of objects with addresses.
            items.sort(key=repr)
        return {TAG: kind.__name__, "items": items}

    def _mapping(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        kind = type(value)
        if kind is dict and _are_native(value) and TAG not in value:
            if not self._unsaved and _are_native(value.values()):
                return dict(value)
            return {key: self._member(path, key, each) for key, each in value.items()}
        pairs = []
        for number, (key, each) in enumerate(value.items()):
            name = self.anchors.name_key(key)
            name = name if isinstance(name, str | int) else f"<key {number}>"
            pairs.append([self.code(f"{path}.<key {number}>", key), self._member(path, name, each)])
        code = {TAG: _MAPPINGS[kind], "pairs": pairs}
        if kind is defaultdict:
            factory = getattr(value.default_factory, "__name__", None)
            if FACTORIES.get(factory, ...) is not value.default_factory:
                raise Unsavable(reasons.FACTORY)
            code["factory"] = factory
        return code

    def _member(self, path: str, key: Any, value: Any) -> Any:
        full = f"{path}.{key}"
        return HOLE if self._unsaved and full in self._unsaved else self.code(full, value)

    def _array(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        if value.dtype == object:
            items = self._members(path, value.reshape(-1).tolist())
            return {TAG: "objects", "shape": list(value.shape), "items": items}
        if value.dtype.hasobject:
            raise Unsavable(reasons.without_state(value))
        return self._view(path, value, {TAG: "array"})

    def _tensor(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        if isinstance(value, nn.Parameter) or type(value) is not Tensor:
            raise Unsavable(reasons.STRAY_PARAMETER.format(type(value).__name__))
        if value.grad_fn is not None:
            raise Unsavable(reasons.GRAPH)
        if not is_dense(value):
            raise Unsavable(reasons.NO_STORAGE.format(str(value.layout)))
        if vars(value):
            self._queue.append((path, value, [*sorted(vars(value).items())]))
        return self._view(path, value, {TAG: "tensor", "grad": value.requires_grad})

    def _view(self, path: str, value: Any, code: dict[str, Any]) -> dict[str, Any]:
        self.views[path] = View(path, value, code)
        return code

    def _generator(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        self._kept.append(state := state_of_generator(value))
        if own := {k: v for k, v in attributes_of(value).items() if k != "gauss_next"}:
            self._queue.append((path, value, [*own.items()]))
        code = {TAG: "generator", "kind": kind_of_generator(value)}
        return code | {"state": self.code(f"{path}.<state>", state)}

    def _other(self, path: str, value: Any) -> Any:
        """Code what is not of one exact type."""
        kind = type(value)
        if kind is int:
            return self._int(path, value)
        if isinstance(value, Enum):
            self.kinds.add(kind)
            if isinstance(value, Flag):
                return {TAG: "flag", "type": type_name(kind), "value": value.value}
            return {TAG: "member", "type": type_name(kind), "name": value.name}
        name = self.anchors.name_of(value)
        if name is not None:
            if name not in self.holders:
                self._reach(name, value)
            return {TAG: "ref", "name": name}
        if is_of_the_house(value):
            return {TAG: "ref", "name": self._name_anchor(path, value)}
        if is_generator(value):
            return self._generator(path, value)
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if has_state(value):
            return self._stateful(path, value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            self.kinds.add(kind)
            return {TAG: "tuple", "type": type_name(kind), "items": self._members(path, value)}
        if is_plain_object(kind):
            return self._plain_object(path, value)
        name = self._name_anchor(path, value)
        self._reach(name, value)
        return {TAG: "ref", "name": name}

    def _plain_object(self, path: str, value: Any) -> Any:
        if ref := self._again(path, value):
            return ref
        self.kinds.add(type(value))
        fields = {
            key: HOLE
            if self._unsaved and f"{path}.{key}" in self._unsaved
            else self._code_or_hole(f"{path}.{key}", each)
            for key, each in attributes_of(value).items()
            if not is_of_the_house(each)
        }
        return {TAG: "object", "type": type_name(type(value)), "fields": fields}

    def _stateful(self, path: str, value: Any) -> Any:
        """Refer to an object with a state that only other objects hold."""
        if self.anchors.rules.tops is not None and id(value) not in self.anchors.rules.known:
            raise Unsavable(reasons.LATE)
        name = self.anchors.add(path, value, is_inner=True)
        self._enter(name, value)
        return {TAG: "ref", "name": name}

    def _name_anchor(self, path: str, value: Any) -> str:
        """Name what is compared, but not saved, if setup has made it."""
        rules = self.anchors.rules
        if rules.tops is not None and id(value) not in rules.known:
            raise Unsavable(reasons.without_state(value))
        return self.anchors.name_of(value) or self.anchors.add_any(path, value)

    def _reach(self, name: str, part: Any) -> None:
        """Walk over what a function, a partial or a method refers to; compare anything else."""
        if name in self._reached or name in self.holders or name.startswith("<"):
            return
        self._reached.add(name)
        if is_of_the_house(part):
            return
        if isinstance(part, functools.partial):
            members = [("func", part.func), ("args", part.args), ("keywords", part.keywords)]
            self._queue.append((name, part, [*members, *table_of(part).items()]))
        elif isinstance(part, MethodType):
            self._queue.append(
                (name, part, [("__self__", part.__self__), ("__func__", part.__func__)])
            )
        elif type(part) is FunctionType and not comes_from_library(part):
            self._queue.append((name, part, functools.partial(_fields_of, part)))
        elif is_plain_object(type(part)) and not has_state(part) and name in self.anchors.parts:
            self._queue.append((name, part, [*attributes_of(part).items()]))
        elif not isinstance(part, (*CODE, nn.Module, Tensor)) and not has_state(part):
            self.opaque[name] = (part, reasons.without_state(part))

    # ---- memory

    def _place_views(self) -> None:
        """Say of each tensor and array where it lies, as they may share memory."""
        if not self.views:
            return
        own = {id(view.part) for view in self.views.values()}
        held = {**self.anchors.rules.outside.parts, **self.anchors.parts}
        entries = [
            (name, part)
            for name, part in held.items()
            if isinstance(part, Tensor | np.ndarray) and id(part) not in own and _has_span(part)
        ]
        num_covered = len(entries)
        entries += ((view.path, view.part) for view in self.views.values())
        spans = [_span(part) for _, part in entries]
        devices = {part.device for _, part in entries if isinstance(part, Tensor)}
        together: set[int] = set()
        for device in devices | {_HOST}:
            numbers = [
                number
                for number, (_, part) in enumerate(entries)
                if (part.device if isinstance(part, Tensor) else _HOST) == device
            ]
            for members in _overlapping(numbers, spans):
                if members[-1] >= num_covered:
                    together.update(members)
                    self._place_group(members, entries, spans, num_covered)
        for number in range(num_covered, len(entries)):
            if number in together:
                continue
            path, part = entries[number]
            code = self.views[path].code
            if isinstance(part, Tensor):
                if not is_expanded(part):
                    code["value"] = part.detach()
                    continue
            elif part.nbytes <= _SMALL and part.flags.c_contiguous and part.flags.writeable:
                code["value"] = array_to_parts(part)
                continue
            self._place(code, part, spans[number], spans[number], owners=[part])

    def _place_group(
        self, members: list[int], entries: list[Any], spans: list[Any], num_covered: int
    ) -> None:
        """Place what overlaps: in an anchor if it fits there, otherwise in memory of its own."""
        anchors = [number for number in members if number < num_covered]
        free = []
        for number in members[len(anchors) :]:
            begin, end = spans[number]
            path, part = entries[number]
            home = next((a for a in anchors if spans[a][0] <= begin and end <= spans[a][1]), None)
            if home is None:
                free.append(number)
                for other in anchors:
                    if spans[other][0] < end and begin < spans[other][1]:
                        where = spans[other][0] - begin, spans[other][1] - begin
                        self.overlaps[path] = (entries[other][0], where)
            else:
                self._place(
                    self.views[path].code, part, spans[home], spans[number], entries[home][0]
                )
        if not free:
            return
        whole = min(spans[n][0] for n in free), max(spans[n][1] for n in free)
        first = entries[free[0]][0]
        owners = [entries[number][1] for number in free]
        for number in free:
            path, part = entries[number]
            of = first if number != free[0] else None
            self._place(self.views[path].code, part, whole, spans[number], of, owners=owners)

    def _place(
        self,
        code: dict[str, Any],
        part: Any,
        home: Any,
        span: Any,
        of: str | None = None,
        owners: Any = (),
    ) -> None:
        is_tensor = isinstance(part, Tensor)
        code["dtype"] = part.dtype if is_tensor else np.lib.format.dtype_to_descr(part.dtype)
        code["shape"] = list(part.shape)
        strides = part.stride() if is_tensor else part.strides
        code["strides"], code["offset"] = list(strides), _first(part) - home[0]
        if not is_tensor and not part.flags.writeable:
            code["read-only"] = True
        if of is not None:
            code["of"], code["size"] = of, home[1] - home[0]
            return
        if is_tensor and not part.is_cpu:
            whole = part.detach()
            storage = whole.untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=part.device).set_(
                storage, home[0] - storage.data_ptr(), (home[1] - home[0],), (1,)
            )
        elif home[0] == home[1]:
            memory = torch.empty(0, dtype=torch.uint8)
        elif isinstance(part, np.memmap):
            raise Unsavable(reasons.MAPPED)
        else:
            memory = bytes_in(home, owners)
        is_short = memory.numel() <= _SMALL and memory.is_cpu
        code["memory"] = memory.numpy().tobytes().decode("latin-1") if is_short else memory


def _overlapping(numbers: list[int], spans: list[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of spans that overlap others, in groups."""
    found = np.array(
        [number for number in numbers if spans[number][0] < spans[number][1]], np.int64
    )
    if len(found) < 2:
        return []
    begins, ends = np.array([spans[number] for number in found], np.int64).T
    order = np.argsort(begins, kind="stable")
    reached = np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(begins[order][1:] >= reached[:-1]) + 1
    if len(starts) + 1 == len(found):
        return []
    groups = np.split(found[order], starts)
    return [sorted(map(int, group)) for group in groups if len(group) > 1]


def _are_native(values: Iterable[Any]) -> bool:
    kinds = set(map(type, values))
    if not kinds <= _NATIVE:
        return False
    return int not in kinds or all(-_BIG < each < _BIG for each in values if type(each) is int)


def _fields_of(function: Any) -> Iterator[tuple[str, Any]]:
    for key, value in attributes_of(function).items():
        if type(value) not in (ModuleType, type) and key != "__wrapped__":
            yield key, value


def comes_from_library(part: Any) -> bool:
    """Return whether a function belongs to torch or Helios."""
    return (getattr(part, "__module__", None) or "").startswith(("torch.", "helios.", "numpy."))


def is_dense(part: Tensor) -> bool:
    """Return whether the elements of a tensor can be read as bytes in this process."""
    return has_plain_bytes(part) and not is_sharded(part) and not is_lazy(part)


def _has_span(part: Any) -> bool:
    return not isinstance(part, Tensor) or is_dense(part)


def _span(part: Any) -> tuple[int, int]:
    if isinstance(part, Tensor) or not part.flags.c_contiguous:
        return span_of(part)
    begin = part.__array_interface__["data"][0]
    return begin, begin + part.nbytes


def _first(part: Any) -> int:
    return part.data_ptr() if isinstance(part, Tensor) else part.__array_interface__["data"][0]


_OF_OTHERS = (
    *("_dynamo", "_fsdp", "_inductor", "_aot", "_is_param", "_helios", "cls_to_become"),
    "gauss_next",
)
"""How the names of attributes begin that torch and Helios give to tensors, Python to generators."""

_MAKERS: dict[type, Callable[[Walk, str, Any], Any]] = {
    **dict.fromkeys(BY_TYPE, Walk._converted),
    **dict.fromkeys(SCALARS, Walk._scalar),
    **dict.fromkeys((set, frozenset, deque), Walk._sequence),
    **dict.fromkeys(_MAPPINGS, Walk._mapping),
    tuple: Walk._tuple,
    list: Walk._list,
    np.ndarray: Walk._array,
    Tensor: Walk._tensor,
}


# ---- digests


class _Sink:
    """A file that keeps the hash and the size of what is written to it."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)
        self.size = 0

    def write(self, data: Any) -> int:
        size = len(data)
        self.size += size
        # A checksum of much is several times as fast, and its size tells the rest.
        self.hash.update(data if size < 1 << 14 else b"%d %d" % (size, zlib.crc32(data)))
        return size


@final
class Identities:
    """Numbers for objects that are compared by identity. No number is given twice."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self.given = 0

    def number(self, value: object) -> int:
        """Return the number of an object; an iterator gets a new one in each call."""
        entry = self._numbers.get(id(value))
        if entry is not None and entry[0]() is value:
            return entry[1]
        self.given += 1
        is_moving = isinstance(value, Iterator) and not isinstance(
            value, (io.IOBase, *weakref.ProxyTypes)
        )
        if not is_moving:
            self._numbers[id(value)] = refer_to(value), self.given
        return self.given

    def knows(self, value: object) -> bool:
        """Return whether an object has a number."""
        entry = self._numbers.get(id(value))
        return entry is not None and entry[0]() is value


class _Digester(pickle.Pickler):
    """Pickles codes into a hash; what is no code is taken apart as pickle would."""

    def __init__(self, sink: _Sink, identities: Identities, names: Mapping[int, str]) -> None:
        super().__init__(sink, protocol=5)
        # Without pickle's memo, equal values have equal bytes whether they are one object or two.
        self.fast = True
        self._sink, self._identities, self._names = sink, identities, names

    def reducer_override(self, part: Any) -> Any:
        if part is _told:
            return NotImplemented
        if isinstance(part, Tensor):
            return _told, self._tell_tensor(part)
        if isinstance(part, torch.dtype | torch.device | torch.Size):
            return _told, (str(part),)
        return _told, self._tell(part)

    def _tell_tensor(self, part: Tensor) -> tuple[Any, ...]:
        name = self._names.get(id(part))
        if name is not None:
            return (name,)
        form = str(part.dtype), tuple(part.shape), part.requires_grad
        if is_dense(part):
            self._sink.size += part.nbytes
            return (*form, part.stride(), part.device.type, tensor_sum(part))
        if part.layout is torch.sparse_coo:
            inside = part.detach()
            return (*form, tensor_sum(inside._indices()), tensor_sum(inside._values()))
        version = 0 if part.is_inference() else part._version
        return (*form, self._identities.number(part), version)

    def _tell(self, part: Any) -> tuple[Any, ...]:
        kind, number = type(part).__qualname__, self._identities.number
        if id(part) in self._names:
            return (self._names[id(part)],)
        if isinstance(part, np.ndarray) and not part.dtype.hasobject:
            if isinstance(part, np.memmap) and not part.flags.writeable:
                return kind, number(part)
            return kind, repr(part.dtype), part.shape, array_sum(part)
        if isinstance(part, np.generic):
            return kind, part.dtype.str, part.tobytes()
        if isinstance(part, (*CODE, MethodType, Dataset, DataLoader)):
            return kind, number(part)
        if is_generator(part):
            return kind, state_of_generator(part)
        if isinstance(part, io.IOBase):
            is_open = not part.closed and part.seekable()
            return kind, number(part), part.closed, is_open and part.tell()
        if type(part) is memoryview:
            return kind, number(part), 0 if part.readonly else zlib.crc32(part.tobytes())
        if is_plain_object(type(part)) or isinstance(part, nn.Module):
            return kind, attributes_of(part)
        return (
            kind,
            self._reduced(part),
            {} if comes_from(type(part), OUTSIDE) else attributes_of(part),
        )

    def _reduced(self, part: Any) -> Any:
        if type(part) in weakref.ProxyTypes:
            return self._identities.number(part)
        try:
            reducer = copyreg.dispatch_table.get(type(part))
            found = part.__reduce_ex__(5) if reducer is None else reducer(part)
        except Exception:  # user code
            return self._identities.number(part)
        if not isinstance(found, tuple):
            return found
        return [*found[:3], *(list(piece) for piece in found[3:5] if piece is not None)]


def _told(*parts: Any) -> None:
    """Stand before the description of what is no code."""


def digest_of(
    code: Any, identities: Identities, names: Mapping[int, str] | None = None
) -> tuple[Any, int]:
    """Return what is equal for equal codes, and their size in bytes."""
    kind = type(code)
    if kind in _NATIVE:
        if kind is float:
            return (kind, struct.pack("<d", code)), 8
        return (kind, code), len(code) if kind is str else 8
    sink = _Sink()
    try:
        _Digester(sink, identities, names or {}).dump(code)
    except Exception as error:  # user code, or cycles of what is no code
        return (type(error).__name__, identities.number(code)), 0
    return sink.hash.digest(), sink.size


def mark_of(value: Any, identities: Identities | None = None, names: Any = None) -> bytes:
    """Return a mark that is equal for equal content, whatever the value is."""
    found = digest_of(value, identities or Identities(), names)[0]
    return found if isinstance(found, bytes) else repr(found).encode()
