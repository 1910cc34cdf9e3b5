"""Copies of the buffers of networks from before a window, to undo the whole window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Networks: TypeAlias = Callable[[], Mapping[str, nn.Module]]


@final
class BufferCopies:
    """Copies of all buffers of some networks; later copies reuse the memory of the first."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Release everything."""
        self._places: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.look_again()

    def look_again(self) -> None:
        """Search the networks again at the next window; the open one keeps its copies."""
        self._is_known = False

    def keep(self, find_networks: Networks) -> None:
        """Copy the buffers as they are now.

        Args:
            find_networks: returns the networks, by path.
        """
        buffers = self._look(find_networks)
        with torch.no_grad():
            if len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers)):
                if buffers:
                    torch._foreach_copy_(self._copies, buffers)
            else:
                self._buffers = buffers
                self._copies = [buffer.detach().clone() for buffer in buffers]

    def put_back(self) -> None:
        """Restore the values of the buffers, and the buffers of the networks."""
        with torch.no_grad():
            places = self._places
            for (table, name), buffer, copy in zip(
                places, self._buffers, self._copies, strict=True
            ):
                buffer.copy_(copy)
                table[name] = buffer

    def _look(self, find_networks: Networks) -> list[Tensor]:
        found = [table.get(name) for table, name in self._places]
        if not self._is_known or any(buffer is None for buffer in found):
            self._is_known = True
            self._places = _places_of(find_networks().values())
            found = [table[name] for table, name in self._places]
        return [buffer for buffer in found if buffer is not None]


def _places_of(networks: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Return where the buffers are held; for those of a scripted module only values count."""
    parts = {id(part): part for network in networks for part in network.modules()}
    places = []
    for part in parts.values():
        found = dict(part.named_buffers(recurse=False))
        table = vars(part).get("_buffers", found)
        places += [(table, name) for name, buffer in found.items() if not is_lazy(buffer)]
    return places
