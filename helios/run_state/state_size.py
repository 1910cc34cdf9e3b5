"""Computes the size of a model's state before the first step.

Optimizers create their state in their first step. To know its size earlier, a copy of each makes a
step on the ``meta`` device, where tensors have shapes and no content.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from helios.core.sharded_tensors import is_sharded, local_of
from helios.core.utils import parameters_of

# State of an optimizer that cannot be tried: two tensors per parameter, as in Adam.
_USUAL_COPIES = 2
_SWITCHES = ("foreach", "fused", "capturable")


def storage_sizes(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[int]:
    """Return the bytes of each storage that a checkpoint of these parts will contain.

    Args:
        modules: networks, on any device.
        optimizers: optimizers, whether they have made a step or not.
    """
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    dense = [part for tensor in held for part in _stored_tensors(tensor)]
    storages = dict(map(_storage_of, dense))
    sizes = [size for size in storages.values() if size]
    for optimizer in optimizers:
        sizes += _sizes_of_state(optimizer)
    return sizes


def shard_sizes(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[int]:
    """Return the bytes of each storage with the shards that this process holds, of the same parts.

    Of an optimizer that cannot be tried, each parameter is taken to get two tensors.
    """
    shards = [part for module in modules for part in module.parameters() if is_sharded(part)]
    sizes = [local_of(part).untyped_storage().nbytes() for part in shards]
    for optimizer in optimizers:
        held = [part for state in optimizer.state.values() for part in _tensors_in(state)]
        if held:
            sizes += [local_of(part).nbytes for part in held if is_sharded(part)]
        else:
            sizes += _sizes_of_shards(optimizer)
    return [size for size in sizes if size]


def _sizes_of_shards(optimizer: Optimizer) -> list[int]:
    """Return the bytes of what a first step would add to the shards of parameters."""
    state = _try_step(optimizer, of_shards=True)
    if state is None:
        mine = [part for part in parameters_of(optimizer) if is_sharded(part)]
        return [local_of(part).nbytes for part in mine for _ in range(_USUAL_COPIES)]
    return [
        tensor.nbytes
        for parameter, part in state.items()
        for tensor in _tensors_in(part)
        if tensor.shape == parameter.shape
    ]


def _stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors whose storages hold this one's values.

    A lazy parameter has none before its first step, a sparse tensor has those of its parts.
    """
    if is_lazy(tensor):
        return []
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        # Also if it is not coalesced.
        return [tensor._indices(), tensor._values()]  # noqa: SLF001 - PyTorch has no public way
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _storage_of(tensor: Tensor) -> tuple[tuple[str, int], int]:
    """Return the address of a tensor's storage, and its bytes; of a sharded one, of the whole."""
    storage, place = local_of(tensor).untyped_storage(), str(tensor.device)
    size = tensor.nbytes if is_sharded(tensor) else storage.nbytes()
    return (place, storage.data_ptr()), size


def _sizes_of_state(optimizer: Optimizer) -> list[int]:
    state: Any = optimizer.state
    if not state:
        state = _try_step(optimizer)
    if state is None:
        dense = [part for part in parameters_of(optimizer) if not is_lazy(part)]
        return [part.nbytes for part in dense for _ in range(_USUAL_COPIES)]
    return [tensor.nbytes for part in state.values() for tensor in _tensors_in(part)]


def _tensors_in(part: Any) -> Iterator[Tensor]:
    for value in part.values() if isinstance(part, dict) else ():
        if isinstance(value, Tensor) and value.nbytes:
            yield value


def _try_step(optimizer: Optimizer, *, of_shards: bool = False) -> Any:
    """Return the state that a first step would create, or ``None`` if it cannot be tried.

    Args:
        optimizer: the optimizer, which is not changed.
        of_shards: whether its parameters are taken to be what this process has of them.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        # A user's step may do anything else.
        return None
    try:
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        groups = optimizer.param_groups
        twin.param_groups = [_on_meta(group, of_shards=of_shards) for group in groups]
        with torch.no_grad():
            type(optimizer).step(twin)
    except Exception:  # a few optimizers read numbers from tensors, which have none on meta
        return None
    return twin.state


def _on_meta(group: dict[str, Any], *, of_shards: bool) -> dict[str, Any]:
    parameters = []
    for whole in group["params"]:
        parameter = local_of(whole.detach()) if of_shards else whole
        twin = nn.Parameter(torch.empty_like(parameter, device="meta"))
        twin.grad = torch.empty_like(twin)
        parameters.append(twin)
    plain = {name: False for name in _SWITCHES if name in group}
    return {**group, **plain, "params": parameters}
