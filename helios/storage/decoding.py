"""Decodes the trees that :mod:`helios.storage.weights_only` encodes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum, Flag
from operator import is_
from typing import Any, TypeAlias

from helios.storage import type_converters
from helios.storage.type_converters import is_native
from helios.storage.user_types import (
    Alias,
    HeldTensor,
    NamedFields,
    NamedMember,
    Reference,
    ShardedValue,
    in_every_process,
)
from helios.storage.weights_only import FACTORIES, HELD, REFERENCE, SHARDED, TAG, index_types

FindSharded: TypeAlias = Callable[[str], Any]

_MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"set": set, "frozenset": frozenset}
_OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "array": type_converters.parts_to_array,
    "view": type_converters.parts_to_view,
    "scalar": lambda parts: type_converters.parts_to_array(parts)[()],
    "alias": lambda parts: Alias(*parts),
    **{tag: converter.from_parts for tag, converter in type_converters.BY_TAG.items()},
}
_ENUMS: dict[str, type[Enum]] = {"enum": Enum, "flag": Flag}


class Decoder:
    """The inverse of :class:`~helios.storage.weights_only.Encoder`.

    Args:
        safe_types: the types that may be created; no others are looked up.
        find_sharded: returns the tensor that stands for a sharded one, by name.
    """

    def __init__(self, safe_types: Iterable[Any], find_sharded: FindSharded | None = None) -> None:
        self._types = index_types(safe_types)
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
            value: Any = defaultdict(None if name is None else FACTORIES[name])
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
        if tag == SHARDED:
            return self._find_sharded(code["name"])
        if tag in (REFERENCE, HELD):
            return (Reference if tag == REFERENCE else HeldTensor)(code["name"])
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
        if isinstance(value, dict) and value.get(TAG) == SHARDED:
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
