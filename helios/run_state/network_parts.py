"""The parts of a network under their bare names, from a single walk for all consumers."""

from __future__ import annotations

from functools import cached_property
from typing import final

from torch import Tensor, nn

from helios.core.wrappers import BareNames


@final
class Network:
    """The parts of a network as it is now.

    Args:
        module: the network, which may be wrapped and contain wrappers.

    Attributes:
        modules: all submodules, each once, with their bare names; the module itself comes first,
            under the empty name. A wrapper has the name of the module that it wraps.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = list(module.named_modules())
        self._bare = BareNames(module, (part for _, part in named))
        self.modules = [(self._bare.of(name), part) for name, part in named]

    @cached_property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """All parameters, each once, with their bare names."""
        return [(self._bare.of(name), part) for name, part in self._module.named_parameters()]


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
