"""The tree of a checkpoint as a list of entries with types and sizes.

Works on trees as they are written, not decoded, of any origin: values that are nested too deeply or
occur twice are reported, not followed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from helios.core.sharded_tensors import is_deferred
from helios.storage import codec
from helios.storage.codes import TAG
from helios.storage.placeholders import Unknown

_MAX_DEPTH = 50
_MAX_TEXT = 200
_MARKED = ("pairs", "items")
_WITH_CONTENT = {"tensor": "value", "codes": "value", "object": "fields"}
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class Node:
    """One value of a tree.

    Attributes:
        keys: the way to it from the root.
        kind: ``"group"`` for what holds others, ``"tensor"`` or ``"value"``.
        text: a value in words; what kind of group; of a tensor, whose memory it shares.
        dtype: of a tensor, such as ``"float32"``.
        shape: of a tensor.
        num_tensors: how many tensors lie in it.
        num_bytes: how many bytes they have in memory, shared ones once.
    """

    keys: tuple[str, ...]
    kind: str
    text: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0

    @property
    def path(self) -> str:
        """The way to it, with dots."""
        return ".".join(self.keys)


def outline(tree: Any) -> list[Node]:
    """Return the entries of a tree, each group before its members; the root comes first.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    return list(_Outline().visit((), tree))


def text_of(value: Any) -> str:
    """Return a plain value as text, shortened if it is long."""
    text = _Words().repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def find_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by path, in the order of the file.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    found: dict[str, torch.Tensor] = {}
    # From the end of the list, so that the next one is the first of its group.
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        value = _content(value)
        if isinstance(value, torch.Tensor):
            found[".".join(keys)] = value
        elif len(keys) < _MAX_DEPTH and not _is_encoded_value(value):
            waiting += [((*keys, key), item) for key, item in reversed(_members(value) or [])]
    return found


class _Words(reprlib.Repr):
    """Formats values briefly, whatever their size: a file may contain endlessly nested lists."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = _MAX_TEXT
        self.maxlist = self.maxtuple = self.maxdict = 12

    def repr_instance(self, x: Any, level: int) -> str:
        """Return an object as text; for a tensor, its type and shape."""
        if isinstance(x, torch.Tensor):
            return f"{x.dtype} {list(x.shape)}"
        return super().repr_instance(x, level)


class _Outline:
    """One walk over a tree."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._storages: dict[int, str] = {}

    def visit(self, keys: tuple[str, ...], value: Any) -> Iterator[Node]:
        value = _content(value)
        if isinstance(value, torch.Tensor):
            yield self._tensor(keys, value)
            return
        members = None if _is_encoded_value(value) else _members(value)
        if members is None:
            yield Node(keys, "value", _words(value))
        elif value and id(value) in self._seen:
            yield Node(keys, "value", f"the same as {self._seen[id(value)]}")
        elif len(keys) >= _MAX_DEPTH:
            yield Node(keys, "value", "nested too deeply to be shown")
        else:
            yield from self._group(keys, value, members)

    def _group(
        self, keys: tuple[str, ...], value: Any, members: Iterable[tuple[str, Any]]
    ) -> Iterator[Node]:
        self._seen[id(value)] = ".".join(keys) or "the root"
        group = Node(keys, "group", _kind(value))
        inner: list[Node] = []
        for key, item in members:
            nodes = list(self.visit((*keys, key), item))
            group.num_tensors += nodes[0].num_tensors
            group.num_bytes += nodes[0].num_bytes
            inner += nodes
        yield group
        yield from inner

    def _tensor(self, keys: tuple[str, ...], tensor: torch.Tensor) -> Node:
        node = Node(keys, "tensor", dtype=str(tensor.dtype).removeprefix("torch."))
        node.shape = tuple(tensor.shape)
        node.num_tensors = 1
        size = tensor.numel() * tensor.element_size()
        if is_deferred(tensor):
            node.num_bytes = size
            return node
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            node.text = f"{tensor.layout} on {tensor.device}".removeprefix("torch.")
            return node
        place = tensor.untyped_storage().data_ptr()
        if size and place in self._storages:
            node.text = f"shares memory with {self._storages[place]}"
            return node
        self._storages[place] = node.path
        node.num_bytes = size
        return node


def _content(value: Any) -> Any:
    """Return what a code stands for, if that is in it as it is."""
    tag = value.get(TAG) if isinstance(value, Mapping) else None
    return value.get(_WITH_CONTENT.get(tag), value) if isinstance(tag, str) else value


def _is_encoded_value(value: Any) -> bool:
    is_encoded = isinstance(value, Mapping) and TAG in value
    return is_encoded and not any(isinstance(value.get(mark), list) for mark in _MARKED)


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a group holds, by name; ``None`` for what is no group."""
    if isinstance(value, Mapping):
        return _members_of_mapping(value)
    if isinstance(value, Unknown):
        # The state of an object is a dictionary, of which the members are what one looks for.
        return _members(value.parts[0]) if _is_state(value) else None
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        is_flat = all(isinstance(item, bool | int | float | str | None) for item in value)
        return None if is_flat else [(str(n), item) for n, item in enumerate(value)]
    return None


def _members_of_mapping(value: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    if TAG not in value:
        return [(_name(key), item) for key, item in value.items()]
    mark = next(mark for mark in _MARKED if isinstance(value.get(mark), list))
    if mark == "items":
        return [(str(number), item) for number, item in enumerate(value[mark])]
    pairs = [pair for pair in value[mark] if isinstance(pair, list | tuple) and len(pair) == 2]
    return [(_name(key), item) for key, item in pairs]


def _is_state(value: Unknown) -> bool:
    return len(value.parts) == 1 and isinstance(value.parts[0], dict)


def _name(key: Any) -> str:
    if isinstance(key, Unknown) and len(key.parts) == 1:
        return str(key.parts[0])[:_MAX_TEXT]
    return key[:_MAX_TEXT] if isinstance(key, str) else text_of(key)


def _kind(value: Any) -> str:
    if isinstance(value, Unknown):
        return value.name
    return str(value[TAG]) if isinstance(value, Mapping) and TAG in value else type(value).__name__


def _words(value: Any) -> str:
    if isinstance(value, Unknown):
        parts = ", ".join(text_of(part) for part in value.parts[:3])
        return f"{value.name}({parts})"[:_MAX_TEXT]
    if not (isinstance(value, Mapping) and TAG in value):
        return text_of(value)
    if value[TAG] == "ref":
        return f"the same as {str(value.get('name')).removeprefix('.')}"[:_MAX_TEXT]
    try:
        return text_of(codec.decode(value))
    except Exception:
        # A type of the user's, or what no encoder made.
        return f"{value.get('type', value[TAG])} {value.get('name', '')}".strip()[:_MAX_TEXT]


def section(tree: Any, key: str) -> dict[str, Any]:
    """Return the values under one key of a tree: plain values unchanged, others as text.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
        key: a key of its root; nothing is returned if it is missing.
    """
    found = dict(_members(tree) or ()).get(key)
    return {
        name: value if type(value) in _PLAIN else text_of(value)
        for name, value in _members(found) or ()
    }
