"""Which modules are units: their parameters are gathered together, and freed after their use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from helios.errors import ArgumentTypeError, UsageError

LEAST_ELEMENTS = 1 << 20
"""Parameters of a module that is a unit without being named."""


def find_units(
    networks: Mapping[str, nn.Module], named: Sequence[nn.Module] | None
) -> dict[str, nn.Module]:
    """Return the modules that are units by name, each before those inside of it.

    Args:
        networks: the networks by path; each of them with parameters is a unit.
        named: other units, as ``Model.shard`` has returned them; ``None`` for the large modules.

    Raises:
        ArgumentTypeError: if ``named`` holds something else than modules of the networks.
        UsageError: if a tied parameter would be in two units, or a unit has several types.
    """
    networks = {path: network for path, network in networks.items() if [*network.parameters()]}
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
    units = {name: module for key, (name, module) in names.items() if key in inner}
    _check_units(units)
    return units


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
