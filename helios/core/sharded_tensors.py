"""Tensors of which each process holds some rows, without importing FSDP.

While a checkpoint is loaded, a sharded tensor may be deferred: a tensor on the meta device, with
the full shape, that refers to the place of its rows.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, final

import torch
from torch import Tensor

from helios.errors import StateError

_MODULE = "torch.distributed.tensor"
_SOURCE = "_helios_rows"


class RowShare(NamedTuple):
    """The rows of each sharded tensor that a process holds.

    Attributes:
        rank: the process.
        num_processes: the number of processes.
        prefixes: the prefixes of names of tensors that it reads by rows from a checkpoint.
    """

    rank: int
    num_processes: int
    prefixes: tuple[str, ...] = ("model.",)

    def rows(self, count: int) -> tuple[int, int]:
        """Return the first row and the end of this process's part of a number of rows."""
        size = -(-count // self.num_processes)
        return min(self.rank * size, count), min((self.rank + 1) * size, count)


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The rows of a tensor that this process holds.

    Attributes:
        tensor: the rows.
        first: the first of them.
        shape: the shape of the whole.
    """

    tensor: Tensor
    first: int
    shape: tuple[int, ...]


class RowSource(Protocol):
    """The place of the rows of a deferred tensor.

    Attributes:
        name: the path of the tensor in its checkpoint.
        shape: the shape of the whole tensor.
    """

    name: str
    shape: torch.Size

    def read_rows(self, first: int, count: int) -> Tensor:
        """Return rows on the CPU, in memory of their own.

        Raises:
            DamagedCheckpointError: if they have changed since they were written.
        """
        ...


def is_sharded(value: object) -> TypeGuard[Any]:
    """Return whether a value is a tensor of which this process holds a shard."""
    # No such tensor exists before the module that defines it was imported.
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def whole_of(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one, a collective call; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()  # type: ignore[no-any-return]


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor as one of which this process holds a shard; nothing is sent.

    Of a deferred tensor, only these rows are read.

    Args:
        whole: the same on all processes.
        like: a tensor of the same shape; if it is not sharded, ``whole`` is returned.
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    module, mesh = sys.modules[_MODULE], like.device_mesh
    found: Tensor
    if is_deferred(whole):
        source: RowSource = vars(whole)[_SOURCE]
        first, end = RowShare(mesh.get_local_rank(), mesh.size()).rows(source.shape[0])
        own = source.read_rows(first, end - first).to(like.device)
        sizes = {"shape": like.shape, "stride": like.stride()}
        found = module.DTensor.from_local(own, mesh, like.placements, run_check=False, **sizes)
        return found
    with torch.no_grad():
        found = module.distribute_tensor(whole, mesh, like.placements, src_data_rank=None)
    return found


def local_of(tensor: Tensor) -> Tensor:
    """Return the shard of this process; of a tensor that is not sharded, the tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that need its values."""

_FORMS = frozenset(
    {
        *("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_pinned", "get_device"),
        *("__len__", "__hash__"),
    }
)
"""Methods of a tensor that do not need its values."""


@final
class _Deferred(Tensor):
    """Refuses what needs its values; without values, an operation would change nothing."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, getter = func.__name__, getattr(func, "__self__", func)
        if name == "__deepcopy__":
            own = args[0]
            return make_deferred_tensor(own.shape, own.dtype, vars(own)[_SOURCE])
        if name == "__repr__":
            return f"deferred({vars(args[0])[_SOURCE].name!r}, shape={tuple(args[0].shape)})"
        is_form = getter.__name__ not in _VALUES if name == "__get__" else name in _FORMS
        if not is_form:
            used = (*args, *(kwargs or {}).values())
            names = [vars(part)[_SOURCE].name for part in used if is_deferred(part)]
            raise StateError(
                f"{', '.join(names) or 'A tensor'} of a sharded checkpoint must be read before it "
                f"is used ({name}): each process reads its rows when a network or an optimizer "
                "loads it. Load it with their load_state_dict, or use "
                "helios.core.sharded_tensors: value_of(tensor) reads it whole, "
                "cut_like(tensor, parameter) the rows of a sharded parameter."
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def make_deferred_tensor(shape: torch.Size, dtype: torch.dtype, source: RowSource) -> Tensor:
    """Return a tensor without values that stands for one whose rows can be read."""
    deferred = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Deferred)
    vars(deferred)[_SOURCE] = source
    return deferred


def is_deferred(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of :func:`make_deferred_tensor`."""
    return isinstance(value, _Deferred)


def value_of(tensor: Tensor) -> Tensor:
    """Return a tensor; a deferred one is read in full, on the CPU."""
    if not is_deferred(tensor):
        return tensor
    source: RowSource = vars(tensor)[_SOURCE]
    return source.read_rows(0, source.shape[0])


def replace_sharded(tree: Any, replace: Callable[[str, Any], Any], *, root: str = "") -> Any:
    """Return a tree of dicts, lists and tuples in which each sharded tensor is replaced.

    Shared values of the tree are shared in the result.

    Args:
        tree: values of any kind; it is not changed, and returned itself if nothing is sharded.
        replace: called with the path of a sharded tensor, and the tensor; in the same order in all
            processes with equal trees.
        root: the path to the tree.
    """
    return _replace_in(root, tree, replace, {})


def _replace_in(
    path: str, value: Any, replace: Callable[[str, Any], Any], done: dict[int, tuple[Any, Any]]
) -> Any:
    if id(value) in done:
        return done[id(value)][1]
    found = value
    if is_sharded(value):
        found = replace(path, value)
    elif isinstance(value, dict):
        parts = {k: _replace_in(f"{path}.{k}", each, replace, done) for k, each in value.items()}
        if any(parts[key] is not value[key] for key in parts):
            # Of the same kind, with its attributes.
            found = copy.copy(value)
            found.update(parts)
    elif type(value) in (list, tuple):
        members = [_replace_in(f"{path}.{n}", each, replace, done) for n, each in enumerate(value)]
        if any(new is not old for new, old in zip(members, value, strict=True)):
            found = type(value)(members)
    else:
        return value
    # A value is kept with its replacement, because an id is unique only while it exists.
    done[id(value)] = (value, found)
    return found
