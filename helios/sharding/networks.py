"""Shards the networks of a model over the processes, after ``setup`` has built them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from helios.core.sharded_tensors import cut_like, is_sharded
from helios.core.utils import parameters_of
from helios.replicas.replicas import Replicas
from helios.sharding.fsdp_adapter import ShardedUnit, make_mesh, require_fsdp, shard_unit
from helios.sharding.sharded_gradients import ShardedGradients
from helios.sharding.units import modules_of_units

_LOGGER = logging.getLogger(__name__)


def shard_networks(
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    modules: Mapping[str, nn.Module],
    replicas: Replicas,
    prepare: Callable[[Sequence[nn.Module]], None] | None,
) -> ShardedGradients:
    """Shard all networks, and give the optimizers the sharded parameters.

    Unit by unit, so that full parameters are freed before the next unit is prepared.

    Args:
        networks: the networks by path.
        optimizers: the optimizers by path, which :func:`check_shardable` has accepted.
        modules: the modules that are units by name, each before those inside of it.
        replicas: the replicas of the run.
        prepare: is called with the modules of a unit before it is sharded.

    Returns:
        What collects their gradients.

    Raises:
        UsageError: if this PyTorch cannot do it.
    """
    require_fsdp()
    mesh = make_mesh(replicas.device, replicas.num_processes)
    parts = modules_of_units(modules)
    units: dict[str, ShardedUnit] = {}
    # Inner units first: an outer one takes what they have left.
    for name in reversed([*modules]):
        if prepare is not None:
            prepare(parts[name])
        units[name] = _shard(modules[name], mesh, networks, optimizers)
    for network in networks.values():
        # Of each module, so that what is cut is freed before the next module is loaded.
        for module in network.modules():
            module.register_load_state_dict_pre_hook(_cut_state)  # type: ignore[no-untyped-call]
    for optimizer in optimizers.values():
        optimizer.register_load_state_dict_pre_hook(_cut_optimizer_state)
    _LOGGER.info(
        "Parameters are sharded over %d processes, in the units %s.",
        replicas.num_processes,
        ", ".join(modules),
    )
    return ShardedGradients(replicas, units, _once(_parameters_of(networks)))


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
) -> ShardedUnit:
    """Shard what is left of a module, and exchange its parameters in the optimizers."""
    old = _parameters_of(networks)
    unit = shard_unit(module, mesh)
    new = _parameters_of(networks)
    _exchange(optimizers.values(), {id(whole): new[name] for name, whole in old.items()})
    return unit


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


def _exchange(optimizers: Iterable[Optimizer], new: Mapping[int, Tensor]) -> None:
    """Put the sharded parameters in the places of the whole ones, and cut what is kept of them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, whole in enumerate(group["params"]):
                group["params"][place] = parameter = new[id(whole)]
                if parameter is not whole and whole in optimizer.state:
                    optimizer.state[parameter] = _cut_table(optimizer.state.pop(whole), parameter)


def _cut_table(table: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter, with shards of what has its shape."""
    return {
        name: cut_like(value, parameter) if _is_whole(value, parameter) else value
        for name, value in table.items()
    }


def _cut_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors of a state by this process's shards, before they are loaded."""
    place = prefix.removesuffix(".")
    own = module.named_parameters(place, recurse=False, remove_duplicate=False)
    for name, parameter in own:
        if _is_whole(state.get(name), parameter):
            state[name] = cut_like(state[name], parameter)


def _cut_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with this process's shards of what has the shape of its parameter."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        if number in found:
            found[number] = _cut_table(found[number], parameter)
    return {**state, "state": found}


def _is_whole(value: object, parameter: Tensor) -> bool:
    """Return whether a value is a whole tensor of the shape of a sharded parameter."""
    if not is_sharded(parameter) or not isinstance(value, Tensor) or is_sharded(value):
        return False
    return bool(value.shape == parameter.shape)
