"""The tensors of a checkpoint by path, and its plain values as far as tools show them.

Works on trees as they are written, not decoded, of any origin: a group that is nested too deeply or
occurs again is not followed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from helios.core.sharded_tensors import is_deferred
from helios.storage.codes import TAG
from helios.storage.placeholders import Unknown

_MAX_DEPTH = 50
_WITH_CONTENT = {"tensor": "value", "codes": "value", "object": "fields"}
_PLAIN = (type(None), bool, int, float, str)


@dataclass
class TensorEntry:
    """A tensor of a tree.

    Attributes:
        path: the way to it, with dots.
        dtype: its type, such as ``"float32"``.
        shape: its shape.
        num_bytes: how many bytes it has in memory that no tensor before it has.
        note: whose memory it shares; its layout and device if they are unusual.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int = 0
    note: str = ""


def list_tensors(tree: Any) -> list[TensorEntry]:
    """Return what is known of the tensors of a tree, without reading them.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    storages: dict[int, str] = {}
    found = []
    for path, tensor in find_tensors(tree).items():
        entry = TensorEntry(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        size = tensor.numel() * tensor.element_size()
        if is_deferred(tensor):
            entry.num_bytes = size
        elif tensor.layout is not torch.strided or tensor.device.type == "meta":
            entry.note = f"{tensor.layout} on {tensor.device}".removeprefix("torch.")
        elif size:
            owner = storages.setdefault(tensor.untyped_storage().data_ptr(), path)
            entry.num_bytes = size if owner == path else 0
            entry.note = "" if owner == path else f"shares memory with {owner}"
        found.append(entry)
    return found


def find_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by path, in the order of the file.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # From the end of the list, so that the next one is the first of its group.
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        value = _content(value)
        if isinstance(value, torch.Tensor):
            found[".".join(keys)] = value
        elif len(keys) < _MAX_DEPTH and id(value) not in seen:
            inside = members(value) or []
            if inside:
                seen.add(id(value))
            waiting += [((*keys, key), item) for key, item in reversed(inside)]
    return found


def section(tree: Any, key: str) -> dict[str, Any]:
    """Return the values under one key of a tree: plain values unchanged, others as text.

    Args:
        tree: what :func:`helios.storage.codec.read_structure` returned.
        key: a key of its root; nothing is returned if it is missing.
    """
    found = dict(members(tree) or ()).get(key)
    return {
        name: value if type(value) in _PLAIN else _WORDS.repr(value)
        for name, value in members(found) or ()
    }


class _Words(reprlib.Repr):
    """Formats values briefly, whatever their size: a file may contain endlessly nested lists."""

    def repr_instance(self, x: Any, level: int) -> str:
        """Return a placeholder as its class with its arguments, and other objects as their class.

        Args:
            x: the object.
            level: how many levels of it may be shown.
        """
        if isinstance(x, Unknown):
            return f"{x.name}{self.repr1(x.parts, level - 1) if level > 0 else '(...)'}"
        return repr(x) if isinstance(x, _PLAIN) else f"<{type(x).__qualname__}>"


_WORDS = _Words()
_WORDS.maxlevel, _WORDS.maxdict, _WORDS.maxstring = 3, 12, 200


def _content(value: Any) -> Any:
    """Return what a code stands for, if that is in it as it is."""
    tag = value.get(TAG) if isinstance(value, Mapping) else None
    return value.get(_WITH_CONTENT.get(tag), value) if isinstance(tag, str) else value


def members(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a group holds, by name; ``None`` for what is no group."""
    if isinstance(value, Unknown) and len(value.parts) == 1 and isinstance(value.parts[0], dict):
        # The state of an object is a dictionary, of which the members are what one looks for.
        value = value.parts[0]
    if isinstance(value, Mapping) and TAG in value:
        if isinstance(pairs := value.get("pairs"), list):
            parts = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
            return [(_name(key), item) for key, item in parts]
        value = value.get("items")
    if isinstance(value, Mapping):
        return [(_name(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        return [(str(number), item) for number, item in enumerate(value)]
    return None


def _name(key: Any) -> str:
    return key if isinstance(key, str) else _WORDS.repr(key)
