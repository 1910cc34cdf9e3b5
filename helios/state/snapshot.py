"""What an owner holds at one time: its anchors, the codes of its values, and marks of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from helios.core.sharded_tensors import is_sharded
from helios.core.wrappers import class_of, unwrap
from helios.state.anchors import Anchors, Rules, path_of
from helios.state.digests import Identities, digest_of, mark_of
from helios.state.networks import Network, is_odd, pieces_of
from helios.state.walk import PARTS, Walk
from helios.storage.plain_objects import attributes_of

Form = list[Any]
"""The type, the shape and the strides of a tensor."""


@final
class Snapshot:
    """What an owner holds at one time.

    Args:
        owner: the object.
        rules: what counts of it.
        identities: numbers for what is compared by identity.

    Attributes:
        anchors: the objects with a state.
        walk: the values beside them.
    """

    def __init__(self, owner: object, rules: Rules, identities: Identities) -> None:
        self.anchors = Anchors(owner, rules)
        self.walk = Walk(owner, self.anchors)
        self._identities = identities
        self._names: dict[int, str] | None = None
        self._names_of_objects: dict[int, str] | None = None

    def number(self, value: object) -> int:
        """Return a number that stands for the identity of a value."""
        return self._identities.number(value)

    def digests(self) -> dict[str, dict[Any, tuple[Any, int]]]:
        """Return the digest and the size of each value, by holder and key."""
        return {
            name: {
                key: (_order_of(code), 0) if key == PARTS else digest_of(code)
                for key, code in table.items()
            }
            for name, table in self.walk.codes.items()
        }

    def mark(self, value: Any) -> bytes:
        """Return what is equal for equal content, with anchors and values by their names."""
        if self._names is None:
            self._names = {**self.walk.names, **self.anchors.names}
        # A name says nothing of the content of what has it.
        own = self._names.pop(id(value), None)
        mark = mark_of(value, self._identities, self._names)
        if own is not None:
            self._names[id(value)] = own
        return mark

    def mark_of_content(self, value: Any) -> bytes:
        """Return what is equal for equal content, with all elements of tensors and containers."""
        if self._names_of_objects is None:
            self._names_of_objects = {
                id(part): name
                for name, part in self.anchors.parts.items()
                if not isinstance(part, dict | list | Tensor)
            }
        return mark_of(value, self._identities, self._names_of_objects)

    @property
    def objects(self) -> dict[str, Any]:
        """The objects with a state by path, also those that only other objects hold."""
        return {**self.anchors.objects, **self.anchors.inner}

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers that a loader may reach, also those of other owners."""
        parts = {**self.anchors.rules.outside.parts, **self.objects}
        return [part for part in reversed(parts.values()) if isinstance(part, Optimizer)]

    @property
    def values(self) -> Mapping[str, Any]:
        """The values that have a path here, for other owners."""
        return self.walk.parts

    def attributes_of(self, name: str) -> dict[str, Any]:
        """Return the attributes of a holder; none if there is no such holder."""
        return attributes_of(self.walk.holders.get(name))

    def forms(self) -> dict[str, Form]:
        """Return the forms of parameters and persistent buffers, by name."""
        named = [
            (self.anchors.names.get(id(tensor)), tensor)
            for module in self.anchors.of_kind(nn.Module, with_inner=True).values()
            for tensor in pieces_of(self.anchors.network(module)).values()
        ]
        return {
            name: form_of(tensor)
            for name, tensor in (*named, *self.anchors.loose.items())
            if name and not is_sharded(tensor) and tensor.layout is torch.strided
        }

    def kinds(self) -> dict[str, str]:
        """Return the classes of objects and modules by name, and where modules have parameters.

        The kind of a lazy module is empty, since it gets another class from its first batch.
        """
        found = {path: kind_of(part) for path, part in self.anchors.objects.items()}
        for name, module in self.modules():
            kind = class_of(module)
            text = "" if issubclass(kind, LazyModuleMixin) else kind.__name__
            found[name] = self._kind_after_setup(text, module)
            for key, part in self.walk.codes[name][PARTS][1].items():
                if part is not None:
                    tensor = vars(module)["_parameters"][key]
                    found[path_of(name, key)] = self._kind_after_setup("parameter", tensor)
        return found

    def _kind_after_setup(self, kind: str, part: object) -> str:
        rules = self.anchors.rules
        is_new = rules.tops is not None and id(part) not in rules.known
        return f"a new {kind}" if is_new and kind else kind

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of which the parts are saved, by name."""
        for name, table in self.walk.codes.items():
            if PARTS in table:
                yield name, self.walk.holders[name]

    def odd_networks(self) -> Iterator[tuple[str, Network]]:
        """Yield the networks of which user code says what their ``state_dict`` holds."""
        for path, module in self.anchors.of_kind(nn.Module, with_inner=True).items():
            network = self.anchors.network(module)
            if is_odd(network):
                yield path, network


def _order_of(parts: list[Any]) -> list[Any]:
    """Return what is equal for equal parts of a module in the same order."""
    return [tuple(held.items()) if isinstance(held, dict) else held for held in parts]


def kind_of(part: object) -> str:
    """Return the name of an object's class; of a wrapper, that of what is inside."""
    return type(unwrap(part)).__name__


def form_of(tensor: Tensor) -> Form:
    """Return the type, the shape and the strides of a tensor."""
    return [tensor.dtype, [*tensor.shape], [*tensor.stride()]]
