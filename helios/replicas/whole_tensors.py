"""Replaces sharded tensors in a state by whole ones, which one process receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helios.core.sharded_tensors import replace_sharded, whole_of
from helios.distributed.process_groups import collective


def join_shards(tree: Any, *, keeps: bool) -> Any:
    """Return a tree of dicts, lists and tuples with whole tensors; all processes call it alike.

    Tensors are gathered one by one. What occurs twice in the tree occurs twice in the result.

    Args:
        tree: values of any kind; it is not changed, and returned itself if nothing is sharded.
        keeps: whether this process keeps whole tensors, in host memory; others get placeholders
            on the meta device.
    """

    def gather(_: str, value: Any) -> Tensor:
        with collective("join_shards"):
            whole = whole_of(value.detach())
        if not keeps:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return whole.cpu()

    return replace_sharded(tree, gather)
