"""Turns what an owner reaches into a graph of nodes that refer to each other by name.

Networks and the like keep the name that they had after setup. Containers, objects of attributes,
arrays and loose tensors are named anew in each walk, by the first path that leads to them. So two
graphs are equal if and only if their nodes are equal name by name: aliases, cycles, order and
sharing need no code of their own.
"""

from __future__ import annotations

import functools
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, TypeAlias, final

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from helios.core.generators import Generator, is_generator, kind_of_generator
from helios.core.memory import fills_its_reach, has_plain_bytes, span_of, storage_of
from helios.state_graph import unsupported_values
from helios.state_graph.attribute_rules import is_of_the_house
from helios.state_graph.layouts import Layouts, layouts_of
from helios.state_graph.memory_groups import Group, Storages, Target, groups_of
from helios.state_graph.module_state import Parameters, sort_parameters, storages_of
from helios.state_graph.object_names import ObjectNames, Rules, has_state, members_of, path_of
from helios.state_graph.registered_hooks import has_hooks, user_hooks_of
from helios.state_graph.registered_hooks import is_known as is_of_libraries
from helios.state_graph.scanning import (
    CODE,
    OPAQUE,
    REF,
    ContentScanner,
    Scanner,
    TooDeepError,
    digest_of,
    is_dense,
)
from helios.state_graph.values import (
    ATOMS,
    Identities,
    are_atoms,
    attributes_of,
    is_plain_object,
    table_of,
)
from helios.storage.checksums import array_sum, tensor_sum
from helios.storage.type_converters import Alias

OF_GRAPH = "<"
"""How the names of nodes begin that other owners save."""

MODULES: tuple[str, ...] = ("_modules",)
PARAMETERS: tuple[str, ...] = ("_parameters",)
BUFFERS: tuple[str, ...] = ("_buffers",)
PARTS = frozenset((MODULES, PARAMETERS, BUFFERS))
"""The keys of a module's slots with the names of its parts."""

_LONG_TEXT, _LONG_PATH = 1 << 6, 1 << 10
_NEW, _SHARES = bytearray(b"new"), bytearray(b"shares")


@final
class Cell:
    """The unit of comparison: a container, or the value of one attribute.

    Attributes:
        name: its path.
        part: the container or the value; ``None`` once the graph is released, but of a tuple.
        kind: its type.
        place: the attribute whose size it counts for, and under which it is reported.
        digest, size: of its own content, without that of the nodes that it refers to.
        num_views: how many tensors and arrays with memory of their own were met first in it.
        reached: storages of which it sees more than what is saved of them.
    """

    __slots__ = ("digest", "kind", "name", "num_views", "part", "place", "reached", "size")

    def __init__(self, name: str, part: Any, place: str) -> None:
        self.name, self.part, self.place, self.kind = name, part, place, type(part)
        self.digest, self.size, self.num_views = b"", 0, 0
        self.reached: set[int] = set()


Slot: TypeAlias = Any
"""What an attribute holds: an atom itself, or a :class:`Cell`."""


@final
class Table:
    """The attributes of the owner or of an object, or members of a dict of which only some count.

    Attributes:
        name: its path; empty for the owner.
        part: the object; ``None`` once the graph is released.
        kind: its type.
        slots: atoms and cells, by attribute. A key that is a tuple stands for what torch keeps in
            tables of its own: the parts of a module, or one of its hooks with its place.
    """

    __slots__ = ("kind", "name", "part", "slots")

    def __init__(self, name: str, part: Any, slots: dict[Any, Slot] | None = None) -> None:
        self.name, self.part, self.kind = name, part, type(part)
        self.slots: dict[Any, Slot] = {} if slots is None else slots


@final
class Graph(Scanner):
    """What an owner reaches.

    Args:
        owner: the object whose attributes are walked.
        found: its objects with a state, and all names, which are added to.
        identities: numbers for what is compared by identity.

    Attributes:
        found: the same.
        generators: random number generators by name.
        cells: containers by name.
        tables: attributes of objects by name.
        opaque: objects that no checkpoint can hold, by name; they are only compared.
        soft: the names of containers, by id.
        num_references: how often a container is referred to, by name.
        views: the tensors and arrays with memory of their own, by name.
        view_names: their names, by id.
        aliases: what stands in a file for a tensor or array in memory that is saved elsewhere.
        obstacles: why a tensor or array cannot be saved, by id.
        types: classes of the enums and objects that were met.
    """

    def __init__(self, owner: object, found: ObjectNames, identities: Identities) -> None:
        super().__init__()
        self.rules = rules = found.rules
        self.found = found
        self.generators: dict[str, Generator] = {}
        self.cells: dict[str, Cell] = {}
        self.tables: dict[str, Table] = {}
        self.opaque: dict[str, Cell] = {}
        self.soft: dict[int, str] = dict(self.found.tables)
        self.num_references: dict[str, int] = {}
        self.aliases: dict[int, Alias] = {}
        self.obstacles: dict[int, str] = {}
        self.types: set[type] = set()
        self._identities = identities
        self.views: dict[str, Any] = {}
        self.view_names: dict[int, str] = {}
        self._holders = rules.holders()
        self._way: list[Any] = []
        self._base = self._place = ""
        self._cell = Cell("", None, "")
        self._waiting: deque[tuple[Callable[[], object], str]] = deque()
        self._num_deep = 0
        self._entered: set[int] = set()
        # Temporary objects must live as long as their ids are remembered.
        self._kept: list[Any] = []
        self._scan_table("", owner, members_of(owner, rules))
        for path, part in (*self.found.objects.items(), *self.found.inner.items()):
            self._enter(path, part)
        for path, part in self.found.loose.items():
            self._scan_extras(path, part)
        self._work()

    # ---- what surrounds a value

    @cached_property
    def parameters(self) -> Parameters:
        """The tensors that training updates."""
        return sort_parameters(self.found)

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """The tensors that other owners save."""
        outside = self.rules.outside.parts.items()
        return {
            name: part
            for name, part in outside
            if isinstance(part, Tensor) and not name.startswith(OF_GRAPH)
        }

    def nodes(self) -> Mapping[str, Any]:
        """Return what this graph names besides networks and the like, for other owners."""
        known = self.found.tables.values()
        named = {name: self.found.parts[name] for name in self.soft.values() if name not in known}
        # Not one dict: there may be very many views.
        return ChainMap(named, self.generators, self.views)

    @cached_property
    def layouts(self) -> Layouts:
        """Where the tensors of networks lie."""
        return layouts_of(self.found, self.parameters.loose)

    @cached_property
    def storages(self) -> Storages:
        """The tensors that are saved elsewhere."""
        return storages_of(self.found, self.parameters, self.others)

    def content(self) -> ContentScanner:
        """Return what compares values by content, with the names of objects."""
        return ContentScanner(self._identities, self.found.name_of)

    def find(self, name: str) -> Any:
        """Return the object or container with a name, of this owner or of another one."""
        return self.found.find(name)

    def target_of(self, slot: Cell) -> str | None:
        """Return the name of the container or object that an attribute refers to."""
        return self.soft.get(id(slot.part)) or self.found.names.get(id(slot.part))

    def paths(self) -> frozenset[str]:
        """Return the paths of the objects and of the parameters that no network holds."""
        return frozenset((*self.found.objects, *self.parameters.loose))

    @cached_property
    def all_cells(self) -> list[Cell]:
        """The containers and the values of attributes."""
        slots = [slot for table in self.tables.values() for slot in table.slots.values()]
        return [*self.cells.values(), *(slot for slot in slots if type(slot) is Cell)]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Which of them share memory, by name."""
        return groups_of(self.views)

    def release(self) -> None:
        """Forget the objects themselves, so that they can be freed; names and digests stay."""
        for table in self.tables.values():
            table.part = None
        for cell in (*self.all_cells, *self.opaque.values()):
            if not is_flat_tuple(cell.part):
                cell.part = None
        self.generators, self.views = {}, {}
        for each in (self.soft, self.aliases, self.obstacles, self.view_names, self._kept):
            each.clear()
        del self.found
        for name in ("parameters", "others", "layouts", "storages", "all_cells", "groups"):
            vars(self).pop(name, None)
        self.rules = Rules()

    # ---- attributes

    def _work(self) -> None:
        """Scan what was met, one node after another: nothing is read recursively."""
        while self._waiting:
            scan, self._place = self._waiting.popleft()
            scan()
            self._place = ""

    def _later(self, scan: Callable[[], object]) -> None:
        self._waiting.append((scan, self._place))

    def _scan_table(self, name: str, part: Any, members: Iterable[tuple[Any, Any]]) -> Table:
        table = self.tables[name] = Table(name, part)
        place, unsaved = self._place, self.rules.unsaved
        for key, value in members:
            kind = type(value)
            if kind in ATOMS and (kind not in (str, bytes) or len(value) < _LONG_TEXT):
                if not unsaved or path_of(name, key) not in unsaved:
                    table.slots[key] = value
                continue
            path = path_of(name, key)
            if path in unsaved or self._is_left_to_helios(value):
                continue
            self._place = place or path
            table.slots[key] = self._scan_slot(path, value)
            self._place = place
        return table

    def _is_left_to_helios(self, value: Any) -> bool:
        return is_of_the_house(value) and self.found.name_of(id(value)) is None

    def _scan_slot(self, path: str, value: Any) -> Cell:
        cell = Cell(path, value, self._place)
        self._fill_cell(cell, functools.partial(self.scan, value))
        return cell

    def _fill_cell(self, cell: Cell, scan: Callable[[list[Any]], object]) -> None:
        """Compute the digest of a cell from the tokens that are appended."""
        before = self._cell, self._base, self._way
        self._cell, self._base, self._way = cell, cell.name, []
        tokens: list[Any] = []
        try:
            scan(tokens)
            cell.digest, size = digest_of(tokens)
            cell.size += size
        except Exception as error:  # user code, called while a value is taken apart
            self.obstacles[id(cell)] = _obstacle(error)
            # What cannot be read counts as changed, if it is another object.
            cell.digest = b"%d" % self._identities.number(cell.part)
        finally:
            self._cell, self._base, self._way = before

    def _enter(self, path: str, part: Any) -> None:
        """Walk over the attributes of an object with a state, beside its ``state_dict``."""
        if id(part) in self._entered:
            return
        self._entered.add(id(part))
        if isinstance(part, nn.Module):
            self._enter_network(path, part)
        elif not self.rules.is_declared(path):
            self._scan_with_hooks(path, part, self.found.members.get(id(part), ()))

    def _enter_network(self, path: str, network: nn.Module) -> None:
        names = self.found.names
        for place, part in self.found.networks.of(network).modules:
            number, held = id(part), vars(part)
            own = f"{path}.{place}" if place else path
            if (place and number in self._entered) or self.rules.is_declared(own):
                continue
            self._entered.add(number)
            name = names.get(number, own)
            table = self._scan_with_hooks(name, part, self.found.members.get(number, ()))
            self._add_parts(table, held)
            self._enter_tensors(held.get("_parameters"))
            self._enter_tensors(held.get("_buffers"))

    def _add_parts(self, table: Table, held: Mapping[str, Any]) -> None:
        """Add the names of the parts of a module."""
        parts, names = dict[Any, Any](), self.found.names
        if isinstance(kids := held.get("_modules"), dict) and kids:
            parts[MODULES] = tuple([(key, names.get(id(kid))) for key, kid in kids.items()])
        for key in (PARAMETERS, BUFFERS):
            if isinstance(tensors := held.get(key[0]), dict) and tensors:
                parts[key] = self._tensors_in(tensors, held["_non_persistent_buffers_set"])
        table.slots = {key: slot for key, slot in table.slots.items() if key not in PARTS} | parts

    def _enter_tensors(self, tensors: Any) -> None:
        for tensor in tensors.values() if isinstance(tensors, dict) else ():
            # Most have nothing beside their content.
            if tensor is not None and (table_of(tensor) or has_hooks(tensor)):
                place = self.found.names.get(id(tensor))
                if place is not None and place not in self.tables:
                    self._scan_extras(place, tensor)

    def _scan_extras(self, name: str, part: Any) -> None:
        """Scan the attributes of a node that has a content of its own, and the hooks on it."""
        members = attributes_beside(part)
        if members or (isinstance(part, Tensor) and user_hooks_of(part)):
            self._later(functools.partial(self._scan_with_hooks, name, part, members))

    def _scan_with_hooks(self, name: str, part: Any, members: Iterable[tuple[Any, Any]]) -> Table:
        table = self._scan_table(name, part, members)
        for key, hook in user_hooks_of(part):
            self._place = ".".join([name, *map(str, key)])
            if not self.rules.is_declared(self._place):
                table.slots[key] = self._scan_slot(self._place, hook)
            self._place = ""
        return table

    def _tensors_in(self, table: Mapping[str, Any], hidden: Collection[str]) -> dict[str, Any]:
        """Return the names of tensors by key: none for no tensor, ``False`` if it is not saved."""
        name_of = self.found.name_of
        return {
            key: False if key in hidden else None if tensor is None else name_of(id(tensor))
            for key, tensor in table.items()
        }

    # ---- values

    def _path(self) -> str:
        path = ".".join([self._base, *map(str, self._way)])
        if len(path) > _LONG_PATH:
            # What is nested thousands of levels deep would have names as long.
            self._num_deep += 1
            path = f"{path[:_LONG_PATH]}~{self._num_deep}"
        return path

    def scan_at(self, key: Any, member: Any, tokens: list[Any]) -> None:
        """Append what describes a member, which has the key in its path."""
        self._way.append(key)
        self.scan(member, tokens)
        self._way.pop()

    def name_key(self, key: Any) -> Any:
        """Return what stands for the key of a dict in paths."""
        return self.found.name_key(key)

    def scan_member(self, part: Enum, tokens: list[Any]) -> None:
        """Append what describes a member of an enum, whose type is known from now on."""
        self.types.add(type(part))
        super().scan_member(part, tokens)

    def scan_container(self, part: Any, tokens: list[Any]) -> None:
        """Append the name of a container, whose content is a node of its own."""
        if type(part) is frozenset:
            self.describe(part, tokens)
            return
        name = self.soft.get(id(part)) or self.found.outside_names.get(id(part))
        if name is None:
            name = self._name_container(part)
        self.num_references[name] = self.num_references.get(name, 0) + 1
        tokens += (REF, name, _kind_of(part))

    def _name_soft(self, part: Any) -> str:
        name = self.soft[id(part)] = self.found.free(self._path())
        self.found.parts[name] = part
        self._kept.append(part)
        return name

    def _name_container(self, part: Any) -> str:
        name = self._name_soft(part)
        if name in self._holders and isinstance(part, dict):
            self._later(functools.partial(self._scan_table, name, part, list(part.items())))
        else:
            cell = self.cells[name] = Cell(name, part, self._place)
            self._later(
                functools.partial(self._fill_cell, cell, functools.partial(self.describe, part))
            )
        return name

    def add_view(self, part: Any, tokens: list[Any]) -> bool:
        """Note a tensor or array; return whether its content is described elsewhere."""
        number = id(part)
        name = self.view_names.get(number) or self.found.outside_names.get(number)
        if name is not None:
            tokens += (REF, name)
            return True
        if self.storages.may_contain(part) and self._add_alias(part, tokens):
            return True
        cell = self._cell
        name = self.view_names[number] = f"{cell.name}#{cell.num_views}"
        self.views[name] = part
        cell.num_views += 1
        cell.size += part.nbytes
        if type(part) is not np.ndarray:
            self._scan_extras(name, part)
        return False

    def _add_alias(self, part: Any, tokens: list[Any]) -> bool:
        """Describe a view of memory that is saved elsewhere by its position there."""
        target = self.storages.find(part)
        if target is None:
            if isinstance(part, np.ndarray) and (near := self.storages.find_within(part)):
                self.obstacles[id(part)] = unsupported_values.AROUND.format(near)
            return False
        held = self.storages.tensor(target.name)
        assert held is not None
        is_array = isinstance(part, np.ndarray)
        kind = np.lib.format.dtype_to_descr(part.dtype) if is_array else part.dtype
        strides = part.strides if is_array else part.stride()
        flag = bool(part.flags.writeable) if is_array else part.requires_grad
        place = tuple(part.shape), tuple(strides), target.offset
        way = "array" if is_array else "tensor"
        self.aliases[id(part)] = Alias(target.name, way, kind, *place, flag)
        self._kept.append(part)
        tokens += (_SHARES, target.name, str(kind), *place, flag, *_form_of(held))
        self._add_reach(part, held, target, tokens)
        return True

    def _add_reach(self, part: Any, held: Tensor, target: Target, tokens: list[Any]) -> None:
        begin, end = span_of(part)
        first, last = span_of(held)
        if begin >= end or (first <= begin and end <= last and fills_its_reach(held)):
            return
        if target.name in self.storages.others:
            self.obstacles[id(part)] = unsupported_values.BEYOND.format(target.name)
            is_array = isinstance(part, np.ndarray)
            tokens.append(array_sum(part) if is_array else tensor_sum(part))
        else:
            self._cell.reached.add(storage_of(held))

    def scan_object(self, part: Any, tokens: list[Any]) -> None:
        """Append the name of an object, or what describes a tensor."""
        name = self.soft.get(id(part)) or self.found.name_of(id(part))
        if name is not None:
            tokens += (REF, name, _kind_of(part))
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                # A resume creates a buffer of another form again, but keeps parameters.
                tokens += _form_of(part)
        elif isinstance(part, Tensor) and is_dense(part):
            self.scan_tensor(part, tokens)
        elif is_of_the_house(part):
            # A plugin whose method is a hook has an owner's state of its own.
            tokens += (OPAQUE, self._identities.number(part))
        elif has_state(part) and not self.rules.data_types:
            tokens += (REF, self._add_inner(part))
        elif type(part) is RemovableHandle:
            tokens += self._token_of_hook(part)
        elif is_plain_object(type(part)):
            tokens += (REF, self._name_plain(part), _kind_of(part))
        else:
            tokens += self._token_of(part)

    def _token_of_hook(self, handle: RemovableHandle) -> tuple[Any, ...]:
        """Describe the hook that a handle removes: its number is that of this process alone."""
        table = handle.hooks_dict_ref()
        if table is None or handle.id not in table:
            return OPAQUE, "removed"
        return OPAQUE, self._identities.number(table), list(table).index(handle.id)

    def _name_plain(self, part: Any) -> str:
        """Name an object of attributes, as a container: by the first path that leads to it."""
        name = self._name_soft(part)
        self.types.add(type(part))
        members = attributes_of(part).items()
        self._later(functools.partial(self._scan_table, name, part, members))
        return name

    def _add_inner(self, part: Any) -> str:
        """Name an object that only objects without a state lead to."""
        name = self.found.add_inner(self._path(), part)
        self.soft |= self.found.tables
        for path, held in self.found.inner.items():
            if id(held) not in self._entered:
                self._waiting.append((functools.partial(self._enter, path, held), ""))
        return name

    def _token_of(self, part: Any) -> tuple[Any, ...]:
        """Name an object without a state, and describe it by itself."""
        is_known = self.rules.tops is None or id(part) in self.rules.known
        name = self.found.name_any(part, self._path())
        self._kept.append(part)
        if is_generator(part):
            self.generators[name] = part
            self._scan_extras(name, part)
            return REF, name, _kind_of(part)
        if isinstance(part, type):
            self.types.add(part)
        cell = self.opaque[name] = Cell(name, part, self._place)
        scan = functools.partial(self._scan_opaque, cell)
        self._later(functools.partial(self._fill_cell, cell, scan))
        if is_known and isinstance(part, FunctionType) and not is_of_libraries(part):
            # Another function would have other variables, and is lost itself.
            self._later(
                functools.partial(self._scan_table, name, part, attributes_of(part).items())
            )
        # What setup made is compared by its content, and anything else by being another object.
        return (REF, name) if is_known else (_NEW, self._identities.number(part))

    def _scan_opaque(self, cell: Cell, tokens: list[Any]) -> None:
        """Append what describes an object that no checkpoint can hold."""
        part = cell.part
        if isinstance(part, functools.partial | MethodType):
            # What they refer to is found, and restored in place.
            self.scan_members(enumerate(parts_of_call(part)), tokens)
        elif isinstance(part, CODE):
            tokens.append(self._identities.number(part))
        else:
            name_of, number = self.found.name_of, id(part)
            content = ContentScanner(
                self._identities, lambda each: None if each == number else name_of(each)
            )
            tokens.append(content.mark(part))


def _kind_of(part: Any) -> str:
    """Return what decides whether a node of setup can take what one of a checkpoint holds."""
    if is_generator(part):
        return kind_of_generator(part)
    kind = type(part).__qualname__
    return f"{kind} {part.maxlen}" if type(part) is deque else kind


def is_flat_tuple(part: Any) -> bool:
    """Return whether a value is a tuple that says all by its identity: nothing in it can change."""
    return type(part) is tuple and len(part) < _LONG_TEXT and are_atoms(part)


def parts_of_call(part: Any) -> tuple[Any, ...]:
    """Return what a partial or a bound method refers to."""
    if isinstance(part, functools.partial):
        return part.func, part.args, part.keywords
    return (part.__self__,)


def attributes_beside(part: Any) -> list[tuple[str, Any]]:
    """Return the attributes that users have given a tensor or a generator."""
    table = table_of(part)
    return [(key, table[key]) for key in sorted(table) if not key.startswith(_OF_OTHERS)]


_OF_OTHERS = (
    *("_dynamo", "_fsdp", "_inductor", "_aot", "_is_param", "_helios", "cls_to_become"),
    "gauss_next",
)
"""How the names of attributes begin that torch and Helios give to tensors, Python to generators."""


def _obstacle(error: Exception) -> str:
    if isinstance(error, TooDeepError | RecursionError):
        return unsupported_values.TOO_DEEP.format(100)
    return unsupported_values.BROKEN.format(type(error).__name__)


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    if not has_plain_bytes(tensor):
        return ()
    size = tensor.untyped_storage().nbytes()
    geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return (str(tensor.dtype), *geometry, size)
