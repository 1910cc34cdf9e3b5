"""Builds values from their codes, in place of existing values of the same kind."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from enum import Enum, Flag
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from helios.core.generators import is_generator, kind_of_generator, load_generator, make_generator
from helios.core.memory import address_of, memory_in, root_of, span_of
from helios.core.plain_values import qualified_name
from helios.errors import StateError
from helios.storage.codes import FACTORIES, HOLE, TAG, Coder, Codes, path_of_pair, path_to
from helios.storage.memory_layout import View, as_tensor, lay, unpacked
from helios.storage.plain_objects import (
    attributes_of,
    delete_attribute,
    is_plain_object,
    make_bare,
    refill,
    set_attribute,
)
from helios.storage.type_converters import (
    BY_TAG,
    ShardedValue,
    dtype_of,
    in_every_process,
    objects_to_array,
)

_CONTAINERS = frozenset((list, tuple, dict, OrderedDict))
_MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "defaultdict": defaultdict}


class UnknownTypeError(StateError):
    """A value of an unknown class."""


class Builder:
    """Builds values, within which the same references lead to the same object.

    Args:
        types: classes of which instances may be built; no method of them runs.
        live: the existing values, which are changed in place; without them, everything is new, and
            may share memory with the codes.
        find: returns the object that a reference leads to if no code of that path was built, or
            ``None``.
        name_of_key: what the method of that name of the coder returned.
        find_sharded: returns the tensor that stands for a sharded one, by name.
    """

    def __init__(
        self,
        types: Iterable[Any] = (),
        live: Coder | None = None,
        find: Callable[[str], Any] = lambda name: None,
        name_of_key: Callable[[Any], Hashable] = lambda key: None,
        find_sharded: Callable[[str], Any] = ShardedValue,
    ) -> None:
        self._types = {qualified_name(kind): kind for kind in types if isinstance(kind, type)}
        self._live, self._find, self._name_of_key = live, find, name_of_key
        self._find_sharded = find_sharded
        self._parts = {} if live is None else live.parts
        self._views = {} if live is None else live.views
        self._built: dict[str, Any] = {}
        self._done: dict[int, tuple[Any, Any]] = {}
        self._memory: dict[str, bytearray | Tensor] = {}
        self._in_place: set[str] = set()

    def check(self, codes: Mapping[str, Any]) -> None:
        """Check that all codes can be built, before anything is changed.

        Args:
            codes: by path, in the order in which they will be built.

        Raises:
            StateError: if a type is not known, a reference leads nowhere, or a code is damaged.
        """
        trial = Builder(self._types.values(), None, self._find, self._name_of_key)
        for path, code in codes.items():
            try:
                trial.build(path, code)
            except (StateError, MemoryError):
                raise
            except Exception as error:
                raise StateError(
                    f"The saved value of {path} is damaged: {type(error).__name__}: {error}. Use "
                    "another checkpoint."
                ) from error

    def build(self, path: str, code: Any) -> Any:
        """Return the value of a code.

        Args:
            path: where the coder met the value.
            code: its code.

        Raises:
            Exception: if it is not one that a coder writes.
        """
        kind = type(code)
        if kind not in _CONTAINERS:
            return code
        found = self._done.get(id(code))
        if found is not None:
            return found[1]
        if kind is list:
            value = self._list(path, code)
        elif kind is tuple:
            value = self._enter(path, tuple(self._members(path, code)))
        elif TAG in code:
            make = self.builders.get(code[TAG])
            if make is None:
                raise StateError(f"The saved value of {path} is of an unknown kind: {code[TAG]!r}.")
            value = make(self, path, code)
        else:
            value = self._dict(path, code)
        # The code is kept, since its id is unique only while it exists.
        self._done[id(code)] = code, value
        return value

    def _enter(self, path: str, part: Any) -> Any:
        self._built[path] = part
        return part

    def _present(self, path: str, kind: type) -> Any:
        """Return the object that is there now, if it is of the same kind, or a new one."""
        part = self._parts.get(path)
        return self._enter(path, part if type(part) is kind else kind())

    def _members(self, path: str, codes: Collection[Any]) -> list[Any]:
        return [self.build(f"{path}.{number}", code) for number, code in enumerate(codes)]

    def _list(self, path: str, code: list[Any]) -> list[Any]:
        part: list[Any] = self._present(path, list)
        self._done[id(code)] = code, part
        part[:] = self._members(path, code)
        return part

    def _dict(self, path: str, code: Any) -> Any:
        kind = type(code)
        part = self._present(path, kind)
        self._done[id(code)] = code, part
        pairs = []
        for key, each in code.items():
            value = part.get(key) if _is_hole(each) else self.build(path_to(path, key), each)
            pairs.append((key, value))
        self._fill(path, part, pairs, vars(code) if kind is OrderedDict else {})
        return part

    # ---- one method for each tag

    def _ref(self, path: str, code: dict[str, Any]) -> Any:
        name = code["name"]
        found = self._built.get(name)
        found = self._find(name) if found is None else found
        if found is None:
            raise StateError(f"{path} refers to {name}, which does not exist now.")
        return found

    def _sharded(self, path: str, code: dict[str, Any]) -> Any:
        return self._find_sharded(code["name"])

    def _codes(self, path: str, code: dict[str, Any]) -> Any:
        return Codes(code["value"])

    def _int(self, path: str, code: dict[str, Any]) -> Any:
        return int(code["value"], 16)

    def _scalar(self, path: str, code: dict[str, Any]) -> Any:
        description, text = code["value"]
        return np.ndarray((), dtype_of(description), bytearray(text, "latin-1"))[()]

    def _converted(self, path: str, code: dict[str, Any]) -> Any:
        parts = code["value"]
        if type(parts) is list:
            parts = self._members(path, parts)
        value = BY_TAG[code[TAG]].from_parts(parts)
        if type(value) is bytearray:
            part = self._present(path, bytearray)
            part[:] = value
            return part
        return self._enter(path, value) if type(value) is bytes else value

    def _deque(self, path: str, code: dict[str, Any]) -> Any:
        part = self._parts.get(path)
        if type(part) is not deque or part.maxlen != code["maxlen"]:
            part = deque(maxlen=code["maxlen"])
        refill(self._enter(path, part), self._members(path, code["items"]))
        return part

    def _set(self, path: str, code: dict[str, Any]) -> Any:
        items = code["items"]
        order = code.get("order", range(len(items)))
        is_frozen = code[TAG] == "frozenset"
        part: set[Any] = set() if is_frozen else self._present(path, set)
        members = [self.build(f"{path}.{n}", each) for n, each in zip(order, items, strict=True)]
        refill(part, members)
        return frozenset(part) if is_frozen else part

    def _mapping(self, path: str, code: dict[str, Any]) -> Any:
        kind: Any = _MAPPINGS[code[TAG]]
        part = self._present(path, kind)
        if kind is defaultdict:
            part.default_factory = FACTORIES[code["factory"]]
        pairs = []
        for number, (coded, each) in enumerate(code["pairs"]):
            key = self.build(f"{path}.<key {number}>", coded)
            place = path_of_pair(path, number, key, self._name_of_key)
            pairs.append((key, part.get(key) if _is_hole(each) else self.build(place, each)))
        self._fill(path, part, pairs, code.get("attributes", {}))
        return part

    def _fill(self, path: str, part: Any, pairs: list[tuple[Any, Any]], attributes: Any) -> None:
        refill(part, pairs)
        if type(part) is OrderedDict:
            vars(part).clear()
            vars(part).update(self.build(f"{path}.<attributes>", dict(attributes)))

    def _objects(self, path: str, code: dict[str, Any]) -> Any:
        array = self._parts.get(path)
        shape, items = tuple(code["shape"]), code["items"]
        if type(array) is not np.ndarray or array.dtype != object or array.shape != shape:
            array = objects_to_array(shape, [None] * len(items))
        self._enter(path, array)
        array[...] = objects_to_array(shape, self._members(path, items))
        return array

    def _tuple(self, path: str, code: dict[str, Any]) -> Any:
        kind = self._type(path, code, tuple)
        return self._enter(path, tuple.__new__(kind, self._members(path, code["items"])))

    def _flag(self, path: str, code: dict[str, Any]) -> Any:
        return self._type(path, code, Flag)(code["value"])

    def _enum(self, path: str, code: dict[str, Any]) -> Any:
        return self._type(path, code, Enum)[code["name"]]

    def _type(self, path: str, code: dict[str, Any], base: type) -> Any:
        name = in_every_process(code["type"])
        kind = self._types.get(name)
        if kind is None:
            raise UnknownTypeError(
                f"The saved value of {path} is a {name}, which is unknown now: create one in "
                "setup(), or return the type from types_for_safe_load()."
            )
        if not issubclass(kind, base):
            raise StateError(
                f"{path} was saved as a {name}, which is no longer a kind of {base.__name__}."
            )
        return kind

    def _object(self, path: str, code: dict[str, Any]) -> Any:
        kind, fields = self._type(path, code, object), code["fields"]
        part = self._parts.get(path)
        if type(part) is not kind:
            if not is_plain_object(kind):
                raise StateError(f"{path} was saved as a {code['type']}, which has other content.")
            part = make_bare(kind)
        self._enter(path, part)
        for name in attributes_of(part).keys() - fields.keys():
            delete_attribute(part, name)
        for name, each in fields.items():
            if not _is_hole(each):
                set_attribute(part, name, self.build(path_to(path, name), each))
        return part

    def _generator(self, path: str, code: dict[str, Any]) -> Any:
        part = self._parts.get(path)
        if not is_generator(part) or kind_of_generator(part) != code["kind"]:
            part = make_generator(code["kind"])
        self._enter(path, part)
        load_generator(part, self.build(f"{path}.<state>", code["state"]))
        return part

    # ---- memory

    def _view(self, path: str, code: dict[str, Any]) -> Any:
        view = self._views.get(path)
        part = self._tensor(code, view) if "value" in code else self._placed(path, code, view)
        if isinstance(part, Tensor) and part.requires_grad != code["grad"]:
            part.requires_grad_(code["grad"])
        return self._enter(path, part)

    def _tensor(self, code: dict[str, Any], view: View | None) -> Any:
        saved = code["value"].detach()
        if self._live is None:
            return saved
        part = None if view is None else view.part
        if view is None or type(part) is not Tensor or part.is_inference():
            return saved.to(_device_of(code), copy=True)
        with torch.no_grad():
            if "value" in view.code and _form(part) == _form(saved):
                part.detach().copy_(saved)
            else:
                # Closures and functions refer to the tensor that is there.
                part.data = saved.to(part.device, copy=True)
        return part

    def _placed(self, path: str, code: dict[str, Any], view: View | None) -> Any:
        """Return a view of memory: the one that is there, if that lies in the same way."""
        home = code.get("of", path)
        stays = view is not None and _place(view.code) == _place(code)
        if "memory" in code:
            memory = unpacked(code["memory"])
            if stays and view is not None and _may_write(view.part):
                self._write(view.part, code, memory)
                self._in_place.add(path)
                return view.part
            if self._live is not None and isinstance(memory, Tensor):
                memory = memory.to(_device_of(code), copy=True)
            self._memory[path] = memory
        elif stays and view is not None and (home in self._in_place or home not in self._built):
            return view.part
        if home not in self._memory:
            self._memory[home] = self._memory_of(path, home)
        return lay(code, self._memory[home])

    def _write(self, part: Any, code: dict[str, Any], memory: bytearray | Tensor) -> None:
        """Write bytes into the memory of the first of its views."""
        if isinstance(part, np.ndarray) and part.strides != lay(code, memory).strides:
            # One that shares no memory, and was saved without gaps.
            begin, end = span_of(part)
            whole = memory_in((begin, end), [part]).numpy()
            first = address_of(part) - begin
            there = np.ndarray(part.shape, part.dtype, whole, first, part.strides)
            np.copyto(there, lay(code, memory))
            return
        begin = address_of(part) - code.get("offset", 0)
        source = as_tensor(memory)
        with torch.no_grad():
            memory_in((begin, begin + len(source)), [part]).copy_(source)

    def _memory_of(self, path: str, name: str) -> Tensor:
        """Return the memory of a neighbour, or of a view that was restored in place."""
        view = self._views.get(name)
        if name in self._in_place and view is not None:
            begin = address_of(view.part) - view.code.get("offset", 0)
            return memory_in((begin, begin + len(view.code["memory"])), [view.part])
        home = self._find(name)
        if not isinstance(home, Tensor | np.ndarray):
            raise StateError(f"{path} lies in the memory of {name}, which does not exist now.")
        return memory_in(span_of(home), [home])

    builders: ClassVar[dict[str, Callable[[Any, str, dict[str, Any]], Any]]] = {
        "ref": _ref,
        "sharded": _sharded,
        "codes": _codes,
        "int": _int,
        "scalar": _scalar,
        "deque": _deque,
        **dict.fromkeys(("set", "frozenset"), _set),
        **dict.fromkeys(_MAPPINGS, _mapping),
        "objects": _objects,
        "tuple": _tuple,
        "flag": _flag,
        "enum": _enum,
        "object": _object,
        "generator": _generator,
        **dict.fromkeys(("tensor", "array"), _view),
        **dict.fromkeys(BY_TAG, _converted),
    }
    """What builds the values of codes with a tag."""


def _is_hole(code: Any) -> bool:
    return type(code) is dict and code == HOLE


def _device_of(code: Mapping[str, Any]) -> torch.device:
    """Return where a new tensor is made: on the accelerator, if it was on one of that type."""
    present = torch.accelerator.current_accelerator() if "device" in code else None
    is_there = present is not None and present.type == code["device"]
    return present if is_there and present is not None else torch.device("cpu")


def _may_write(part: Any) -> bool:
    if isinstance(part, Tensor):
        return not part.is_inference()
    # The memory of a read-only array is written to if it is NumPy's own.
    return bool(part.flags.writeable) or isinstance(root_of(part), np.ndarray)


def _form(part: Tensor) -> tuple[Any, ...]:
    return part.dtype, part.shape, part.stride()


def _place(code: Mapping[str, Any]) -> list[str]:
    keys = (TAG, "dtype", "shape", "strides", "offset", "of", "read-only")
    return [str(code.get(key)) for key in keys] + [str(len(code.get("memory", "")))]
