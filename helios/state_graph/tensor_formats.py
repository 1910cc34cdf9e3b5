"""Saves types, shapes and memory formats of tensors, and which buffers exist.

``load_state_dict`` casts to the type that ``setup`` built and rejects another shape. What training
has changed since ``setup`` is therefore saved by name, and recreated before values are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from helios.errors import StateError
from helios.state_graph.module_state import Parameters
from helios.state_graph.network_parts import NamedTensor, Network
from helios.state_graph.object_names import ObjectNames

_Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
_Kind: TypeAlias = tuple[bool, bool]
"""Whether a buffer is persistent, and whether it is ``None``."""

_SHOWN = 3


@dataclass(frozen=True)
class Forms:
    """The tensors of one network, by bare name, or those of no network.

    Attributes:
        tensors: type, shape and strides of parameters and persistent buffers.
        buffers: all registered buffers, by submodule.
    """

    tensors: dict[str, _Form]
    buffers: dict[str, dict[str, _Kind]]


def forms_of(found: ObjectNames, parameters: Parameters) -> dict[str, Forms]:
    """Return the forms by path of the network; those of loose parameters under the empty path.

    Networks with lazy modules have none: the first batch determines the form of their tensors.
    """
    loose = {name: _form(tensor) for name, tensor in parameters.loose.items()}
    forms = {"": Forms(loose, {})}
    for path, module in found.all_modules().items():
        network = found.networks.of(module)
        if not any(isinstance(part, LazyModuleMixin) for _, part in network.modules):
            tensors = {name: _form(tensor) for name, _, _, tensor in saved_tensors(network)}
            forms[path] = Forms(tensors, _buffers_of(network))
    return forms


def changed_forms(before: Mapping[str, Forms], now: Mapping[str, Forms]) -> dict[str, Any]:
    """Return what has another form than after setup, by path.

    Returns:
        ``tensors``: names of parameters and buffers; ``buffers``: by submodule the kinds of those
        whose registration differs, ``None`` for one that is gone.
    """
    changed: dict[str, Any] = {}
    for path in before.keys() & now.keys():
        old, new = before[path], now[path]
        tensors = [name for name, form in new.tensors.items() if old.tensors.get(name) != form]
        buffers = {
            place: differing
            for place, kinds in new.buffers.items()
            if kinds != old.buffers.get(place, {})
            and (differing := _differing(old.buffers.get(place, {}), kinds))
        }
        if tensors or buffers:
            changed[path] = {"tensors": tensors, "buffers": buffers}
    return changed


def restore_forms(
    changed: Mapping[str, Any], found: ObjectNames, parameters: Parameters, state: dict[str, Any]
) -> None:
    """Give tensors the forms that they had in training; parameters stay the same objects.

    Args:
        changed: what :func:`changed_forms` returned.
        found: what setup has made.
        parameters: its parameters.
        state: the captured state, which contains the tensors.
    """
    if "" in changed:
        for name in changed[""]["tensors"]:
            if name in parameters.loose and name in state["parameters"]:
                _reform(parameters.loose[name], state["parameters"][name])
    for path, module in found.all_modules().items():
        saved = _states(state).get(path)
        if path in changed and saved is not None:
            _register(module, changed[path]["buffers"], saved)
            names = set(changed[path]["tensors"])
            for name, owner, key, tensor in list(saved_tensors(Network(module))):
                if name in names and name in saved and _form(tensor) != _form(saved[name]):
                    if isinstance(tensor, nn.Parameter):
                        _reform(tensor, saved[name])
                    else:
                        owner._buffers[key] = _empty_like(saved[name], tensor.device)  # noqa: SLF001 - setattr would refuse a view


def casts(found: ObjectNames, state: dict[str, Any]) -> list[str]:
    """Describe tensors of networks for which ``setup`` has built another type than was saved."""
    texts: list[str] = []
    for path, module in found.all_modules().items():
        saved = _states(state).get(path, {})
        differing: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for name, _, _, tensor in saved_tensors(Network(module)):
            before = saved.get(name)
            if isinstance(before, Tensor) and before.dtype != tensor.dtype:
                names = differing.setdefault((before.dtype, tensor.dtype), [])
                names.append(f"{path}.{name}")
        for (old, new), names in differing.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            texts.append(f"{', '.join(names[:_SHOWN])}{more} ({old}, now {new})")
    return texts


def fill(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Fill a tensor in place, because optimizers know it by identity.

    Raises:
        StateError: if its shape is not the saved one.
    """
    if tensor.shape != saved.shape:
        raise StateError(
            f"{name}: the saved tensor has the shape {tuple(saved.shape)}, the current one "
            f"{tuple(tensor.shape)}. Build it in setup() as it was when the state was saved."
        )
    with torch.no_grad():
        tensor.copy_(saved)


def _states(state: Mapping[str, Any]) -> dict[str, Any]:
    states = {**state["objects"], **state.get("inner", {})}
    for path, omitted in state.get("omitted", {}).items():
        states[path] = {**states.get(path, {}), **omitted["values"]}
    return states


def saved_tensors(network: Network) -> Iterator[NamedTensor]:
    """Yield the tensors of a network, without those of lazy modules that have no form yet."""
    return (item for item in network.tensors if not is_lazy(item.tensor))


def _buffers_of(network: Network) -> dict[str, dict[str, _Kind]]:
    kinds: dict[str, dict[str, _Kind]] = {}
    for place, part in network.with_tables():
        hidden = vars(part)["_non_persistent_buffers_set"]
        # The value of a non-persistent one is saved as a plain value.
        kinds[place] = {
            key: (key not in hidden, key not in hidden and buffer is None)
            for key, buffer in vars(part)["_buffers"].items()
        }
    return kinds


def _form(tensor: Tensor) -> _Form:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor.dtype, tuple(tensor.shape), strides


def _differing(before: Mapping[str, _Kind], now: Mapping[str, _Kind]) -> dict[str, _Kind | None]:
    gone = {key: None for key, (is_persistent, _) in before.items() if is_persistent}
    kinds: dict[str, _Kind | None] = {**gone, **now}
    return {key: kind for key, kind in kinds.items() if before.get(key) != kind}


def _register(
    module: nn.Module, changed: Mapping[str, dict[str, _Kind | None]], saved: Mapping[str, Any]
) -> None:
    """Register buffers as they were; those with a value get an empty tensor of its form."""
    network = Network(module)
    device = next((tensor.device for _, _, _, tensor in saved_tensors(network)), None)
    for place, part in list(network.with_tables()):
        buffers, hidden = vars(part)["_buffers"], vars(part)["_non_persistent_buffers_set"]
        prefix = f"{place}." if place else ""
        for key, kind in changed.get(place, {}).items():
            if kind is None:
                buffers.pop(key, None)
                hidden.discard(key)
                continue
            is_persistent, is_none = kind
            vars(part).pop(key, None)
            part.register_buffer(key, buffers.get(key), persistent=is_persistent)
            if is_none:
                buffers[key] = None
            elif is_persistent and buffers[key] is None and f"{prefix}{key}" in saved:
                buffers[key] = _empty_like(saved[f"{prefix}{key}"], device)


def _empty_like(saved: Tensor, device: torch.device | None) -> Tensor:
    return torch.empty_like(saved, device=device, requires_grad=False)


def _reform(tensor: Tensor, saved: Tensor) -> None:
    # Optimizers know it by identity. Its gradient, of the old form, is in the state.
    tensor.grad = None
    tensor.data = _empty_like(saved, tensor.device)
