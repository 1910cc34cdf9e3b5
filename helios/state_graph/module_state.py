"""Saves what torch's ``state_dict`` leaves out: frozen parameters, modes, gradients, loose tensors.

Names are those of the module itself, whether it is compiled or not, so that a checkpoint of one
loads into the other.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.memory import storage_of
from helios.core.utils import parameters_of
from helios.core.wrappers import BareNames, bare_state_dict, unwrap
from helios.errors import StateError
from helios.protocols import Stateful
from helios.state_graph.memory_groups import Storages
from helios.state_graph.network_parts import Networks
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.registered_hooks import OF_OPTIMIZERS, is_known
from helios.state_graph.values import ATOMS

Shape: TypeAlias = dict[str, object]
"""What a state needs to fit, by name, with the class under the empty name."""

_SHOWN = 3


def state_of(value: Stateful) -> dict[str, Any]:
    """Return the state of an object.

    The state of a module has bare names; that of a torch scheduler leaves out what its
    ``state_dict`` includes only because it is an attribute.
    """
    if isinstance(value, LRScheduler):
        return _without_odd_attributes(value, value.state_dict())
    return bare_state_dict(value)


def complete(optimizers: Iterable[Optimizer]) -> bool:
    """Create what torch's methods need; published wrappers do not call ``super().__init__()``.

    Returns:
        Whether an optimizer lacked anything.
    """
    has_lacked = False
    for table in map(vars, optimizers):
        has_lacked |= not {*OF_OPTIMIZERS, "defaults"} <= table.keys()
        for name in OF_OPTIMIZERS:
            table.setdefault(name, OrderedDict())
        # Otherwise load_state_dict() would add it, and a resumed optimizer differ from a new one.
        has_lacked |= "differentiable" not in table.setdefault("defaults", {})
        table["defaults"].setdefault("differentiable", False)
    return has_lacked


def _without_odd_attributes(scheduler: LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what PyTorch's ``state_dict`` of schedulers includes only because it exists.

    Attributes that users add may be objects or generators, which are searched separately.
    """
    attributes = vars(scheduler)
    is_stock = type(scheduler).state_dict.__module__.startswith("torch.")
    odd = [
        key
        for key, value in state.items()
        if is_stock and attributes.get(key) is value and not is_simple(value)
    ]
    return {key: value for key, value in state.items() if key not in odd}


def is_simple(value: Any) -> bool:
    """Return whether a value consists of tensors and of values without members."""
    if isinstance(value, dict | list | tuple):
        members = value.values() if isinstance(value, dict) else value
        return all(map(is_simple, members))
    return type(value) in ATOMS or isinstance(value, Tensor)


def method_of(part: object, name: str) -> Any:
    """Return the method that a call would use: that of the object itself, or of its class."""
    return vars(part).get(name) or getattr(type(part), name)


def is_loaded_by_torch(module: nn.Module) -> bool:
    """Return whether ``load_state_dict`` of a network is torch's own."""
    return is_known(method_of(module, "load_state_dict"))


def load_state(
    value: Stateful, state: dict[str, Any], omitted: Mapping[str, Any] | None = None
) -> None:
    """Load the state of an object, which keeps no part of it: the state is not changed.

    Args:
        value: the object.
        state: its state.
        omitted: of a network, the names that are ``absent`` in the state and ``unknown`` to torch.
    """
    if not isinstance(value, nn.Module):
        if isinstance(value, Optimizer):
            complete([value])
        # Optimizers and schedulers continue to use the tensors and lists that they load.
        value.load_state_dict(copy.deepcopy(state))
        if isinstance(value, Optimizer):
            _restore_types(value, state)
        return
    bare = BareNames(value)
    names = {bare.of(name): name for name in value.state_dict()}
    saved = _versions(state)
    versions = {
        name: saved[bare.of(name)] for name, _ in value.named_modules() if bare.of(name) in saved
    }
    entries = {
        names.get(name, name): part if isinstance(part, Tensor) else copy.deepcopy(part)
        for name, part in state.items()
    }
    _load_network(value, _module_state(entries, versions), bare, omitted)
    if _places(value.state_dict()) & _places(entries):
        # A module that keeps tensors instead of copying them, as metrics do.
        entries = copy.deepcopy(entries)
        _load_network(value, _module_state(entries, versions), bare, omitted)


def _load_network(
    value: nn.Module, state: Any, bare: BareNames, omitted: Mapping[str, Any] | None
) -> None:
    if omitted is None or not is_loaded_by_torch(value):
        value.load_state_dict(state)
        return
    missing, unexpected = value.load_state_dict(state, strict=False)
    lacking = sorted({*map(bare.of, missing)} - {*omitted["absent"]})
    unknown = sorted({*map(bare.of, unexpected)} - {*omitted["unknown"]})
    if lacking or unknown:
        raise StateError(
            f"its parts {', '.join(lacking) or 'none'} are not in the state, and it has no parts "
            f"{', '.join(unknown) or 'that are lacking'} for what is there."
        )


def _places(entries: Mapping[str, Any]) -> set[int]:
    return {storage_of(part) for part in entries.values() if isinstance(part, Tensor)} - {0}


def _restore_types(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Undo that torch rounds float32 copies of bfloat16 parameters to their parameter's type."""
    parameters = parameters_of(optimizer)
    groups = state.get("param_groups", ())
    numbers = [number for group in groups for number in group["params"]]
    # By identity: a published optimizer has addresses among its keys, and one that is that of a
    # parameter by chance would be compared with it.
    entries = {id(key): entry for key, entry in optimizer.state.items() if isinstance(key, Tensor)}
    for number, parameter in zip(numbers, parameters, strict=False):
        loaded = entries.get(id(parameter), {})
        for name, saved in state.get("state", {}).get(number, {}).items():
            if name in loaded:
                loaded[name] = _typed(loaded[name], saved)


def _typed(loaded: Any, saved: Any) -> Any:
    """Return loaded state with the types of tensors as they were saved, at any depth."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        fits = loaded.dtype == saved.dtype
        return loaded if fits else saved.detach().to(loaded.device, copy=True)
    if type(loaded) is dict and isinstance(saved, dict):
        return {key: _typed(part, saved.get(key)) for key, part in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        return type(loaded)(map(_typed, loaded, saved))
    return loaded


def kind_of(part: object) -> str:
    """Return the name of an object's class; for a compiled module, that of the inner one."""
    return type(unwrap(part)).__name__


def shape_of(part: Stateful, networks: Networks) -> Shape:
    """Return the classes and parameters of an object; nothing for a lazy module.

    Lazy modules get their sizes and even their class from the first batch.
    """
    if not isinstance(part, nn.Module):
        return {"": kind_of(part)}
    network = networks.of(part)
    if any(issubclass(kind, LazyModuleMixin) for kind in network.kinds):
        return {}
    classes = {place: type(inner).__name__ for place, inner in network.modules}
    return {**classes, **{place.name: "parameter" for place in network.registered}}


def difference(before: Shape, now: Shape) -> str:
    """Describe how two shapes differ; empty if they are equal."""
    texts = [
        f"{key or 'class'}: {before.get(key, 'none')}, now {now.get(key, 'none')}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "; ".join(texts[:_SHOWN] + more)


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the saved buffers of one module, without its submodules."""
    hidden = vars(module).get("_non_persistent_buffers_set", ())
    for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if key not in hidden:
            yield key, buffer


def structure_since(before: dict[str, Shape], found: ObjectNames) -> dict[str, str]:
    """Describe what no longer has the shape that it had after setup, by path.

    Args:
        before: results of :func:`shape_of` by path.
        found: what the owner holds now.
    """
    misfits: dict[str, str] = {}
    for path, part in found.objects.items():
        known, shape = before.get(path), shape_of(part, found.networks)
        if known and known != shape:
            misfits[path] = difference(known, shape)
    return misfits


def _versions(state: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of the classes that wrote a module's state, which torch migrates by."""
    versions = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    return dict(versions or {})


def _module_state(entries: dict[str, Any], versions: dict[str, Any]) -> OrderedDict[str, Any]:
    state = OrderedDict(entries)
    if versions:
        vars(state)["_metadata"] = OrderedDict(versions)
    return state


@dataclass(frozen=True)
class Parameters:
    """The tensors that training updates, each once.

    Attributes:
        of_modules: parameters by module path and name.
        loose: those in no discovered module: ``nn.Parameter`` among the attributes, by path, and
            others that a discovered optimizer updates, as ``<optimizer>.<group>.<index>`` if no
            attribute holds them.
        leaves: leaf tensors among the attributes, by path.
    """

    of_modules: dict[str, dict[str, Tensor]]
    loose: dict[str, Tensor]
    leaves: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """Return the parameters of modules by path and name in one."""
        return {
            f"{path}.{name}": tensor
            for path, table in self.of_modules.items()
            for name, tensor in table.items()
        }

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors that may have a gradient; those in no module under ``""``."""
        return {**self.of_modules, "": {**self.leaves, **self.loose}}


def sort_parameters(found: ObjectNames) -> Parameters:
    """Return the tensors that training updates, among those found."""
    outside, seen = found.outside_names, set[int]()
    of_modules: dict[str, dict[str, Tensor]] = {}
    for path, module in found.modules().items():
        table = found.networks.of(module).parameters
        own = [(name, part) for name, part in table if id(part) not in seen]
        of_modules[path] = {name: part for name, part in own if id(part) not in outside}
        seen.update([id(part) for _, part in own])
    leaves = {
        path: leaf
        for path, leaf in found.leaves.items()
        if id(leaf) not in seen and id(leaf) not in outside
    }
    return Parameters(of_modules, found.loose, leaves)


def storages_of(
    found: ObjectNames, parameters: Parameters, others: Mapping[str, Tensor] | None = None
) -> Storages:
    """Return all parameters, buffers and loose tensors, and those that others save, by name."""
    named = dict(others or {}) | {
        f"{path}.{name}": tensor
        for path, table in (*parameters.of_modules.items(), ("", parameters.loose))
        for name, tensor in table.items()
    }
    for path, module in found.modules().items():
        for name, part in found.networks.of(module).modules:
            place = f"{path}.{name}"
            named |= {f"{place}.{key}": buffer for key, buffer in _saved_buffers(part)}
    return Storages(named, others or ())


def flags_of(found: ObjectNames, parameters: Parameters) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters and of submodules in evaluation mode."""
    submodules = {
        # A wrapper has the modes of the module that it wraps.
        path: dict(found.networks.of(module).modules).items()
        for path, module in found.modules().items()
    }
    tables = {**parameters.of_modules, "": parameters.loose}
    return {
        path: {
            "frozen": [name for name, tensor in table.items() if not tensor.requires_grad],
            "eval": [name for name, part in submodules.get(path, ()) if not part.training],
        }
        for path, table in tables.items()
    }


def load_flags(
    flags: dict[str, dict[str, list[str]]], found: ObjectNames, parameters: Parameters
) -> None:
    """Freeze and unfreeze parameters and set modes as recorded by :func:`flags_of`."""
    places = places_of(found, parameters)
    saved = {path: table["frozen"] for path, table in flags.items()}
    frozen = {id(places.get((path, name))) for path, names in saved.items() for name in names}
    for path, table in {**parameters.of_modules, "": parameters.loose}.items():
        for tensor in table.values() if path in flags else ():
            if tensor.requires_grad == (id(tensor) in frozen):
                tensor.requires_grad_(id(tensor) not in frozen)
    for path, module in found.modules().items():
        if path not in flags:
            # For example a plugin that now holds another network.
            continue
        resting = set(flags[path]["eval"])
        bare = BareNames(module)
        for name, part in module.named_modules():
            part.training = bare.of(name) not in resting


def places_of(found: ObjectNames, parameters: Parameters) -> dict[tuple[str, str], Tensor]:
    """Return the tensors by module and name; a shared one may be saved under any of its names."""
    places = {("", name): tensor for name, tensor in parameters.tables()[""].items()}
    for path, module in found.modules().items():
        bare = BareNames(module)
        for name, tensor in module.named_parameters(remove_duplicate=False):
            places[path, bare.of(name)] = tensor
    return places


def grads_of(parameters: Parameters) -> dict[str, dict[str, Tensor]]:
    """Return the gradients of an open window, if there are any."""
    grads = {
        path: {name: part.grad for name, part in table.items() if part.grad is not None}
        for path, table in parameters.tables().items()
    }
    return {path: table for path, table in grads.items() if table}


def load_grads(
    grads: dict[str, dict[str, Tensor]], found: ObjectNames, parameters: Parameters
) -> None:
    """Set gradients as recorded by :func:`grads_of`; other parameters get none."""
    places = places_of(found, parameters)
    saved = {
        id(places.get((path, name))): grad
        for path, table in grads.items()
        for name, grad in table.items()
    }
    for table in parameters.tables().values():
        for tensor in table.values():
            grad = saved.get(id(tensor))
            tensor.grad = None if grad is None else grad.detach().to(tensor.device, copy=True)
