"""What ``state_dict`` of torch leaves out: frozen parameters, modes, open gradients, loose tensors.

Names are those of the module itself, whether it is compiled or not, so that a checkpoint of the
one loads into the other.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.model.values import storage_of
from helios.model.walk import COMPILED, Found
from helios.protocols import Stateful


def bare_name(name: str) -> str:
    """Return a name inside a module as it is without ``torch.compile``.

    Example:
        >>> bare_name("_orig_mod.layer._orig_mod.weight")
        'layer.weight'
    """
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def state_of(value: Stateful) -> dict[str, Any]:
    """Return the state of an object; that of a module under bare names."""
    state = value.state_dict()
    if isinstance(value, nn.Module) and any(COMPILED in name for name in state):
        versions = {bare_name(name): entry for name, entry in _versions(state).items()}
        return _module_state({bare_name(name): part for name, part in state.items()}, versions)
    return state


def load_state(value: Stateful, state: dict[str, Any]) -> None:
    """Give an object its state, of which it may keep no part: the state stays as it is."""
    if not isinstance(value, nn.Module):
        # Optimizers and schedulers go on working in the very tensors and lists that they load.
        value.load_state_dict(copy.deepcopy(state))
        return
    names = {bare_name(name): name for name in value.state_dict()}
    saved = _versions(state)
    versions = {
        name: saved[bare_name(name)]
        for name, _ in value.named_modules()
        if bare_name(name) in saved
    }
    entries = {
        names.get(name, name): part if isinstance(part, Tensor) else copy.deepcopy(part)
        for name, part in state.items()
    }
    value.load_state_dict(_module_state(entries, versions))


def _versions(state: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of the classes that wrote a module's state; torch migrates by them."""
    versions = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    return dict(versions or {})


def _module_state(entries: dict[str, Any], versions: dict[str, Any]) -> OrderedDict[str, Any]:
    state = OrderedDict(entries)
    if versions:
        vars(state)["_metadata"] = OrderedDict(versions)
    return state


def modes_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules by bare name, the module itself under the empty name."""
    return {bare_name(name): part for name, part in module.named_modules()}


@dataclass(frozen=True)
class Parameters:
    """The tensors that training moves, each once.

    Attributes:
        of_modules: parameters by module path and name.
        loose: those in no discovered module: ``nn.Parameter`` among the attributes, by path, and
            what a discovered optimizer moves besides, as ``<optimizer>.<group>.<index>`` where no
            attribute holds it.
        leaves: leaf tensors among the attributes, by path.
    """

    of_modules: dict[str, dict[str, Tensor]]
    loose: dict[str, Tensor]
    leaves: dict[str, Tensor]

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors that may have a gradient; those in no module under ``""``."""
        return {**self.of_modules, "": {**self.leaves, **self.loose}}


def parameters_of(found: Found) -> Parameters:
    """Sort the tensors of what was found."""
    seen: set[int] = set()
    of_modules: dict[str, dict[str, Tensor]] = {}
    for path, module in found.modules().items():
        table = {bare_name(name): tensor for name, tensor in module.named_parameters()}
        of_modules[path] = {name: part for name, part in table.items() if id(part) not in seen}
        seen.update(map(id, table.values()))
    leaves = {path: leaf for path, leaf in found.leaves().items() if id(leaf) not in seen}
    return Parameters(of_modules, _loose(found, leaves, seen), leaves)


def _loose(found: Found, leaves: dict[str, Tensor], seen: set[int]) -> dict[str, Tensor]:
    paths = {id(leaf): path for path, leaf in reversed(leaves.items())}
    candidates = [place for place in leaves.items() if isinstance(place[1], nn.Parameter)]
    for path, part in found.objects.items():
        if isinstance(part, Optimizer):
            candidates += _members(path, part)
    loose: dict[str, Tensor] = {}
    for place, tensor in candidates:
        if id(tensor) not in seen:
            loose[paths.get(id(tensor), place)] = tensor
    return loose


def _members(path: str, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f"{path}.{number}.{index}", tensor)
        for number, group in enumerate(optimizer.param_groups)
        for index, tensor in enumerate(group["params"])
    ]


def storages_of(found: Found, parameters: Parameters) -> dict[int, str]:
    """Return the names of all parameters, buffers and loose tensors, by address of the storage."""
    named = {
        f"{path}.{name}": tensor
        for path, table in (*parameters.of_modules.items(), ("", parameters.loose))
        for name, tensor in table.items()
    }
    for path, module in found.modules().items():
        named |= {f"{path}.{bare_name(name)}": part for name, part in module.named_buffers()}
    storages = {storage_of(tensor): name for name, tensor in reversed(named.items())}
    storages.pop(0, None)
    return storages


def flags_of(found: Found, parameters: Parameters) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters and of submodules in evaluation mode."""
    modules = found.modules()
    tables = {**parameters.of_modules, "": parameters.loose}
    return {
        path: {
            "frozen": [name for name, tensor in table.items() if not tensor.requires_grad],
            "eval": [name for name, part in modes_of(modules[path]).items() if not part.training]
            if path
            else [],
        }
        for path, table in tables.items()
    }


def load_flags(
    flags: dict[str, dict[str, list[str]]], found: Found, parameters: Parameters
) -> None:
    """Freeze and unfreeze parameters and set modes as :func:`flags_of` found them."""
    for path, table in {**parameters.of_modules, "": parameters.loose}.items():
        frozen = set(flags[path]["frozen"])
        for name, tensor in table.items():
            if tensor.requires_grad == (name in frozen):
                tensor.requires_grad_(name not in frozen)
    for path, module in found.modules().items():
        resting = set(flags[path]["eval"])
        for name, part in module.named_modules():
            part.training = bare_name(name) not in resting


def grads_of(parameters: Parameters) -> dict[str, dict[str, Tensor]]:
    """Return the open gradients, where there are any."""
    grads = {
        path: {name: part.grad for name, part in table.items() if part.grad is not None}
        for path, table in parameters.tables().items()
    }
    return {path: table for path, table in grads.items() if table}


def load_grads(grads: dict[str, dict[str, Tensor]], parameters: Parameters) -> None:
    """Set gradients as :func:`grads_of` found them; a parameter without one gets none."""
    for path, table in parameters.tables().items():
        saved = grads.get(path, {})
        for name, tensor in table.items():
            grad = saved.get(name)
            tensor.grad = None if grad is None else grad.detach().to(tensor.device, copy=True)
