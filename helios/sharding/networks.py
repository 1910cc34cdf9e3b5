"""Shards the networks of a model over the processes, after ``setup`` has built them whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.parameters import parameters_of
from helios.core.sharded_tensors import RowShare, is_deferred, is_sharded, read_deferred
from helios.errors import ArgumentTypeError, UsageError
from helios.replicas.replicas import Replicas
from helios.sharding.elementwise import check_optimizer
from helios.sharding.fsdp_adapter import as_sharded, cut, make_mesh, require_fsdp, shard_unit
from helios.sharding.sharded_gradients import ShardedGradients

_LOGGER = logging.getLogger(__name__)

LEAST_ELEMENTS = 1 << 20
"""Parameters of a module that is a unit without being named."""


def shard_networks(
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    named: Sequence[nn.Module] | None,
    replicas: Replicas,
) -> ShardedGradients:
    """Shard all networks, and let the optimizers have the sharded parameters.

    Args:
        networks: the networks by path.
        optimizers: the optimizers by path; none of them has been stepped.
        named: the modules that are units, besides the networks; ``None`` for the default ones.
        replicas: the replicas of the run.

    Returns:
        What collects their gradients.

    Raises:
        ArgumentTypeError: if ``named`` holds something else than modules of the networks.
        UsageError: if PyTorch, a network or an optimizer does not allow sharding.
    """
    require_fsdp()
    networks = {path: network for path, network in networks.items() if [*network.parameters()]}
    for path, network in networks.items():
        _check_network(path, network)
    for path, optimizer in optimizers.items():
        check_optimizer(path, optimizer)
    modules = _find_units(networks, named)
    _check_units(modules)
    old = _parameters_of(networks)
    mesh = make_mesh(replicas.device, replicas.num_processes)
    # Inner units first: an outer one takes what they have left.
    units = {name: shard_unit(modules[name], mesh) for name in reversed(modules)}
    new = _parameters_of(networks)
    _exchange(optimizers, {id(whole): new[name] for name, whole in old.items()})
    for network in networks.values():
        network.register_load_state_dict_pre_hook(_cut_state)
    for optimizer in optimizers.values():
        optimizer.register_load_state_dict_pre_hook(_cut_optimizer_state)
    _LOGGER.info(
        "Parameters are sharded over %d processes, in the units %s.",
        replicas.num_processes,
        ", ".join(modules),
    )
    return ShardedGradients(replicas, units, _once(new))


def _check_network(path: str, network: nn.Module) -> None:
    for name, module in network.named_modules():
        kind = type(module)
        if kind.__module__.startswith(("torch.nn.parallel", "torch._dynamo")):
            raise UsageError(
                f'Trainer(sharding="full") needs networks that are not wrapped, but '
                f"{'.'.join(filter(None, (path, name)))} is a {kind.__name__}. Assign the module "
                'that it wraps, or use sharding="none".'
            )
    for name, parameter in network.named_parameters():
        if type(parameter) is not nn.Parameter or not parameter.dtype.is_floating_point:
            raise UsageError(
                f'Trainer(sharding="full") needs dense floating-point parameters, but '
                f"{path}.{name} is a {type(parameter).__name__} of {parameter.dtype}. Make it a "
                'buffer, or use sharding="none".'
            )


def _find_units(
    networks: Mapping[str, nn.Module], named: Sequence[nn.Module] | None
) -> dict[str, nn.Module]:
    """Return the units by name: each network, before the modules inside of it."""
    names = {
        id(module): (f"{path}.{name}" if name else path, module)
        for path, network in networks.items()
        for name, module in network.named_modules()
    }
    if named is None:
        inner = {id(part) for each in networks.values() for part in _default_units(each)}
    else:
        for module in named:
            if id(module) not in names:
                raise ArgumentTypeError(
                    "Model.shard() must return modules of the model's networks, got "
                    f"{type(module).__name__}. Return e.g. list(self.net.layers)."
                )
        inner = set(map(id, named))
    inner |= set(map(id, networks.values()))
    return {name: module for key, (name, module) in names.items() if key in inner}


def _default_units(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and the members of lists of modules, that are large enough.

    A module that shares a parameter with others is left to the network.
    """
    owners: dict[int, int] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    candidates = [*network.children()]
    for module in network.modules():
        if isinstance(module, nn.ModuleList):
            candidates += module
    for module in candidates:
        inside: dict[int, int] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        is_large = sum(parameter.numel() for parameter in module.parameters()) >= LEAST_ELEMENTS
        is_alone = all(owners[key] == count for key, count in inside.items())
        is_called = type(module).forward is not nn.Module.forward
        if is_large and is_alone and is_called:
            yield module


def _check_units(units: Mapping[str, nn.Module]) -> None:
    """Check that each tied parameter, and each type, is in one unit."""
    homes: dict[int, str] = {}
    for name, unit in units.items():
        others = {id(part) for key, part in units.items() if key != name}
        types = set()
        for part in _own_modules(unit, others):
            for key, parameter in part.named_parameters(recurse=False):
                types.add(parameter.dtype)
                home = homes.setdefault(id(parameter), name)
                if home != name:
                    raise UsageError(
                        f"A tied parameter must be in one unit of a sharded model, but {key!r} is "
                        f"in {home} and in {name}. Leave one of them out of Model.shard()."
                    )
        if len(types) > 1:
            shown = " and ".join(sorted(map(str, types)))
            raise UsageError(
                f"The parameters of a unit of a sharded model must have one type, but {name} has "
                f"{shown}. Return a module for each type from Model.shard()."
            )


def _own_modules(module: nn.Module, others: set[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from _own_modules(child, others)


def _parameters_of(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all parameters, a tied one under each of its names."""
    return {
        f"{path}.{name}": parameter
        for path, network in networks.items()
        for name, parameter in network.named_parameters(remove_duplicate=False)
    }


def _once(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(id(parameter), name)
    return {name: parameters[name] for name in first.values()}


def _exchange(optimizers: Mapping[str, Optimizer], new: Mapping[int, Tensor]) -> None:
    """Put the sharded parameters in the places of the whole ones."""
    for path, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            strange = [place for place, each in enumerate(group["params"]) if id(each) not in new]
            if strange:
                raise UsageError(
                    f"{path} must update parameters of networks only if they are sharded, but "
                    f"parameter {strange[0]} is in none. Put it in a module."
                )
            group["params"] = [new[id(each)] for each in group["params"]]


def _cut_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors of a state by this process's shards, before they are loaded."""
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        saved = state.get(name)
        if is_sharded(parameter) and isinstance(saved, Tensor) and not is_sharded(saved):
            if saved.shape == parameter.shape:
                state[name] = _cut(saved, parameter)


def _cut_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with this process's shards of what has the shape of its parameter."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        if number in found and is_sharded(parameter):
            found[number] = {
                name: _cut(value, parameter) if _fits(value, parameter) else value
                for name, value in found[number].items()
            }
    return {**state, "state": found}


def _cut(value: Tensor, like: Any) -> Tensor:
    """Return this process's shard of a tensor, of which no more is read if it is deferred."""
    if not is_deferred(value):
        return cut(value, like)
    share = RowShare(like.device_mesh.get_local_rank(), like.device_mesh.size())
    return as_sharded(read_deferred(value, share).to(like.device), like)


def _fits(value: object, parameter: Tensor) -> bool:
    is_whole = isinstance(value, Tensor) and not is_sharded(value)
    return is_whole and value.shape == parameter.shape and value.dim() > 0
