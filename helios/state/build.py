"""Builds values from their codes, in place where ``setup`` has made one of the same kind there."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, Flag
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from helios.core.generators import kind_of_generator, load_generator, make_generator
from helios.core.memory import array_on, bytes_in, span_of, tensor_on
from helios.errors import StateError
from helios.state.anchors import path_of
from helios.state.values import (
    attributes_of,
    delete_attribute,
    make_bare,
    refill,
    set_attribute,
    table_of,
)
from helios.state.walk import FACTORIES, HOLE, PARTS, TAG, Walk
from helios.storage.type_converters import (
    BY_TAG,
    in_every_process,
    objects_to_array,
    parts_to_array,
    type_name,
)

GONE: dict[str, Any] = {TAG: "gone"}
"""The code of an attribute that training has deleted."""

_MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


@final
class Build:
    """Restores saved codes.

    Args:
        live: what the owner holds now.
        types: classes that may be built; no method of them runs.
        others: further anchors by name, which nothing leads to now.
    """

    def __init__(
        self, live: Walk, types: Iterable[type], others: Mapping[str, Any] | None = None
    ) -> None:
        self._live, self._others = live, others or {}
        self._types = {type_name(kind): kind for kind in types}
        self._done: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}

    def lacking(self, codes: Mapping[str, Mapping[Any, Any]]) -> set[str]:
        """Return the holders that codes need and nothing has now."""
        return {name for name in codes if self._live.find(name) is None}

    def unknown(self, names: Iterable[str]) -> set[str]:
        """Return the names that stand for nothing now."""
        return {n for n in names if all(t.get(n) is None for t in (self._done, self._others))
                and self._live.find(n) is None}

    def check(self, codes: Mapping[str, Mapping[Any, Any]]) -> None:
        """Refuse codes of unknown types before anything is changed."""
        for table in codes.values():
            for name in types_in(table):
                if in_every_process(name) not in self._types:
                    raise StateError(
                        f"The saved state holds a {name}, which is unknown now: create one in "
                        "setup(), or return the type from types_for_safe_load()."
                    )

    def restore(self, codes: Mapping[str, Mapping[Any, Any]]) -> None:
        """Set what was saved, attribute by attribute."""
        for name, table in codes.items():
            holder = self._live.holders.get(name)
            holder = self._live.find(name) if holder is None else holder
            for key, code in table.items():
                if key == PARTS or code == HOLE:
                    continue
                if code == GONE:
                    delete_attribute(holder, key)
                else:
                    _set(holder, key, self.value(path_of(name, key), code))

    def value(self, path: str, code: Any) -> Any:
        """Return the value of a code."""
        kind = type(code)
        if kind is tuple:
            return tuple(self._members(path, code))
        if kind is list:
            part = self._known(path, list, list)
            part[:] = self._members(path, code)
            return part
        if kind is not dict:
            return code
        tag = code.get(TAG)
        if tag is None:
            part = self._known(path, dict, dict)
            refill(part, [(k, self._held(f"{path}.{k}", c, part, k)) for k, c in code.items()])
            return part
        return _TAGS.get(tag, Build._converted)(self, path, code)

    def _known(self, path: str, kind: Any, make: Any) -> Any:
        """Return the object that is there now, if it is of the same kind, or a new one."""
        part = self._live.parts.get(path)
        if type(part) is not kind:
            part = make()
        self._done[path] = part
        return part

    def _members(self, path: str, codes: Iterable[Any]) -> list[Any]:
        return [self.value(f"{path}.{number}", code) for number, code in enumerate(codes)]

    def _held(self, path: str, code: Any, part: Any, key: Any) -> Any:
        return part.get(key) if code == HOLE else self.value(path, code)

    # ---- one method a tag

    def _ref(self, path: str, code: dict[str, Any]) -> Any:
        name = code["name"]
        found = self._done.get(name)
        found = self._live.find(name) if found is None else found
        found = self._others.get(name) if found is None else found
        if found is None:
            raise StateError(f"{path} refers to {name}, which does not exist now.")
        return found

    def _int(self, path: str, code: dict[str, Any]) -> Any:
        return int(code["value"], 16)

    def _scalar(self, path: str, code: dict[str, Any]) -> Any:
        return parts_to_array(code["value"])[()]

    def _converted(self, path: str, code: dict[str, Any]) -> Any:
        parts = code["value"]
        if type(parts) is list:
            parts = [self.value(f"{path}.{number}", each) for number, each in enumerate(parts)]
        value = BY_TAG[code[TAG]].from_parts(parts)
        if code[TAG] == "bytearray":
            part = self._known(path, bytearray, bytearray)
            part[:] = value
            return part
        return value

    def _deque(self, path: str, code: dict[str, Any]) -> Any:
        part = self._live.parts.get(path)
        if type(part) is not deque or part.maxlen != code["maxlen"]:
            part = deque(maxlen=code["maxlen"])
        self._done[path] = part
        refill(part, self._members(path, code["items"]))
        return part

    def _set(self, path: str, code: dict[str, Any]) -> Any:
        part = self._known(path, set, set)
        refill(part, self._members(path, code["items"]))
        return part

    def _frozenset(self, path: str, code: dict[str, Any]) -> Any:
        return frozenset(self._members(path, code["items"]))

    def _dict(self, path: str, code: dict[str, Any]) -> Any:
        kind = _MAPPINGS.get(code[TAG], defaultdict)
        part = self._known(path, kind, kind)
        if kind is defaultdict:
            part.default_factory = FACTORIES[code["factory"]]
        pairs = []
        for number, (key, each) in enumerate(code["pairs"]):
            key = self.value(f"{path}.<key {number}>", key)
            name = self._live.anchors.name_key(key)
            name = name if isinstance(name, str | int) else f"<key {number}>"
            pairs.append((key, self._held(f"{path}.{name}", each, part, key)))
        refill(part, pairs)
        return part

    _ordered = _counter = _defaultdict = _dict

    def _objects(self, path: str, code: dict[str, Any]) -> Any:
        array = objects_to_array(code["shape"], self._members(path, code["items"]))
        live = self._live.parts.get(path)
        if isinstance(live, np.ndarray) and live.dtype == object and live.shape == array.shape:
            live[...] = array
            array = live
        self._done[path] = array
        return array

    def _tuple(self, path: str, code: dict[str, Any]) -> Any:
        return tuple.__new__(self._type(code), self._members(path, code["items"]))

    def _flag(self, path: str, code: dict[str, Any]) -> Any:
        kind = self._type(code)
        if not issubclass(kind, Flag):
            raise StateError(f"{path} was saved as a {code['type']}, which is no enum.Flag now.")
        return kind(code["value"])

    def _member(self, path: str, code: dict[str, Any]) -> Any:
        kind = self._type(code)
        if not issubclass(kind, Enum):
            raise StateError(f"{path} was saved as a {code['type']}, which is no Enum now.")
        return kind[code["name"]]

    def _type(self, code: dict[str, Any]) -> Any:
        return self._types[in_every_process(code["type"])]

    def _object(self, path: str, code: dict[str, Any]) -> Any:
        kind = self._type(code)
        part = self._known(path, kind, lambda: make_bare(kind))
        for key in attributes_of(part).keys() - code["fields"].keys():
            delete_attribute(part, key)
        for key, each in code["fields"].items():
            if each != HOLE:
                set_attribute(part, key, self.value(f"{path}.{key}", each))
        return part

    def _generator(self, path: str, code: dict[str, Any]) -> Any:
        part = self._live.parts.get(path)
        if part is None or code["kind"] != _kind_of(part):
            part = make_generator(code["kind"])
        self._done[path] = part
        load_generator(part, self.value(f"{path}.<state>", code["state"]))
        return part

    # ---- memory

    def _tensor(self, path: str, code: dict[str, Any]) -> Any:
        view = self._live.views.get(path)
        live = None if view is None or type(view.part) is not Tensor else view
        if "value" not in code:
            return self._view(path, code)
        saved = code["value"]
        if live is not None and "value" in live.code and _form(live.part) == _form(saved):
            part = live.part
            with torch.no_grad():
                part.detach().copy_(saved)
        else:
            device = saved.device if live is None else live.part.device
            part = saved.detach().to(device, copy=True)
            if live is not None:
                # Closures and functions refer to the tensor that is there.
                live.part.data = part
                part = live.part
        if part.requires_grad != code["grad"]:
            part.requires_grad_(code["grad"])
        self._done[path] = part
        return part

    def _array(self, path: str, code: dict[str, Any]) -> Any:
        if "value" not in code:
            return self._view(path, code)
        part, view = parts_to_array(code["value"]), self._live.views.get(path)
        if (
            view is not None
            and "value" in view.code
            and view.code["value"][:3] == code["value"][:3]
        ):
            np.copyto(view.part, part)
            part = view.part
        self._done[path] = part
        return part

    def _view(self, path: str, code: dict[str, Any]) -> Any:
        """Return a view of memory: the one that is there, if it lies in the same way."""
        view = self._live.views.get(path)
        stays = (
            view is not None
            and _place(view.code) == _place(code)
            and (
                code.get("of") is None
                or code["of"] not in self._memory
                or self._memory[code["of"]] is None
            )
        )
        if "memory" in code:
            memory = code["memory"]
            if isinstance(memory, str):
                memory = torch.from_numpy(np.frombuffer(memory.encode("latin-1"), np.uint8).copy())
            if stays:
                _write(view, memory, code)
                self._memory[path] = None
            else:
                self._memory[path] = memory.clone()
        if stays:
            part = view.part
        else:
            part = self._lay(code, self._home_of(code.get("of", path)))
        if isinstance(part, Tensor):
            if part.requires_grad != code["grad"]:
                part.requires_grad_(code["grad"])
        self._done[path] = part
        return part

    def _home_of(self, name: str) -> Any:
        """Return what memory a name stands for: new one, or that of a tensor or array."""
        memory = self._memory.get(name)
        if memory is not None:
            return memory
        return self._done.get(name, self._live.find(name))

    def _lay(self, code: dict[str, Any], home: Any) -> Any:
        if isinstance(home, Tensor):
            storage, begin = home.untyped_storage(), home.storage_offset() * home.element_size()
        else:
            storage = bytes_in(span_of(home), [home]).untyped_storage()
            begin = 0
        if code[TAG] == "tensor":
            offset = (begin + code["offset"]) // code["dtype"].itemsize
            return tensor_on(storage, code["dtype"], code["shape"], code["strides"], offset)
        dtype = np.lib.format.descr_to_dtype(code["dtype"])
        whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        array = array_on(whole, dtype, code["shape"], code["strides"], begin + code["offset"])
        array.flags.writeable = "read-only" not in code
        return array


_TAGS: dict[str, Any] = {
    name.removeprefix("_"): getattr(Build, name)
    for name in (
        *(
            "_ref",
            "_int",
            "_scalar",
            "_deque",
            "_set",
            "_frozenset",
            "_dict",
            "_ordered",
            "_counter",
        ),
        *("_defaultdict", "_objects", "_tuple", "_flag", "_member", "_object", "_generator"),
        *("_tensor", "_array"),
    )
}


def _kind_of(part: Any) -> str:
    try:
        return kind_of_generator(part)
    except AttributeError:
        return ""


def _form(part: Tensor) -> tuple[Any, ...]:
    return part.dtype, part.shape, part.stride()


def _place(code: Mapping[str, Any]) -> list[Any]:
    size = code["memory"] if "memory" in code else ()
    length = len(size) if isinstance(size, str) else getattr(size, "numel", lambda: 0)()
    keys = (TAG, "dtype", "shape", "strides", "offset", "of", "size", "read-only")
    return [str(code.get(key)) for key in keys] + [length, "value" in code]


def _write(view: Any, memory: Tensor, code: Mapping[str, Any]) -> None:
    """Write bytes into the memory of the first of its views."""
    part = view.part
    if isinstance(part, Tensor) and not part.is_cpu:
        storage = part.untyped_storage()
        begin = part.data_ptr() - code["offset"] - storage.data_ptr()
        target = torch.empty(0, dtype=torch.uint8, device=part.device)
        target.set_(storage, begin, (memory.numel(),), (1,)).copy_(memory)
    elif memory.numel():
        first = part.data_ptr() if isinstance(part, Tensor) else part.__array_interface__["data"][0]
        begin = first - code["offset"]
        bytes_in((begin, begin + memory.numel()), [part]).copy_(memory)


def _set(holder: Any, key: Any, value: Any) -> None:
    """Set what a holder has under a key, without running a method of its class."""
    table = table_of(holder)
    if isinstance(holder, nn.Module):
        buffers = table.get("_buffers", {})
        (buffers if key in buffers else table)[key] = value
    elif isinstance(holder, torch.optim.Optimizer) and key in ("state", "param_groups"):
        if key == "state":
            refill(holder.state, list(value.items()))
        else:
            for group, saved in zip(holder.param_groups, value, strict=True):
                refill(group, list(saved.items()))
    elif isinstance(holder, Tensor) or key in table or not _is_call(holder):
        set_attribute(holder, key, value)


def _is_call(holder: Any) -> bool:
    """Return whether a holder cannot be given what it calls: that was filled in place."""
    return type(holder).__name__ in ("partial", "method")


def types_in(code: Any) -> Iterator[str]:
    """Yield the names of the classes in a code."""
    waiting = [code]
    while waiting:
        each = waiting.pop()
        if type(each) is dict:
            if each.get(TAG) in ("object", "member", "flag", "tuple"):
                yield each["type"]
            waiting += each.values()
        elif type(each) in (list, tuple):
            waiting += each
