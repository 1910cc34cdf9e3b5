"""Restricts the initializers of modules: what one reaches must not depend on what is there yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.sharding.values_of_setup import memory_of


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module holds itself."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


@final
class Reach:
    """Restricts an initializer to its module and what is inside of it, and in the same group.

    Args:
        paths: the paths of modules by identity.
        modules: all modules of the networks.
    """

    def __init__(self, paths: Mapping[int, str], modules: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        self._holders: dict[int, set[int]] = {}
        # Kept, so that nothing else gets the identity of what an initializer replaces.
        self._storages: list[Any] = []
        for module in modules:
            for name, tensor in own_tensors(module).items():
                if not is_sharded(tensor):
                    memory = memory_of(tensor)
                    self._names.setdefault(memory, f"{paths[id(module)]}.{name}")
                    self._holders.setdefault(memory, set()).add(id(module))
                    self._storages.append(tensor.untyped_storage())
        self._paths = paths

    def of(self, module: nn.Module, group: set[int]) -> TorchDispatchMode:
        """Return the mode in which the initializer of a module runs."""
        inside = {id(part) for part in module.modules()} & group
        return _OneModule(self._paths[id(module)], self._names, self._holders, inside)


@final
class _OneModule(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self,
        path: str,
        names: Mapping[int, str],
        holders: Mapping[int, set[int]],
        inside: set[int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._names, self._holders, self._inside = path, names, holders, inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._check(each)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: Tensor) -> None:
        if is_sharded(tensor):
            self._refuse("a parameter of another unit")
        memory = memory_of(tensor) if tensor.layout is torch.strided else 0
        if memory in self._names and not self._holders[memory] & self._inside:
            self._refuse(self._names[memory])

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(
            'Trainer(init="keyed") needs initializers that use their own module only, and what is '
            f"inside of it in the same unit, but that of {self._path} uses {name}. Initialize each "
            "of them in Model.init_unit, or name units in Model.shard() that hold both."
        )
