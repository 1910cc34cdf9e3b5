"""Names the objects that an owner reaches, so that a checkpoint can refer to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.wrappers import BareNames
from helios.run_state.plain_values import ATOMS


@final
class Names:
    """Names of objects, of the parts and parameters of networks, and of what others save.

    They are collected on first use, because most owners never need them.

    Args:
        objects: objects with state by path; one that is added later has a name too.
        name_outside: returns the name of an object that another owner saves.
        find_outside: returns an object that another owner saves, by name.
    """

    def __init__(
        self,
        objects: Mapping[str, object],
        name_outside: Callable[[object], str | None],
        find_outside: Callable[[str], object | None],
    ) -> None:
        self._objects = objects
        self._name_outside = name_outside
        self._find_outside = find_outside

    @cached_property
    def _table(self) -> dict[str, object]:
        table: dict[str, object] = dict(self._objects)
        for path, module in self._objects.items():
            if isinstance(module, nn.Module):
                bare = BareNames(module)
                members: Iterator[tuple[str, object]] = module.named_modules()
                tensors = (*module.named_parameters(), *module.named_buffers())
                for name, part in (*members, *tensors):
                    table.setdefault(f"{path}.{bare.of(name)}".rstrip("."), part)
        return table

    @cached_property
    def _ids(self) -> dict[int, str]:
        ids: dict[int, str] = {}
        for name, part in self._table.items():
            ids.setdefault(id(part), name)
        return ids

    def ids(self) -> Mapping[int, str]:
        """Return the names by id, without those of other owners."""
        return self._ids

    def of(self, value: object) -> str | None:
        """Return the name of an object, or ``None``."""
        return self._ids.get(id(value)) or self._name_outside(value)

    def objects(self) -> Mapping[str, object]:
        """Return all named objects of this owner."""
        return self._table

    def find(self, name: str) -> object | None:
        """Return the object with a name, of this owner or of another one."""
        found = self._table.get(name)
        return self._find_outside(name) if found is None else found


def as_written(name: str, objects: Mapping[str, object]) -> str:
    """Return the name of a tensor as users write it, if only an optimizer holds the tensor.

    Args:
        name: a path; in a checkpoint, ``<optimizer>.<group>.<index>`` for such a tensor.
        objects: objects by path.

    Example:
        >>> optimizer = Optimizer([nn.Parameter()], {})
        >>> as_written("opt.0.6", {"opt": optimizer})
        'opt.param_groups[0]["params"][6]'
    """
    path, *place = name.rsplit(".", 2)
    if len(place) < 2 or not isinstance(objects.get(path), Optimizer):
        return name
    return f'{path}.param_groups[{place[0]}]["params"][{place[1]}]'


def has_odd_keys(table: Mapping[Any, Any]) -> bool:
    """Return whether a dict has tensors or networks as keys, which cannot be written as text."""
    kinds = set(map(type, table)) - ATOMS
    return any(issubclass(kind, Tensor | nn.Module) for kind in kinds)


@final
class KeyedByObjects(MutableMapping[Any, Any]):
    """A dict with parameters or networks as keys, accessed by their names.

    Args:
        table: the dict.
        names: names of the keys; a key without one is named by its position in the dict.
    """

    def __init__(self, table: dict[Any, Any], names: Names) -> None:
        self._dict = table
        self._names = names

    def _key_of(self, number: int, key: Any) -> Any:
        if not isinstance(key, Tensor | nn.Module):
            return key
        return f"<{self._names.of(key) or number}>"

    def _raw(self, key: Any) -> Any:
        if not isinstance(key, str) or key[:1] != "<" or key[-1:] != ">":
            return key
        found = self._names.find(key[1:-1])
        if found is None and key[1:-1].isdigit() and int(key[1:-1]) < len(self):
            found = list(self._dict)[int(key[1:-1])]
        return found if isinstance(found, Tensor | nn.Module) else key

    def entries(self) -> list[tuple[Any, Any]]:
        """Return all values with the names of their keys."""
        return [
            (self._key_of(number, key), value)
            for number, (key, value) in enumerate(self._dict.items())
        ]

    def __getitem__(self, key: Any) -> Any:
        """Return the value under the name of a key."""
        return self._dict[self._raw(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the value under the name of a key."""
        self._dict[self._raw(key)] = value

    def __delitem__(self, key: Any) -> None:
        """Delete a key by its name."""
        del self._dict[self._raw(key)]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the names of the keys."""
        return iter([key for key, _ in self.entries()])

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._dict)

    def reorder(self, names: list[Any]) -> None:
        """Bring the keys into the order of their names."""
        for key in [self._raw(name) for name in names]:
            if key in self._dict:
                self._dict[key] = self._dict.pop(key)
