"""Saves what optimizers hold beside a custom ``state_dict``, and which objects share their tables.

A ``state_dict`` that the class or a hook redefines may leave out momentum or slow weights, or key
them by the address of a parameter, as published wrappers do. The ``state`` and the settings of
groups are therefore saved by names of parameters and restored after such a state is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.equality import same
from helios.core.memory import has_plain_bytes
from helios.state_graph.module_state import is_simple, method_of
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.optimizers import names_of, optimizers_of, tensors_of
from helios.state_graph.registered_hooks import is_known
from helios.state_graph.state_dict_coverage import parts_of

_Entry: TypeAlias = tuple[Any, Any, Any]
"""The key in ``state``, the key in a dict there (``None`` for another value), and the value."""

_ODD = "an entry that the optimizer's state_dict leaves out and that no checkpoint can hold"


def optimizer_tables(
    found: ObjectNames, states: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tables of optimizers with a custom ``state_dict``.

    Args:
        found: what the owner holds now.
        parameters: its parameters.
        states: what objects returned, by path.

    Returns:
        By path of the optimizer: ``entries`` of its ``state``, as name of the parameter, key, value
        and whether it is on the CPU; ``odd``, names and keys of entries that are not among them;
        ``groups``, their settings. And what is lost, with the reason, by path.
    """
    tables: dict[str, Any] = {}
    lost: dict[str, str] = {}
    names = names_of(found)
    for path, optimizer in optimizers_of(found).items():
        if not _is_odd(optimizer):
            continue
        held = {number for number, _ in parts_of(states[path])}
        entries: list[list[Any]] = []
        odd: list[list[Any]] = []
        for parameter, key, value in _entries_of(optimizer):
            name = _name(parameter, names)
            if _is_kept(value) and name is not None:
                is_on_host = isinstance(value, Tensor) and value.device.type == "cpu"
                entries.append([name, key, _detached(value), is_on_host])
                continue
            odd.append([name, key])
            if id(value) not in held:
                lost[f"{path}.state.{name}.{key}"] = _ODD
        groups = [_settings(group) for group in optimizer.param_groups]
        tables[path] = {"entries": entries, "odd": odd, "groups": groups}
    return tables, lost


def restore_tables(tables: Mapping[str, Any], found: ObjectNames) -> None:
    """Restore what :func:`optimizer_tables` returned, after states are loaded."""
    tensors = tensors_of(found)
    for path, optimizer in optimizers_of(found).items():
        if path in tables:
            _restore(optimizer, tables[path], tensors)


def _restore(optimizer: Optimizer, saved: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    odd = {(name, key) for name, key in saved["odd"]}
    wanted = {(name, key) for name, key, _, _ in saved["entries"]} | odd
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    for parameter, key, _ in list(_entries_of(optimizer)):
        if (_name(parameter, names), key) not in wanted:
            _drop(optimizer.state, parameter, key)
    for name, key, value, is_on_host in saved["entries"]:
        parameter = _key(name, tensors)
        table = optimizer.state if key is None else optimizer.state[parameter]
        place = parameter if key is None else key
        # A correct entry stays the same object: others may refer to it.
        if not _is_present(table.get(place), value):
            table[place] = _placed(value, parameter, is_on_host=is_on_host)
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=False):
        for key, value in settings.items():
            if not _is_present(group.get(key), value):
                group[key] = copy.deepcopy(value)


def _is_odd(optimizer: Optimizer) -> bool:
    hooks = vars(optimizer).get("_optimizer_state_dict_post_hooks", {}).values()
    return not (is_known(method_of(optimizer, "state_dict")) and all(map(is_known, hooks)))


def _entries_of(optimizer: Optimizer) -> Iterator[_Entry]:
    for parameter, value in optimizer.state.items():
        if isinstance(value, dict):
            yield from ((parameter, key, part) for key, part in value.items())
        else:
            yield parameter, None, value


def _drop(state: dict[Any, Any], parameter: Any, key: Any) -> None:
    if key is None:
        del state[parameter]
        return
    del state[parameter][key]
    if not state[parameter]:
        del state[parameter]


def _name(parameter: Any, names: Mapping[int, str]) -> Any:
    """Return the key of ``state`` in a file, or ``None`` for a tensor without a name."""
    if not isinstance(parameter, Tensor):
        return parameter
    return f"<{names[id(parameter)]}>" if id(parameter) in names else None


def _key(name: Any, tensors: Mapping[str, Tensor]) -> Any:
    return tensors.get(name[1:-1], name) if isinstance(name, str) else name


def _is_kept(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) in (Tensor, nn.Parameter) and has_plain_bytes(value)
    return is_simple(value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in group.items() if key != "params" and _is_kept(part)}


def _is_present(present: Any, saved: Any) -> bool:
    # Lists and the like may hold tensors, and hardly anything else refers to them.
    return not isinstance(saved, list | tuple | dict) and same(present, saved)


def _placed(value: Any, parameter: Any, *, is_on_host: bool) -> Any:
    if not isinstance(value, Tensor) or is_on_host or not isinstance(parameter, Tensor):
        return copy.deepcopy(value)
    return value.to(parameter.device, copy=True)


class _View(NamedTuple):
    """An attribute that is the table of an optimizer."""

    holder: dict[str, Any]
    attribute: str
    optimizer: Optimizer
    table: str


def shared_tables(objects: Mapping[str, object]) -> list[_View]:
    """Return the attributes of objects that are tables of an optimizer among them."""
    views: list[_View] = []
    optimizers = [part for part in objects.values() if isinstance(part, Optimizer)]
    owners: dict[int, tuple[Optimizer, str]] = {}
    for part in optimizers:
        for table in ("param_groups", "state"):
            owners.setdefault(id(getattr(part, table)), (part, table))
    for holder in objects.values():
        attributes = {} if isinstance(holder, nn.Module) else getattr(holder, "__dict__", {})
        for name, value in attributes.items():
            owner = owners.get(id(value))
            if owner is not None and (owner[0] is not holder or name != owner[1]):
                views.append(_View(attributes, name, *owner))
    return views


def share_tables(views: list[_View]) -> None:
    """Let attributes share the tables of optimizers again: loading has replaced each table."""
    for view in views:
        view.holder[view.attribute] = getattr(view.optimizer, view.table)
