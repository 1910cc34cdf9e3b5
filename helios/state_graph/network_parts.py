"""The parts of a network under their bare names, from a single walk for all consumers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple, final

from torch import Tensor, nn

from helios.core.wrappers import BareNames, bare_state_dict


class NamedTensor(NamedTuple):
    """A parameter or a buffer, and where it is registered."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor


@final
class Network:
    """The parts of a network as it is now.

    Args:
        module: the network, which may be wrapped and contain wrappers.

    Attributes:
        modules: all submodules, each once, with their bare names; the module itself comes first,
            under the empty name. A wrapper has the name of the module that it wraps.
        has_wrappers: whether there are any.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        bare = BareNames(module, (part for _, part in named))
        self.has_wrappers = bare.has_wrappers
        self.modules = [(bare.of(name), part) for name, part in named]

    @cached_property
    def kinds(self) -> frozenset[type[nn.Module]]:
        """The classes of all submodules."""
        return frozenset([type(part) for _, part in self.modules])

    @cached_property
    def _lists(self) -> tuple[list[NamedTensor], list[NamedTensor]]:
        """All parameters; and the same with persistent buffers, those of each submodule once."""
        parameters: list[NamedTensor] = []
        tensors: list[NamedTensor] = []
        for place, part in self.modules:
            prefix, held = f"{place}." if place else "", vars(part)
            own = [
                NamedTensor(f"{prefix}{key}", part, key, tensor)
                for key, tensor in part._parameters.items()  # noqa: SLF001 - named_parameters() would walk again
                if tensor is not None
            ]
            parameters += own
            # Modules that torch.nn did not build, such as compiled scripts, may have no table.
            buffers = held.get("_buffers")
            if isinstance(buffers, dict):
                tensors += own
                hidden = held["_non_persistent_buffers_set"]
                tensors += (
                    NamedTensor(f"{prefix}{key}", part, key, tensor)
                    for key, tensor in buffers.items()
                    if isinstance(tensor, Tensor) and key not in hidden
                )
        return parameters, tensors

    @property
    def registered(self) -> list[NamedTensor]:
        """All parameters, those of each submodule once."""
        return self._lists[0]

    @property
    def tensors(self) -> list[NamedTensor]:
        """All parameters and persistent buffers, those of each submodule once."""
        return self._lists[1]

    @cached_property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """All parameters, each once, with their bare names."""
        first: dict[int, tuple[str, Tensor]] = {}
        for name, _, _, tensor in self.registered:
            first.setdefault(id(tensor), (name, tensor))
        return list(first.values())

    def with_tables(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that have tables of tensors, with their bare names."""
        for name, part in self.modules:
            # Modules that torch.nn did not build, such as compiled scripts, may have none.
            if isinstance(vars(part).get("_buffers"), dict):
                yield name, part


class Networks:
    """The networks of one scan, each walked on first use."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Network]] = {}

    def of(self, module: nn.Module) -> Network:
        """Return the parts of a network."""
        # The module is kept with its parts: an id is only unique while it lives.
        known = self._known.get(id(module))
        if known is None:
            known = self._known[id(module)] = module, Network(module)
        return known[1]


def name_buffers(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all persistent buffers by name, those of a network under its path.

    A network may save other values than it holds: these count.
    """
    found = {}
    for path, module in networks.items():
        state = bare_state_dict(module)
        for place, part in Network(module).modules:
            prefix = f"{place}." if place else ""
            # Compiled scripts say of no buffer that it is not saved.
            hidden = vars(part).get("_non_persistent_buffers_set", ())
            for key, buffer in part.named_buffers(recurse=False):
                if key not in hidden:
                    found[f"{path}.{prefix}{key}"] = state.get(prefix + key, buffer)
    return found


def name_weights(
    networks: Mapping[str, nn.Module], loose: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all parameters by name, those of a network under its path.

    Args:
        networks: networks by path.
        loose: parameters outside of networks, by path.
    """
    found = dict(loose)
    for path, module in networks.items():
        for name, parameter in Network(module).parameters:
            found[f"{path}.{name}"] = parameter
    return found
