"""Averages of the tensors of networks: updated, checked against the networks, and swapped in.

Swapping copies in place, so optimizers, graphs and compiled code keep their parameter objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from helios.core.sharded_tensors import cut_like, is_deferred, value_of
from helios.core.wrappers import BareNames
from helios.errors import StateError

_LOGGER = logging.getLogger(__name__)

Tensors: TypeAlias = Mapping[str, Tensor]
Networks: TypeAlias = Mapping[str, nn.Module]
Merge: TypeAlias = Callable[[list[Tensor], list[Tensor], int], None]

_TABLES = ("_modules", "_parameters")
_FORM = attrgetter("shape", "dtype", "device")

_CLAIMS = "_helios_averages"
"""Attribute of a tensor that averages swap: which plugins do, by phase."""


@contextmanager
def ordinary() -> Iterator[None]:
    """Work on ordinary tensors without gradients, also inside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of an average: at least float32.

    In half precision, 1 - 0.999 is less than half a unit in the last place: updates would be lost.
    """
    return torch.promote_types(dtype, torch.float32)


def averaged_tensors(network: nn.Module, *, with_buffers: bool) -> dict[str, Tensor]:
    """Return the floating-point parameters of a network by name, optionally with its buffers.

    Names have no prefixes of wrappers.
    """
    bare = BareNames(network)
    found: list[tuple[str, Tensor]] = list(network.named_parameters())
    if with_buffers:
        found += network.named_buffers()
    return {
        bare.of(name): part for name, part in found if part.is_floating_point() or part.is_complex()
    }


def misfits(averages: Tensors, tensors: Tensors) -> str:
    """Return how averages differ from tensors in names and shapes; empty if they match."""
    shapes = [
        f"{name} is {tuple(tensor.shape)}, its average {tuple(averages[name].shape)}"
        for name, tensor in tensors.items()
        if name in averages and averages[name].shape != tensor.shape
    ]
    missing = [f"{name} has no average" for name in tensors if name not in averages]
    left_over = [f"the averaged {name} does not exist" for name in averages if name not in tensors]
    return ", ".join((*missing, *left_over, *shapes))


def claim(tensor: Tensor, who: str, phases: Iterable[str]) -> tuple[str, str] | None:
    """Record on a tensor that a plugin swaps it in some phases; returns a conflicting claim."""
    claims: dict[str, str] = vars(tensor).setdefault(_CLAIMS, {})
    for phase in phases:
        if claims.setdefault(phase, who) != who:
            return phase, claims[phase]
    return None


def release(tensor: Tensor, who: str) -> None:
    """Remove what :func:`claim` has recorded for a plugin."""
    attributes: dict[str, Any] = vars(tensor)
    claims = attributes.pop(_CLAIMS, {})
    if others := {phase: name for phase, name in claims.items() if name != who}:
        attributes[_CLAIMS] = others


@final
class _Pairs:
    """Averages paired with the tensors of networks, in groups of one device and type.

    Collecting tensors by name costs several times as much as an update, so it is done once; each
    update only checks, by identity, that modules still hold the same tensors.
    """

    def __init__(
        self, networks: Networks, parts: Mapping[str, Tensors], with_buffers: bool
    ) -> None:
        self._networks = dict(networks)
        self._modules = [part for network in networks.values() for part in network.modules()]
        self._tables = (*_TABLES, "_buffers") if with_buffers else _TABLES
        self._names, self._objects = self._look()
        self._tensors: list[Tensor] = []
        self._groups: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for path, network in networks.items():
            for name, tensor in averaged_tensors(network, with_buffers=with_buffers).items():
                average = parts[path][name]
                kind = (average.device, average.dtype, tensor.dtype)
                group = self._groups.setdefault(kind, ([], []))
                group[0].append(average)
                group[1].append(tensor)
                self._tensors.append(tensor)
        self._forms = list(map(_FORM, self._tensors))

    def _look(self) -> tuple[list[str], list[Any]]:
        tables = [table for name in self._tables for table in map(attrgetter(name), self._modules)]
        names = chain.from_iterable(table.keys() for table in tables)
        return list(names), list(chain.from_iterable(table.values() for table in tables))

    def are_those_of(self, networks: Networks) -> bool:
        """Whether these are the networks, with no tensor replaced, moved or reshaped."""
        if networks != self._networks:
            return False
        names, objects = self._look()
        return (
            names == self._names
            and all(map(is_, objects, self._objects))
            and list(map(_FORM, self._tensors)) == self._forms
        )

    def groups(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield averages and their tensors as lists, one pair per device and type."""
        for (_, dtype, own), (averages, tensors) in self._groups.items():
            yield averages, tensors if own is dtype else [x.to(dtype) for x in tensors]


@final
class Averages:
    """Averages by network and name, and the number of updates.

    Args:
        owner: name of the owner in messages.
        with_buffers: whether floating-point buffers are averaged too.
    """

    def __init__(self, owner: str, *, with_buffers: bool) -> None:
        self._owner = owner
        self._with_buffers = with_buffers
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._pairs: _Pairs | None = None
        self.num_updates = 0

    @property
    def paths(self) -> list[str]:
        """Paths of the networks that have averages."""
        return list(self._parts)

    def clear(self) -> None:
        """Remove all averages."""
        self.let_go()
        self._parts = {}
        self.num_updates = 0

    def let_go(self) -> None:
        """Release the networks; the next update collects their tensors again."""
        self._pairs = None

    def tensors_of(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a network that are averaged, by name."""
        return averaged_tensors(network, with_buffers=self._with_buffers)

    def pairs(self, networks: Networks) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Return averages, each with the tensors that it averages."""
        return [(self._parts[path], self.tensors_of(part)) for path, part in networks.items()]

    def update(self, networks: Networks, merge: Merge) -> None:
        """Update the averages with the current weights of networks.

        Args:
            networks: the same at every update.
            merge: moves averages towards weights in place, given the number of updates so far.

        Raises:
            StateError: if the weights do not match the averages.
        """
        with ordinary():
            if not self.num_updates:
                self._parts = {path: self._copy_of(part) for path, part in networks.items()}
                self.let_go()
            else:
                for averages, present in self._pair(networks).groups():
                    merge(averages, present, self.num_updates)
        self.num_updates += 1

    def _copy_of(self, network: nn.Module) -> dict[str, Tensor]:
        tensors = self.tensors_of(network).items()
        return {name: part.to(wide(part.dtype), copy=True) for name, part in tensors}

    def _pair(self, networks: Networks) -> _Pairs:
        if self._pairs is None or not self._pairs.are_those_of(networks):
            self.match(networks, is_strict=True)
            self._pairs = _Pairs(networks, self._parts, self._with_buffers)
        return self._pairs

    def match(self, networks: Networks, *, is_strict: bool) -> dict[str, nn.Module]:
        """Return the networks that have averages, and move the averages to their devices.

        Args:
            networks: the networks of the model.
            is_strict: whether all of them must have averages, and no others may have. Outside of
                training a model may build fewer networks, or more, for which a warning is logged.

        Raises:
            StateError: if the averages belong to other weights.
        """
        lacking = [path for path in networks if path not in self._parts]
        left_over = [path for path in self._parts if path not in networks]
        known = {path: part for path, part in networks.items() if path in self._parts}
        faults = [
            f"{path}: {fault}"
            for path, part in known.items()
            if (fault := misfits(self._parts[path], self.tensors_of(part)))
        ]
        if is_strict or not known:
            faults += [f"{path} has no average" for path in lacking]
            faults += [f"the averaged {path} does not exist" for path in left_over]
        if faults:
            raise StateError(
                f"The average of {self._owner} does not match the model's networks: "
                f"{'; '.join(faults)}. Build the networks in setup() and pass the same options to "
                "the plugin, or give it another plug_id to start a new average."
            )
        if lacking:
            _LOGGER.warning(
                "There is no average of %s in %s: they keep their own weights.",
                ", ".join(lacking),
                self._owner,
            )
        self._follow(known)
        return known

    def _follow(self, networks: Networks) -> None:
        self.let_go()
        with ordinary():
            for averages, tensors in self.pairs(networks):
                for name, tensor in tensors.items():
                    average = cut_like(averages[name], tensor)
                    averages[name] = average.to(tensor.device, wide(tensor.dtype))

    def state_dict_of(self, network: nn.Module, path: str) -> dict[str, Any]:
        """Return a network's state with the averages instead of its own values, as copies."""
        names = {id(tensor): name for name, tensor in self.tensors_of(network).items()}
        state = network.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                average = self._parts[path].get(names.get(id(value), ""), value)
                state[key] = average.detach().to(value, copy=True)
        bare = BareNames(network)
        return {bare.of(key): value for key, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by reference."""
        parts = {
            path: {name: value_of(average) for name, average in averages.items()}
            for path, averages in self._parts.items()
        }
        return {"num_updates": self.num_updates, "averages": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of what :meth:`state_dict` returned."""
        self.let_go()
        self.num_updates = state["num_updates"]
        self._parts = {
            path: {
                # Those of a sharded checkpoint are read when it is known which rows.
                name: average if is_deferred(average) else average.clone()
                for name, average in averages.items()
            }
            for path, averages in state["averages"].items()
        }


@final
class Swap:
    """Swaps averages into a network, and its own values back."""

    def __init__(self) -> None:
        self._own: list[tuple[Tensor, Tensor]] = []

    @property
    def is_in(self) -> bool:
        """Whether averages are swapped in."""
        return bool(self._own)

    def put_in(self, pairs: Iterable[tuple[Tensors, Tensors]]) -> None:
        """Copy averages into tensors, and keep their own values."""
        self.put_back()
        pairs = list(pairs)
        with ordinary():
            # Save all own values first: networks may share tensors.
            self._own = [(part, part.clone()) for _, own in pairs for part in own.values()]
            for averages, tensors in pairs:
                for name, tensor in tensors.items():
                    tensor.copy_(averages[name])

    def put_back(self) -> None:
        """Restore the own values, if averages are swapped in."""
        own, self._own = self._own, []
        with ordinary():
            for tensor, value in own:
                tensor.copy_(value)
