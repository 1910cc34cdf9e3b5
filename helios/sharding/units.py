"""Finds the units: modules whose parameters are gathered together, and freed after their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from helios.errors import ArgumentTypeError, UsageError

LEAST_ELEMENTS = 1 << 20
"""The number of parameters from which a module is a unit by default."""


@dataclass(frozen=True)
class Unit:
    """A module that ``Model.shard`` returns, with options.

    Args:
        module: a module of the model's networks.
        checkpoint: whether to recompute its activations in backward, instead of keeping them
            (activation checkpointing). Saves memory, costs a second forward, does not affect the
            results, and works with ``Trainer(sharding="none")``, too.

    Raises:
        ArgumentTypeError: if an argument is of another type.

    Example:
        >>> Unit(nn.Linear(2, 3), checkpoint=True)
        Unit(module=Linear(in_features=2, out_features=3, bias=True), checkpoint=True)
    """

    module: nn.Module
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise ArgumentTypeError(
                f"Unit(module) must be a module, got {type(self.module).__name__}. Pass e.g. "
                "self.net.layers[0]."
            )
        if not isinstance(self.checkpoint, bool):
            raise ArgumentTypeError(
                f"Unit(checkpoint=...) must be a bool, got {self.checkpoint!r}. Pass True or False."
            )


def find_units(
    networks: Mapping[str, nn.Module], named: Sequence[nn.Module | Unit] | None
) -> dict[str, nn.Module]:
    """Return the modules that are units by name, each before those inside of it.

    Args:
        networks: the networks by path. Each is a unit if no other one holds it; of a list or dict,
            each member.
        named: other units, as ``Model.shard`` has returned them; ``None`` for the large modules.

    Raises:
        ArgumentTypeError: if ``named`` holds anything but modules of the networks.
        UsageError: if a tied parameter would be in two units, if a unit has several types, or if a
            parameter is in no module with a forward.
    """
    roots = _outermost(
        [root for path, network in networks.items() for root in _find_roots(path, network)]
    )
    names = _name_modules(roots)
    if named is None:
        inner = {id(part) for _, root in roots for part in _find_large(root)}
    else:
        modules = (unit.module if isinstance(unit, Unit) else unit for unit in named)
        inner = _require_named(modules, names)
    inner |= {id(root) for _, root in roots}
    units = {name: module for key, (name, module) in names.items() if key in inner}
    _check_units(units)
    return units


def find_in_networks(
    networks: Mapping[str, nn.Module], modules: Iterable[nn.Module]
) -> dict[str, nn.Module]:
    """Return modules by name.

    Args:
        networks: the networks by path.
        modules: the modules, of units that ``Model.shard`` has returned.

    Raises:
        ArgumentTypeError: if one of them is not a module of the networks with a forward.
    """
    names = _name_modules(networks.items())
    keys = _require_named(modules, names)
    return {name: module for key, (name, module) in names.items() if key in keys}


def _name_modules(
    roots: Iterable[tuple[str, nn.Module]],
) -> dict[int, tuple[str, nn.Module]]:
    """Return the modules with their names, by identity."""
    return {
        id(module): (f"{path}.{name}" if name else path, module)
        for path, root in roots
        for name, module in root.named_modules()
    }


def _require_named(modules: Iterable[nn.Module], names: Collection[int]) -> set[int]:
    """Return the identities of modules that have names and a forward."""
    found = set()
    for module in modules:
        if id(module) not in names or not _is_called(module):
            raise ArgumentTypeError(
                "Model.shard() must return modules of the model's networks that have a forward, "
                f"got {type(module).__name__}. Return e.g. list(self.net.layers)."
            )
        found.add(id(module))
    return found


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward, before which its parameters can be gathered."""
    return type(module).forward is not nn.Module.forward


def _find_roots(path: str, network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters and a forward, with their names.

    Raises:
        UsageError: for a parameter outside of them.
    """
    if not any(True for _ in network.parameters()):
        return
    if _is_called(network):
        yield path, network
        return
    for name, _ in network.named_parameters(recurse=False):
        raise UsageError(
            f'Trainer(sharding="full") needs parameters of modules with a forward, but {path} '
            f"({type(network).__name__}), which holds {name}, has none. Use it in the forward of a "
            "module that holds it."
        )
    for name, child in network.named_children():
        yield from _find_roots(f"{path}.{name}", child)


def _outermost(roots: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return those that are in no other one, as ``self.encoder = self.net.encoder`` is."""
    inner = {id(part) for _, root in roots for part in root.modules() if part is not root}
    return [(path, root) for path, root in roots if id(root) not in inner]


def _find_large(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and the members of lists of modules, that are large enough.

    A module that shares a parameter with others is left to the root.
    """
    owners = _count_owners(root)
    candidates = [*root.children()]
    for module in root.modules():
        if isinstance(module, nn.ModuleList):
            candidates += module
    for module in candidates:
        is_large = sum(parameter.numel() for parameter in module.parameters()) >= LEAST_ELEMENTS
        is_alone = all(owners[key] == count for key, count in _count_owners(module).items())
        if is_large and is_alone and _is_called(module):
            yield module


def _count_owners(module: nn.Module) -> Counter[int]:
    """Return how many modules hold each parameter."""
    return Counter(
        id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)
    )


def modules_of_units(units: Mapping[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """Return the modules of each unit, by its name, without those of the units inside of it."""
    return {
        name: list(_own_modules(unit, {id(part) for key, part in units.items() if key != name}))
        for name, unit in units.items()
    }


def _check_units(units: Mapping[str, nn.Module]) -> None:
    """Check that each tied parameter, and each type, is in one unit."""
    homes: dict[int, str] = {}
    for name, parts in modules_of_units(units).items():
        types = set()
        for part in parts:
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
