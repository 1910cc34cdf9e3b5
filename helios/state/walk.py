"""Records the content of an owner at one time: one walk, the code of each value, and marks."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator
from helios.core.plain_values import qualified_name
from helios.core.sharded_tensors import is_sharded
from helios.core.wrappers import class_of, unwrap
from helios.state.anchors import Anchors, Rules, has_state, path_of
from helios.state.digests import CODE, Identities, digest_of, mark_of
from helios.state.networks import (
    Network,
    hooks_of,
    is_internal_class,
    is_odd,
    is_odd_optimizer,
    left_out,
    pieces_of,
)
from helios.state.optimizers import tables_of
from helios.state.values import is_dense
from helios.storage.codes import HOLE, NATIVE, TAG, TOO_DEEP, Coder, Unsavable, are_native
from helios.storage.memory_layout import place_views
from helios.storage.plain_objects import attributes_of, is_plain_object, table_of

PARTS: Final = "<parts>"
"""The key of a module under which the names of its parts stand."""

GONE: Final[dict[str, Any]] = {TAG: "gone"}
"""The code of an attribute that training has deleted."""

BROKEN = "it cannot be inspected ({}): give it state_dict() and load_state_dict()"
TAKEN = "it replaced an object of setup() that is still in use: give it its own attribute"
LATE = "created after setup(), so that a resumed run cannot find it: create it in setup()"
_ITERATOR = (
    "an iterator, whose position is unknown: count in an attribute, and create the iterator in "
    "setup() or on_training_resume()"
)

_OF_OTHERS = (
    *("_dynamo", "_fsdp", "_inductor", "_aot", "_is_param", "_helios", "cls_to_become"),
    "gauss_next",
)
"""How the names of attributes begin that torch and Helios give to tensors, Python to generators."""


@final
class Walk(Coder):
    """The content of an owner besides its anchors.

    Args:
        owner: the owner.
        anchors: its objects with a state.

    Attributes:
        codes: by holder (the owner, an anchor, a function) and key, the code of each value.
        holders: the holders by name.
        opaque: what is only compared, by path, with the reason why it cannot be saved.
        hooks: those of user code, by the name of what has them and the table.
    """

    def __init__(self, owner: object, anchors: Anchors) -> None:
        super().__init__()
        self.anchors = anchors
        self.codes: dict[str, dict[Any, Any]] = {}
        self.holders: dict[str, Any] = {}
        self.opaque: dict[str, tuple[Any, str]] = {}
        self.hooks: dict[tuple[str, str], list[Any]] = {}
        self._unsaved = anchors.rules.unsaved
        self.may_omit = bool(self._unsaved)
        self._queue: deque[tuple[str, Any, list[tuple[Any, Any]]]] = deque()
        self._reached: set[str] = set()
        self._kept_inside: list[Any] = []
        # What loading may replace has the name that it has there.
        for path, part in [*anchors.objects.items(), *anchors.inner.items()]:
            self._enter(path, part)
        self._hold("", owner, anchors.rules.members_of(owner))
        for path, part in anchors.loose.items():
            self._hold_extras(path, part)
        while self._queue:
            self._hold(*self._queue.popleft())
        place_views(self)

    def find(self, name: str) -> Any:
        """Return the anchor, value or holder with a name."""
        for found in (self.anchors.find(name), self.parts.get(name), self.holders.get(name)):
            if found is not None:
                return found
        return None

    # ---- holders

    def _enter(self, path: str, part: Any) -> None:
        """Walk over what the ``state_dict`` of an anchor leaves out."""
        if self.anchors.rules.is_declared(path):
            return
        if not isinstance(part, nn.Module):
            is_odd = isinstance(part, Optimizer) and is_odd_optimizer(part)
            self._hold(path, part, [*left_out(part), *(tables_of(part) if is_odd else ())])
            self._hold_hooks(path, part)
            return
        for place, inner in self.anchors.network(part).modules:
            # A wrapper has the name of the module that it wraps.
            if unwrap(inner) is inner:
                self._enter_module(path_of(path, place) if place else path, inner)

    def _enter_module(self, path: str, module: nn.Module) -> None:
        names, table = self.anchors.names, vars(module)
        name = names.get(id(module), path)
        if name in self.holders or self.anchors.rules.is_declared(path):
            return
        self._hold(name, module, left_out(module))
        kids, parameters = table.get("_modules"), table.get("_parameters")
        if isinstance(kids, dict) and isinstance(parameters, dict):
            hidden = table["_non_persistent_buffers_set"]
            buffers = {key: each for key, each in table["_buffers"].items() if key not in hidden}
            named = [
                {key: None if each is None else names.get(id(each)) for key, each in held.items()}
                for held in (kids, parameters, buffers)
            ]
            order = [*table["_buffers"]] if hidden else []
            self.codes[name][PARTS] = [*named, sorted(hidden), order]
            for tensor in (*parameters.values(), *buffers.values()):
                if tensor is not None and id(tensor) in names:
                    self._hold_extras(names[id(tensor)], tensor)
        self._hold_hooks(name, module)

    def _hold_extras(self, name: str, tensor: Tensor) -> None:
        """Walk over the attributes that users have given a tensor, and its hooks."""
        if own := _own_attributes(tensor):
            self._hold(name, tensor, own)
        self._hold_hooks(name, tensor)

    def _hold_hooks(self, name: str, part: Any) -> None:
        for table, hooks in hooks_of(part).items():
            self.hooks[name, table] = hooks
            for number, hook in enumerate(hooks):
                path = f"{name}.{table}.{number}"
                if path not in self._unsaved and f"{name}.{table}" not in self._unsaved:
                    # One that training has registered is named as a hook.
                    with contextlib.suppress(Unsavable):
                        self._reach(self._name_anchor(path, hook), hook)

    def _hold(self, name: str, part: Any, members: Iterable[tuple[Any, Any]]) -> None:
        table = self.codes.setdefault(name, {})
        self.holders[name] = part
        for key, value in members:
            path = path_of(name, key) if self._unsaved or type(value) not in NATIVE else ""
            if path in self._unsaved:
                continue
            if type(value) in NATIVE and are_native((value,)):
                table[key] = value
            elif not is_internal_class(type(value)) or self.anchors.name_of(value) is not None:
                table[key] = self._code_or_hole(path, value)

    def _code_or_hole(self, path: str, value: Any) -> Any:
        known = len(self._kept)
        try:
            code = self.code(path, value)
            if path not in self.anchors.rules.lost:
                return code
            reason = ""
        except Unsavable as error:
            reason = error.reason
        except RecursionError:
            reason = TOO_DEEP
        except Exception as error:  # user code, called while a value is taken apart
            reason = BROKEN.format(type(error).__name__)
        if reason:
            self.opaque[path] = (value, reason)
        # What was met in it has no name: it is not saved there.
        for part in self._kept[known:]:
            place = self.names.pop(id(part), None)
            self.parts.pop(str(place), None)
            self.views.pop(str(place), None)
        del self._kept[known:]
        return HOLE

    # ---- values

    def refer(self, path: str, part: Any) -> dict[str, Any] | None:
        """Return a reference to an anchor, or to an earlier value."""
        name = self.anchors.name_of(part)
        if name is not None:
            return {TAG: "ref", "name": name}
        namesake = self.anchors.parts.get(path)
        if namesake is not None and (has_state(namesake) or isinstance(namesake, Tensor)):
            raise Unsavable(path, TAKEN)
        return super().refer(path, part)

    def code_other(self, path: str, value: Any) -> Any:
        """Return the code of what is of no type with a code of its own, or a reference to it."""
        if type(value) is int or isinstance(value, Enum):
            return super().code_other(path, value)
        name = self.anchors.name_of(value)
        if name is not None:
            if name not in self.holders:
                self._reach(name, value)
            return {TAG: "ref", "name": name}
        if is_internal_class(type(value)):
            return {TAG: "ref", "name": self._name_anchor(path, value)}
        if has_state(value) and not isinstance(value, Tensor):
            return self._stateful(path, value)
        if is_generator(value):
            return self._with_attributes(path, value)
        is_tuple = isinstance(value, tuple) and getattr(type(value), "_fields", None) is not None
        if isinstance(value, Tensor) or is_tuple or is_plain_object(type(value)):
            return super().code_other(path, value)
        name = self._name_anchor(path, value)
        self._reach(name, value)
        return {TAG: "ref", "name": name}

    def code_member(self, path: str, value: Any) -> Any:
        """Return the code of a member of a dict; a hole for one that is declared as unsaved."""
        return HOLE if path in self._unsaved else self.code(path, value)

    def code_field(self, path: str, value: Any) -> Any:
        """Return the code of an attribute of an object; a hole if it has none, or is Helios'."""
        is_left = path in self._unsaved or is_internal_class(type(value))
        return HOLE if is_left else self._code_or_hole(path, value)

    def name_of_key(self, key: Any) -> Any:
        """Return what stands in paths for a tensor or a network as a key."""
        return self.anchors.name_key(key)

    def neighbours(self) -> Mapping[str, Any]:
        """Return the tensors and arrays of anchors, also of other owners."""
        held = {**self.anchors.rules.outside.parts, **self.anchors.parts}
        return {
            name: part
            for name, part in held.items()
            if (is_dense(part) if isinstance(part, Tensor) else isinstance(part, np.ndarray))
        }

    def _with_attributes(self, path: str, value: Any) -> Any:
        code = super().code_other(path, value)
        if code[TAG] != "ref" and (own := _own_attributes(value)):
            self._queue.append((path, value, own))
        return code

    def _stateful(self, path: str, value: Any) -> Any:
        """Refer to an object with a state that only other objects hold."""
        if self.anchors.rules.tops is not None and id(value) not in self.anchors.rules.known:
            raise Unsavable(path, LATE)
        name = self.anchors.add(path, value, is_inner=True)
        known = len(self._kept)
        self._enter(name, value)
        # What it holds is saved there, whatever becomes of the value that leads to it.
        self._kept_inside += self._kept[known:]
        del self._kept[known:]
        return {TAG: "ref", "name": name}

    def _name_anchor(self, path: str, value: Any) -> str:
        """Name what is compared, but not saved, if setup has made it."""
        rules = self.anchors.rules
        if rules.tops is not None and id(value) not in rules.known:
            raise Unsavable(path, without_state(value))
        return self.anchors.name_of(value) or self.anchors.add_any(path, value)

    def _reach(self, name: str, part: Any) -> None:
        """Walk over what a function, a partial or a method refers to; compare anything else."""
        if name in self._reached or name in self.holders or name.startswith("<"):
            return
        self._reached.add(name)
        if is_internal_class(type(part)):
            return
        if isinstance(part, functools.partial):
            members = [("func", part.func), ("args", part.args), ("keywords", part.keywords)]
            self._queue.append((name, part, [*members, *table_of(part).items()]))
        elif isinstance(part, MethodType):
            members = [("__self__", part.__self__), ("__func__", part.__func__)]
            self._queue.append((name, part, members))
        elif type(part) is FunctionType and not _comes_from_library(part):
            fields = attributes_of(part)
            fields.pop("__wrapped__", None)
            members = [(k, v) for k, v in fields.items() if type(v) not in (ModuleType, type)]
            self._queue.append((name, part, members))
        elif is_plain_object(type(part)) and not has_state(part) and name in self.anchors.parts:
            self._queue.append((name, part, [*attributes_of(part).items()]))
        elif not isinstance(part, (*CODE, nn.Module, Tensor)) and not has_state(part):
            self.opaque[name] = (part, without_state(part))

    makers: ClassVar[dict[type, Callable[[Any, str, Any], Any]]] = {
        **Coder.makers,
        Tensor: _with_attributes,
    }


def _own_attributes(part: Any) -> list[tuple[str, Any]]:
    """Return the attributes that users have given a tensor or a generator."""
    found = attributes_of(part) if not isinstance(part, Tensor) else table_of(part)
    if not found:
        return []
    return [(key, found[key]) for key in sorted(found) if not key.startswith(_OF_OTHERS)]


def _comes_from_library(part: Any) -> bool:
    """Return whether a function belongs to torch or Helios."""
    return (getattr(part, "__module__", None) or "").startswith(("torch.", "helios.", "numpy."))


def without_state(part: Any) -> str:
    """Return why an object without a ``state_dict`` cannot be saved, and the remedy."""
    if isinstance(part, Iterator):
        return _ITERATOR
    name = qualified_name(type(part)).removeprefix("builtins.")
    if isinstance(part, (*CODE, MethodType, functools.partial)):
        return (
            f"{name} has no state_dict: keep the name of the chosen object in an attribute, and "
            "look it up by that name"
        )
    if isinstance(part, Dataset | DataLoader):
        return f"{name} has no state_dict: create it in setup(), or at each start in a start event"
    return (
        f"{name} has no state_dict: give it state_dict() and load_state_dict(), and create it in "
        "setup()"
    )


# ---- with marks

Form = list[Any]
"""The type, the shape and the strides of a tensor."""


@final
class Snapshot:
    """The content of an owner at one time.

    Args:
        owner: the object.
        rules: what counts of it.
        identities: numbers for what is compared by identity.

    Attributes:
        anchors: the objects with a state.
        walk: the values beside them.
        identities: numbers for what is compared by identity.
    """

    def __init__(self, owner: object, rules: Rules, identities: Identities) -> None:
        self.anchors = Anchors(owner, rules)
        self.walk = Walk(owner, self.anchors)
        self.identities = identities
        self._names: dict[int, str] | None = None
        self._names_of_objects: dict[int, str] | None = None

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
        """Return a mark that is equal for equal content, with anchors and values by their names."""
        if self._names is None:
            self._names = {**self.walk.names, **self.anchors.names}
        # A name says nothing of the content of what has it.
        own = self._names.pop(id(value), None)
        mark = mark_of(value, self.identities, self._names)
        if own is not None:
            self._names[id(value)] = own
        return mark

    def mark_of_content(self, value: Any) -> bytes:
        """Return a mark that is equal for equal content, down to elements of tensors."""
        if self._names_of_objects is None:
            self._names_of_objects = {
                id(part): name
                for name, part in self.anchors.parts.items()
                if not isinstance(part, dict | list | Tensor)
            }
        return mark_of(value, self.identities, self._names_of_objects)

    @property
    def objects(self) -> dict[str, Any]:
        """The objects with a state by path, also those that only other objects hold."""
        return {**self.anchors.objects, **self.anchors.inner}

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers that a loader may reach, also those of other owners."""
        parts = {**self.anchors.rules.outside.parts, **self.objects}
        return [part for part in reversed(parts.values()) if isinstance(part, Optimizer)]

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
        modules = {
            n: self.walk.holders[n] for n, table in self.walk.codes.items() if PARTS in table
        }
        for name, module in modules.items():
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

    def odd_networks(self) -> Iterator[tuple[str, Network]]:
        """Yield the networks whose ``state_dict`` user code overrides."""
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
