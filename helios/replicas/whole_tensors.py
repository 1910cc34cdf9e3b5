"""Replaces sharded tensors in a state by whole ones, which one process receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helios.core.sharded_tensors import is_sharded, whole_of
from helios.distributed.process_groups import collective


def join_shards(tree: Any, *, keeps: bool) -> Any:
    """Return a tree of dicts, lists and tuples with whole tensors; all processes call it alike.

    Tensors are gathered one by one. What occurs twice in the tree occurs twice in the result.

    Args:
        tree: values of any kind; it is not changed, and returned itself if nothing is sharded.
        keeps: whether this process keeps whole tensors, in host memory; others get placeholders
            on the meta device.
    """
    return _Joining(keeps=keeps).join(tree)


class _Joining:
    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._done: dict[int, tuple[Any, Any]] = {}

    def join(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        found = value
        if is_sharded(value):
            found = self._gather(value)
        elif isinstance(value, Mapping):
            parts = {key: self.join(part) for key, part in value.items()}
            if any(parts[key] is not value[key] for key in parts):
                found = _like(value, parts)
        elif type(value) in (list, tuple):
            members = [self.join(part) for part in value]
            if any(new is not old for new, old in zip(members, value, strict=True)):
                found = type(value)(members)
        else:
            return value
        self._done[id(value)] = (value, found)
        return found

    def _gather(self, value: Any) -> Tensor:
        with collective("join_shards"):
            whole = whole_of(value.detach())
        if not self._keeps:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return whole.cpu()


def _like(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind with other values, and its attributes."""
    found = type(value)(parts)
    vars_of = getattr(value, "__dict__", None)
    if vars_of:
        vars(found).update(vars_of)
    return found
