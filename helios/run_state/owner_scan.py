"""Scans an owner: what it holds, and what surrounds a value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, final

from torch import Tensor

from helios.run_state.module_state import Parameters, sort_parameters, storages_of
from helios.run_state.plain_values import Storages
from helios.run_state.tied_tensors import Ties, ties_of
from helios.run_state.walk import walk_all
from helios.run_state.walk_result import Rules


@final
class OwnerScan:
    """A scan of an owner. The surroundings of values are only computed on demand.

    Args:
        owner: the object whose attributes are scanned.
        rules: what is left out.
        settled: members of modules that need no comparison, as for :func:`walk_all`.
    """

    def __init__(
        self, owner: object, rules: Rules, settled: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.found, self.names = walk_all(owner, rules, settled)
        self._owner = owner
        self._rules = rules

    @cached_property
    def parameters(self) -> Parameters:
        """The tensors that training updates."""
        return sort_parameters(self.found, self.others.values())

    @cached_property
    def ties(self) -> Ties:
        """Which tensors share memory."""
        return ties_of(self.found, self.parameters)

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """The tensors that other owners save."""
        outside = self._rules.outside().items()
        return {name: part for name, part in outside if isinstance(part, Tensor)}

    @cached_property
    def storages(self) -> Storages:
        """The tensors that are saved elsewhere."""
        return storages_of(self.found, self.parameters, self.others)

    @cached_property
    def _names(self) -> dict[int, str]:
        attributes = vars(self._owner)
        names = {id(attributes[name]): name for name in self._rules.exclude & attributes.keys()}
        found = self.found
        for table in (found.objects, found.inner, found.generators):
            names |= {id(part): path for path, part in table.items()}
        for path, module in found.modules().items():
            for name, part in found.networks.of(module).modules:
                names.setdefault(id(part), f"{path}.{name}")
        outside = {id(part): name for name, part in self._rules.outside().items()}
        return {**outside, **names, id(self._owner): "itself"}

    def paths(self) -> frozenset[str]:
        """Return the paths of the objects and of the parameters that no network holds."""
        return frozenset((*self.found.objects, *self.parameters.loose))

    def name_of(self, value: object) -> str | None:
        """Return the name under which an object is saved elsewhere."""
        return self._names.get(id(value))

    def find(self, name: str) -> object | None:
        """Return the object with a name, of this owner or of another one."""
        found = self.names.find(name)
        return self.found.generators.get(name) if found is None else found
