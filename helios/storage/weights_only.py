"""Encodes trees of Python values as trees that ``weights_only`` loading accepts, and decodes them.

Lists, tuples, dictionaries with plain keys, numbers, strings and tensors stay as they are. Any
other value becomes a dictionary with a reserved key that names its type. An object that occurs
twice in the tree is one object again after decoding.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, Flag
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch

from helios.core.memory import has_plain_bytes
from helios.errors import StateError
from helios.storage import type_converters
from helios.storage.shared_storages import SharedStorages
from helios.storage.type_converters import (
    Alias,
    HeldTensor,
    NamedFields,
    NamedMember,
    Reference,
    ShardedValue,
    in_every_process,
    is_native,
    is_native_key,
    step_to,
    type_name,
)

TAG = "__helios__"
_SHARDED = "sharded"
_NAMED: dict[str, Callable[[str], Any]] = {"node": Reference, "held": HeldTensor}
"""What consists of a name."""

_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
} | {kind.__name__: kind for kind in (OrderedDict, Counter, deque)}


FindSharded: TypeAlias = Callable[[str], Any]

_MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"set": set, "frozenset": frozenset}
_OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "array": type_converters.parts_to_array,
    "view": type_converters.parts_to_view,
    "scalar": type_converters.parts_to_scalar,
    "alias": lambda parts: Alias(*parts),
    **{tag: converter.from_parts for tag, converter in type_converters.BY_TAG.items()},
}
_ENUMS: dict[str, type[Enum]] = {"enum": Enum, "flag": Flag}


def _index_types(safe_types: Iterable[Any]) -> dict[str, type]:
    """Return types by their full names."""
    return {type_name(kind): kind for kind in safe_types if isinstance(kind, type)}


class Encoder:
    """Encodes one tree, within which shared objects stay shared.

    Args:
        where: name of the tree's root in messages.
        safe_types: users' types that loading may create.
        check_object: called with each object of such a type; raises if it could not be loaded.

    Attributes:
        has_live_objects: whether the code contains users' objects themselves, not copies.
    """

    def __init__(
        self,
        where: str,
        safe_types: Iterable[Any],
        check_object: Callable[[Any], None],
    ) -> None:
        self._safe = frozenset(_index_types(safe_types).values())
        self._check_object = check_object
        self._path = [where]
        # The object is kept with its code, because an id is unique only while the object exists.
        self._memo: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()
        self._shared = SharedStorages(self._fill_array, self._fill_view)
        self.has_live_objects = False
        self._handlers: dict[type, Callable[[Any], Any]] = {
            list: self._encode_list,
            dict: self._encode_dict,
            OrderedDict: self._encode_ordered,
            int: lambda value: {TAG: "int", "value": hex(value)},
            tuple: self._closed(lambda value: tuple(self._items(value))),
            set: self._closed(lambda value: {TAG: "set", "items": self._items(value)}),
            frozenset: self._closed(lambda value: {TAG: "frozenset", "items": self._items(value)}),
            deque: self._closed(self._encode_deque),
            Counter: self._closed(lambda value: {TAG: "counter", "pairs": self._pairs(value)}),
            defaultdict: self._closed(self._encode_defaultdict),
            np.ndarray: self._closed(self._encode_array),
            NamedMember: self._encode_member,
            NamedFields: self._encode_fields,
            Alias: self._encode_alias,
            Reference: lambda value: {TAG: "node", "name": value.name},
            HeldTensor: lambda value: {TAG: "held", "name": value.name},
            ShardedValue: lambda value: {TAG: _SHARDED, "name": value.name},
            torch.Tensor: self._encode_tensor,
            torch.nn.Parameter: self._encode_tensor,
        }

    def encode(self, tree: Any) -> Any:
        """Return the code of a tree: new containers with the tree's own tensors.

        Raises:
            StateError: if a value cannot be loaded again; the message has the path to it.
        """
        try:
            code = self._encode(tree)
        except RecursionError:
            raise StateError(
                f"{self._path[0]} cannot be saved: it is nested too deeply. Flatten it, or name "
                "the attribute in `unsaved`."
            ) from None
        self._shared.fit()
        return code

    def _encode(self, value: Any) -> Any:
        if is_native(value):
            return value
        found = self._memo.get(id(value))
        if found is not None:
            return found[1]
        if id(value) in self._open:
            raise StateError(
                f"{self._where()} cannot be saved: the {type(value).__name__} contains itself. "
                "Break the cycle, or name the attribute in `unsaved`."
            )
        handler = self._handlers.get(type(value), self._encode_other)
        return self._remember(value, handler(value))

    def _remember(self, value: Any, code: Any) -> Any:
        self._memo[id(value)] = (value, code)
        return code

    def _where(self) -> str:
        return "".join(self._path).removeprefix(".")

    def _child(self, step: str, value: Any) -> Any:
        self._path.append(step)
        code = self._encode(value)
        self._path.pop()
        return code

    def _closed(self, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a handler of values that are created after their members, to detect cycles."""

        def handle(value: Any) -> Any:
            self._open.add(id(value))
            code = handler(value)
            self._open.discard(id(value))
            return code

        return handle

    def _items(self, values: Iterable[Any]) -> list[Any]:
        return [
            value if is_native(value) else self._child(f"[{number}]", value)
            for number, value in enumerate(values)
        ]

    def _pairs(self, mapping: Mapping[Any, Any]) -> list[list[Any]]:
        return [
            [self._child(step_to(key), key), self._child(step_to(key), value)]
            for key, value in mapping.items()
        ]

    def _encode_list(self, value: list[Any]) -> list[Any]:
        code: list[Any] = self._remember(value, [])
        for number, item in enumerate(value):
            code.append(item if is_native(item) else self._child(f"[{number}]", item))
        return code

    def _encode_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        code: dict[Any, Any] = self._remember(value, {})
        if TAG in value or not all(map(is_native_key, value)):
            code.update({TAG: "dict", "pairs": self._pairs(value)})
            return code
        for key, item in value.items():
            code[key] = item if is_native(item) else self._child(step_to(key), item)
        return code

    def _encode_ordered(self, value: OrderedDict[Any, Any]) -> Any:
        # ``Module.state_dict`` stores version numbers in an attribute of its OrderedDict.
        attributes = vars(value)
        if TAG in value or not all(map(is_native_key, value)):
            code: Any = self._remember(value, {})
            code.update({TAG: "ordered", "pairs": self._pairs(value)})
            code["attributes"] = self._child(".__dict__", attributes)
            return code
        code = self._remember(value, OrderedDict())
        for key, item in value.items():
            code[key] = item if is_native(item) else self._child(step_to(key), item)
        if attributes:
            vars(code).update(self._child(".__dict__", attributes))
        return code

    def _encode_deque(self, value: deque[Any]) -> dict[str, Any]:
        return {TAG: "deque", "items": self._items(value), "maxlen": value.maxlen}

    def _encode_defaultdict(self, value: defaultdict[Any, Any]) -> dict[str, Any]:
        factory = value.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise StateError(
                f"{self._where()} cannot be saved: the factory {factory!r} of the defaultdict is "
                f"not one of {sorted(_FACTORIES)} or None. Save dict(...) of it, or name the "
                "attribute in `unsaved`."
            )
        return {TAG: "defaultdict", "factory": name, "pairs": self._pairs(value)}

    def _encode_array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype == np.dtype(object):
            items = self._items(value.reshape(-1).tolist())
            return {TAG: "objects", "shape": list(value.shape), "items": items}
        if value.dtype.hasobject:
            return self._refuse(value)
        code: dict[str, Any] = {TAG: "array"}
        self._shared.add_array(self._where(), value, code)
        return code

    def _fill_array(self, code: dict[str, Any], array: np.ndarray[Any, Any]) -> None:
        code["value"] = self._fresh(type_converters.array_to_parts(array))

    def _fresh(self, parts: list[Any]) -> list[Any]:
        """Encode new parts, mostly native ones, without the memo; there may be many arrays."""
        return [part if type(part) in (str, list) else self._encode(part) for part in parts]

    def _fill_view(
        self, code: dict[str, Any], array: np.ndarray[Any, Any], memory: torch.Tensor, offset: int
    ) -> None:
        kind = np.lib.format.dtype_to_descr(array.dtype)
        geometry = [self._encode(kind), list(array.shape), list(array.strides), offset]
        code.update({TAG: "view", "value": [memory, *geometry, bool(array.flags.writeable)]})

    def _encode_member(self, value: NamedMember) -> dict[str, Any]:
        return {TAG: "member", "type": value.type, "names": value.names, "is_flag": value.is_flag}

    def _encode_fields(self, value: NamedFields) -> dict[str, Any]:
        code: dict[str, Any] = self._remember(value, {TAG: "fields", "type": value.type})
        code["fields"] = {name: self._child(step_to(name), v) for name, v in value.fields.items()}
        return code

    def _encode_alias(self, value: Alias) -> dict[str, Any]:
        return {TAG: "alias", "value": self._encode(list(value))}

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        """The tensors of the code, grouped by their storages."""
        return self._shared.groups

    def _encode_tensor(self, value: torch.Tensor) -> torch.Tensor:
        code = value.detach()
        has_storage = has_plain_bytes(code)
        if not has_storage or code.is_conj() or code.is_neg():
            # The storage alone does not define its values.
            code = code.clone()
        if type(value) is torch.Tensor and value.is_leaf:
            code.requires_grad_(value.requires_grad)
        # Empty storages all have the address 0, but share nothing.
        if has_storage and code.untyped_storage().nbytes():
            self._shared.add_tensor(self._where(), code)
        return code

    def _encode_other(self, value: Any) -> Any:
        converter = type_converters.BY_TYPE.get(type(value))
        if converter is not None:
            try:
                parts = converter.to_parts(value)
            except ValueError:
                return self._refuse(value)
            return {TAG: converter.tag, "value": self._encode(parts)}
        if isinstance(value, np.generic):
            return {TAG: "scalar", "value": self._fresh(type_converters.scalar_to_parts(value))}
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        kind = type(value)
        if kind not in self._safe:
            return self._refuse(value)
        if isinstance(value, Flag):
            return {TAG: "flag", "type": type_name(kind), "value": value.value}
        if isinstance(value, Enum):
            return {TAG: "enum", "type": type_name(kind), "name": value.name}
        if isinstance(value, tuple):
            items = self._closed(self._items)(value)
            return {TAG: "tuple", "type": type_name(kind), "items": items}
        try:
            self._check_object(value)
        except Exception as error:
            raise StateError(
                f"{self._where()} cannot be saved: its type {type_name(kind)} is a safe type, but "
                f"its contents could not be loaded ({error}). Give its owner a state_dict, or name "
                "the attribute in `unsaved`."
            ) from error
        self.has_live_objects = True
        return value

    def _refuse(self, value: Any) -> Any:
        raise StateError(
            f"{self._where()} cannot be saved: a checkpoint cannot contain a "
            f"{type_name(type(value))}. Add the type to the model's types_for_safe_load(), name "
            "the attribute in `unsaved`, or give its owner a state_dict of plain values."
        )


class Decoder:
    """The inverse of :class:`Encoder`.

    Args:
        safe_types: the types that may be created; no others are looked up.
        find_sharded: returns the tensor that stands for a sharded one, by name.
    """

    def __init__(self, safe_types: Iterable[Any], find_sharded: FindSharded | None = None) -> None:
        self._types = _index_types(safe_types)
        self._find_sharded = find_sharded or ShardedValue
        self._memo: dict[int, Any] = {}

    def decode(self, code: Any) -> Any:
        """Return the tree of a code.

        Raises:
            Exception: if the code is not one that an encoder creates.
        """
        if is_native(code):
            return code
        if id(code) in self._memo:
            return self._memo[id(code)]
        kind = type(code)
        if kind is list:
            return self._fill_list(code)
        if kind is dict and TAG in code:
            return self._build(code)
        if kind is dict or kind is OrderedDict:
            return self._fill_mapping(code)
        return self._remember(code, tuple(map(self.decode, code)) if kind is tuple else code)

    def _remember(self, code: Any, value: Any) -> Any:
        self._memo[id(code)] = value
        return value

    def _fill_list(self, code: list[Any]) -> list[Any]:
        value: list[Any] = self._remember(code, [])
        value.extend(map(self.decode, code))
        return value

    def _fill_mapping(self, code: Any) -> Any:
        value = self._remember(code, type(code)())
        for key, item in code.items():
            value[key] = self.decode(item)
        if isinstance(code, OrderedDict) and vars(code):
            vars(value).update(self.decode(vars(code)))
        return value

    def _build(self, code: dict[str, Any]) -> Any:
        tag = code[TAG]
        if "pairs" in code:
            return self._build_mapping(tag, code)
        if "items" in code:
            return self._remember(code, self._build_sequence(tag, code))
        if tag == "fields":
            record = self._remember(code, NamedFields(in_every_process(code["type"]), {}))
            record.fields.update((key, self.decode(item)) for key, item in code["fields"].items())
            return record
        return self._remember(code, self._build_value(tag, code))

    def _build_mapping(self, tag: str, code: dict[str, Any]) -> Any:
        if tag == "defaultdict":
            name = code["factory"]
            value: Any = defaultdict(None if name is None else _FACTORIES[name])
        else:
            value = _MAPPINGS[tag]()
        self._remember(code, value)
        for key, item in code["pairs"]:
            value[self.decode(key)] = self.decode(item)
        if tag == "ordered":
            vars(value).update(self.decode(code["attributes"]))
        return value

    def _build_sequence(self, tag: str, code: dict[str, Any]) -> Any:
        items: Collection[Any] = [self.decode(item) for item in code["items"]]
        if tag == "deque":
            return deque(items, code["maxlen"])
        if tag == "objects":
            return type_converters.objects_to_array(code["shape"], items)
        if tag == "tuple":
            return tuple.__new__(self._types[in_every_process(code["type"])], items)
        return _SEQUENCES[tag](items)

    def _build_value(self, tag: str, code: dict[str, Any]) -> Any:
        if tag in _ENUMS:
            return self._build_enum(_ENUMS[tag], code)
        if tag == _SHARDED:
            return self._find_sharded(code["name"])
        if tag in _NAMED:
            return _NAMED[tag](code["name"])
        if tag == "member":
            return NamedMember(in_every_process(code["type"]), code["names"], code["is_flag"])
        return _OF_PARTS[tag](self.decode(code["value"]))

    def _build_enum(self, base: type[Enum], code: dict[str, Any]) -> Enum:
        kind = self._types[in_every_process(code["type"])]
        if not issubclass(kind, base):
            raise TypeError(f"{kind} is not a subclass of {base}")
        return kind[code["name"]] if "name" in code else kind(code["value"])


def fill_sharded(code: Any, find_sharded: FindSharded) -> Any:
    """Put the tensors that stand for sharded ones into a code, in place, without decoding it.

    Args:
        code: what an encoder or anybody else has made.
        find_sharded: returns such a tensor, by name.
    """
    waiting: list[Any] = []
    seen: set[int] = set()

    def swap(value: Any) -> Any:
        if isinstance(value, dict) and value.get(TAG) == _SHARDED:
            return find_sharded(str(value.get("name")))
        if type(value) is tuple:
            members = tuple(map(swap, value))
            return value if all(map(is_, members, value)) else members
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            waiting.append(value)
        return value

    code = swap(code)
    while waiting:
        holder = waiting.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            holder[key] = swap(holder[key])
    return code
