"""Writes values as plain codes that ``torch.load(weights_only=True)`` accepts.

Numbers, strings, lists, tuples and dicts with plain keys stay as they are. Anything else is a dict
whose key ``"~"`` names its kind. A value that occurs again is a reference to its first path, so two
values have the same content if and only if their codes are equal: aliases and cycles need no code
of their own. :class:`helios.storage.building.Builder` is the inverse.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from enum import Enum, Flag
from itertools import compress, repeat
from operator import is_
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from helios.core.generators import is_generator, kind_of_generator, state_of_generator
from helios.core.memory import has_plain_bytes
from helios.core.plain_values import qualified_name
from helios.core.sharded_tensors import is_sharded
from helios.storage.memory_layout import View
from helios.storage.plain_objects import attributes_of, is_plain_object
from helios.storage.type_converters import BY_TYPE, INLINE_BYTES, describe

TAG: Final = "~"
"""The key of a dict that stands for another value; its value names the kind."""

HOLE: Final[dict[str, Any]] = {TAG: "hole"}
"""The code of a member that is not saved, and keeps its value."""

NATIVE = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
"""Types of values that are their own codes; exact types, since a subclass may have attributes."""

FACTORIES: dict[str | None, Any] = {None: None} | {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset),
        *(OrderedDict, Counter, deque),
    )
}
"""What a saved ``defaultdict`` may call for a missing key, by name."""

TOO_DEEP = "it is nested too deeply to be read: flatten it"
FACTORY = (
    "the factory of its defaultdict cannot be called when loading: use one such as int or list"
)
IN_SET = "it holds a tensor in a set: keep tensors in a list or dict"
OBJECT_IN_SET = "it holds objects in a set, whose order differs between starts: keep them in a list"
NO_STORAGE = (
    "it holds a tensor without a storage of its own ({}): register it as a buffer of a network"
)
GRAPH = "it holds a tensor with a computation graph: detach() it"
STRAY_PARAMETER = "it holds a {} that no saved object holds: register it in a network in setup()"
NO_VALUE = "a checkpoint cannot contain a {}"

# ``weights_only`` reads integers of up to 255 bytes.
_BIG = 1 << 2000
_BY_ADDRESS: Any = object.__hash__
_PLAIN = NATIVE - {int}
SCALARS = frozenset({*np.sctypeDict.values()} - {np.object_})
_MAPPINGS: dict[type, str] = {
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
    dict: "dict",
}
# The order of other members differs between processes, as hashes of texts and addresses do.
_ORDERED = frozenset((int, float, bool))


class Unsavable(Exception):  # noqa: N818 - what it says is the reason
    """A value that has no code.

    Attributes:
        path: where it was met.
        reason: why there is none, and what to do.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} cannot be saved: {reason}")
        self.path = path
        self.reason = reason


class Codes(dict[Any, Any]):
    """Codes that a coder has written, by name: they are saved as they are, and loaded unread.

    Attributes:
        tensors: the detached tensors in them; none after loading.
    """

    tensors: list[Tensor]

    def __init__(self, codes: Any = (), tensors: Iterable[Tensor] = ()) -> None:
        super().__init__(codes)
        self.tensors = list(tensors)


def path_to(path: str, key: object) -> str:
    """Return the path of a member: ``.name``, ``.3`` or ``['any text']``; no two are equal."""
    is_plain = type(key) is int or (type(key) is str and key.isidentifier())
    return f"{path}.{key}" if is_plain else f"{path}[{key!r}]"


def are_native(values: Collection[Any]) -> bool:
    """Return whether values are their own codes, without a step of Python for each of them."""
    kinds = set(map(type, values))
    if not kinds <= NATIVE:
        return False
    if int not in kinds:
        return True
    are_numbers = map(is_, map(type, values), repeat(int))
    numbers = values if len(kinds) == 1 else compress(values, are_numbers)
    return bool(max(map(abs, numbers)) < _BIG)


class Coder:
    """One walk over values, each of which gets its code.

    A subclass may know more of what is met: see :meth:`refer`, :meth:`code_other`,
    :meth:`code_member`, :meth:`code_field`, :meth:`name_of_key` and :meth:`neighbours`.

    Attributes:
        parts: values with an identity, by path.
        names: their paths, by id.
        kinds: classes of enum members, named tuples and plain objects that were met.
        views: tensors and arrays, by path.
        tensors: the detached tensors in the codes, after :func:`place_views`, by path.
        overlaps: by path, what overlaps a neighbour in a way that no code describes: the name of
            the neighbour, and where it begins and ends, in bytes.
    """

    may_omit = False
    """Whether members may have no code, so that each is asked for."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.kinds: set[type] = set()
        self.views: dict[str, View] = {}
        self.tensors: dict[str, list[Tensor]] = {}
        self.overlaps: dict[str, tuple[str, tuple[int, int]]] = {}
        # What has a name must live as long as its id is remembered.
        self._kept: list[Any] = []

    def code(self, path: str, value: Any) -> Any:
        """Return the code of a value.

        Codes of tensors and arrays are complete after :func:`place_views`.

        Raises:
            Unsavable: if there is none.
            RecursionError: if it is nested too deeply.
        """
        kind = type(value)
        if kind in NATIVE and (kind is not int or -_BIG < value < _BIG):
            return value
        make = self.makers.get(kind)
        return self.code_other(path, value) if make is None else make(self, path, value)

    # ---- what a subclass may know

    def refer(self, path: str, part: Any) -> dict[str, Any] | None:
        """Return a reference to what has a name already; anything else gets its path as one."""
        name = self.names.get(id(part))
        if name is not None:
            return {TAG: "ref", "name": name}
        self._kept.append(part)
        self.names[id(part)], self.parts[path] = path, part
        return None

    def code_other(self, path: str, value: Any) -> Any:
        """Return the code of a value that is of no type with a code of its own."""
        kind = type(value)
        if kind is int:
            return {TAG: "int", "value": hex(value)}
        if isinstance(value, Enum):
            self.kinds.add(kind)
            if isinstance(value, Flag):
                return {TAG: "flag", "type": qualified_name(kind), "value": value.value}
            return {TAG: "enum", "type": qualified_name(kind), "name": value.name}
        if is_generator(value):
            return self._generator(path, value)
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if isinstance(value, tuple) and getattr(kind, "_fields", None) is not None:
            return self._tuple(path, value)
        if is_plain_object(kind):
            return self._object(path, value)
        raise Unsavable(path, NO_VALUE.format(qualified_name(kind).removeprefix("builtins.")))

    def code_member(self, path: str, value: Any) -> Any:
        """Return the code of a member of a dict, or :data:`HOLE`."""
        return self.code(path, value)

    def code_field(self, path: str, value: Any) -> Any:
        """Return the code of an attribute of a plain object, or :data:`HOLE`."""
        return self.code_member(path, value)

    def name_of_key(self, key: Any) -> Hashable:
        """Return the text in paths for a dict's key that is not a plain value."""
        return None

    def neighbours(self) -> Mapping[str, Any]:
        """Return tensors and arrays, by name, that views may lie in, and that have no code."""
        return {}

    # ---- one method for each kind

    def _converted(self, path: str, value: Any) -> Any:
        converter = BY_TYPE[type(value)]
        has_identity = type(value) is bytearray or (
            type(value) is bytes and len(value) > INLINE_BYTES
        )
        if has_identity and (ref := self.refer(path, value)):
            return ref
        parts = converter.to_parts(value)
        if type(parts) is list:
            parts = self._members(path, parts)
        elif isinstance(parts, Tensor):
            self.tensors[path] = [parts]
        return {TAG: converter.tag, "value": parts}

    def _scalar(self, path: str, value: Any) -> Any:
        return {TAG: "scalar", "value": [describe(value.dtype), value.tobytes().decode("latin-1")]}

    def _members(self, path: str, values: Collection[Any]) -> list[Any]:
        if are_native(values):
            return list(values)
        return [
            # Most members of most sequences are plain.
            each if type(each) in _PLAIN else self.code(f"{path}.{number}", each)
            for number, each in enumerate(values)
        ]

    def _tuple(self, path: str, value: Any) -> Any:
        kind = type(value)
        if kind is tuple and are_native(value):
            return value
        name = self.names.get(id(value))
        if name is not None:
            return {TAG: "ref", "name": name}
        items = self._members(path, value)
        if id(value) not in self.names:
            # Only now: a tuple is built after its members, even if one of them leads back to it.
            self.refer(path, value)
        if kind is tuple:
            return tuple(items)
        self.kinds.add(kind)
        return {TAG: "tuple", "type": qualified_name(kind), "items": items}

    def _list(self, path: str, value: list[Any]) -> Any:
        return self.refer(path, value) or self._members(path, value)

    def _deque(self, path: str, value: deque[Any]) -> Any:
        if ref := self.refer(path, value):
            return ref
        return {TAG: "deque", "items": self._members(path, value), "maxlen": value.maxlen}

    def _set(self, path: str, value: Any) -> Any:
        kind = type(value)
        if kind is set and (ref := self.refer(path, value)):
            return ref
        known = len(self.names)
        items = self._members(path, value)
        if any(isinstance(each, Tensor) or _tag_of(each) == "tensor" for each in items):
            raise Unsavable(path, IN_SET)
        if any(type(each).__hash__ is _BY_ADDRESS for each in value if is_plain_object(type(each))):
            # Its place among the members, and so its name, differs between processes.
            raise Unsavable(path, OBJECT_IN_SET)
        code: dict[str, Any] = {TAG: kind.__name__, "items": items}
        if not _ORDERED.issuperset(map(type, items)):
            order = sorted(range(len(items)), key=[*map(repr, items)].__getitem__)
            code["items"] = [items[number] for number in order]
            if len(self.names) > known:
                # The paths of the members count in the order in which they were met.
                code["order"] = order
        return code

    def _mapping(self, path: str, value: Any) -> Any:
        if ref := self.refer(path, value):
            return ref
        kind = type(value)
        # ``Module.state_dict`` has the versions of the modules in an attribute of one.
        attributes = vars(value) if kind is OrderedDict else None
        if kind in (dict, OrderedDict) and TAG not in value and are_native(value):
            if are_native(value.values()) and not self.may_omit:
                plain = kind(value)
            else:
                plain = kind((k, self.code_member(path_to(path, k), v)) for k, v in value.items())
            if attributes:
                vars(plain).update(self.code(f"{path}.<attributes>", attributes))
            return plain
        code: dict[str, Any] = {TAG: _MAPPINGS[kind], "pairs": self._pairs(path, value)}
        if attributes:
            code["attributes"] = self.code(f"{path}.<attributes>", attributes)
        if kind is defaultdict:
            factory = getattr(value.default_factory, "__name__", None)
            if FACTORIES.get(factory, ...) is not value.default_factory:
                raise Unsavable(path, FACTORY)
            code["factory"] = factory
        return code

    def _pairs(self, path: str, value: Mapping[Any, Any]) -> list[list[Any]]:
        pairs = []
        for number, (key, each) in enumerate(value.items()):
            coded = self.code(f"{path}.<key {number}>", key)
            place = path_of_pair(path, number, key, self.name_of_key)
            pairs.append([coded, self.code_member(place, each)])
        return pairs

    def _array(self, path: str, value: Any) -> Any:
        if ref := self.refer(path, value):
            return ref
        if value.dtype == object:
            items = self._members(path, value.reshape(-1).tolist())
            return {TAG: "objects", "shape": list(value.shape), "items": items}
        if value.dtype.hasobject:
            raise Unsavable(path, NO_VALUE.format(f"NumPy array of {value.dtype}"))
        return self._view(path, value, {TAG: "array"})

    def _tensor(self, path: str, value: Any) -> Any:
        if ref := self.refer(path, value):
            return ref
        if type(value) is not Tensor:
            raise Unsavable(path, STRAY_PARAMETER.format(type(value).__name__))
        if value.grad_fn is not None:
            raise Unsavable(path, GRAPH)
        if not has_plain_bytes(value) or is_sharded(value) or value.is_conj() or value.is_neg():
            raise Unsavable(path, NO_STORAGE.format(str(value.layout)))
        return self._view(path, value, {TAG: "tensor", "grad": value.requires_grad})

    def _view(self, path: str, value: Any, code: dict[str, Any]) -> dict[str, Any]:
        self.views[path] = View(path, value, code)
        return code

    def _generator(self, path: str, value: Any) -> Any:
        if ref := self.refer(path, value):
            return ref
        state = self.code(f"{path}.<state>", state_of_generator(value))
        return {TAG: "generator", "kind": kind_of_generator(value), "state": state}

    def _object(self, path: str, value: Any) -> Any:
        if ref := self.refer(path, value):
            return ref
        kind = type(value)
        self.kinds.add(kind)
        fields = {
            name: self.code_field(path_to(path, name), each)
            for name, each in attributes_of(value).items()
        }
        return {TAG: "object", "type": qualified_name(kind), "fields": fields}

    makers: ClassVar[dict[type, Callable[[Any, str, Any], Any]]] = {
        **dict.fromkeys(BY_TYPE, _converted),
        **dict.fromkeys(SCALARS, _scalar),
        **dict.fromkeys((set, frozenset), _set),
        **dict.fromkeys(_MAPPINGS, _mapping),
        tuple: _tuple,
        list: _list,
        deque: _deque,
        np.ndarray: _array,
        Tensor: _tensor,
    }
    """What writes the code of values of an exact type."""


def path_of_pair(path: str, number: int, key: Any, name_of_key: Callable[[Any], Hashable]) -> str:
    """Return the path of a member of a dict that is written as pairs."""
    name = key if type(key) in NATIVE else name_of_key(key)
    return f"{path}.<value {number}>" if name is None else path_to(path, name)


def _tag_of(code: Any) -> Any:
    return code.get(TAG) if type(code) is dict else None
