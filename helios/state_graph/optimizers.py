"""Tracks which parameters an optimizer updates, by name and order, and what its state leaves out.

torch saves the state of an optimizer by position, and gradients are clipped in that order. A set of
names in ``setup`` orders parameters differently at every start, so positions are saved with names,
and a resume brings the groups into the saved order.

A ``state_dict`` that the class or a hook redefines may leave out momentum or slow weights, or key
them by the address of a parameter, as published wrappers do. The ``state`` and the settings of
groups are then saved by names of parameters, too, and restored after such a state is loaded.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.memory import has_plain_bytes, same
from helios.core.utils import parameters_of
from helios.errors import StateError
from helios.state_graph.module_state import Parameters, is_simple, method_of
from helios.state_graph.object_names import ObjectNames, as_written
from helios.state_graph.registered_hooks import is_known
from helios.state_graph.state_dict_coverage import parts_of

Members: TypeAlias = list[list[str]]
"""The names of an optimizer's parameters by group, in order."""

_Tensors: TypeAlias = list[list[Tensor]]

_LOGGER = logging.getLogger(__name__)
_SHOWN = 6


@dataclass(frozen=True)
class OptimizerGroups:
    """Which optimizer updates which parameters at one time.

    Attributes:
        names_by_group: names of the parameters of each group, by path of the optimizer.
        unnamed: those of them that no attribute of the model holds, by path of the optimizer.
        stale: names of parameters that an optimizer has state of but no longer updates.
        scheduled: the path of the optimizer whose learning rates a scheduler sets, by its path.
    """

    names_by_group: dict[str, Members]
    unnamed: dict[str, set[str]]
    stale: dict[str, list[str]]
    scheduled: dict[str, str]


def groups_of_optimizers(found: ObjectNames, parameters: Parameters) -> OptimizerGroups:
    """Return which optimizer updates which parameters now."""
    optimizers = optimizers_of(found)
    names = names_of(found) if optimizers else {}
    names_by_group = {
        path: [[names[id(tensor)] for tensor in group["params"]] for group in part.param_groups]
        for path, part in optimizers.items()
    }
    nameless = {
        found.names[id(tensor)]
        for part in (optimizers.values() if found.nameless else ())
        for tensor in parameters_of(part)
        if found.names.get(id(tensor)) in found.nameless
    }
    unnamed = (parameters.loose.keys() - parameters.leaves.keys()) | nameless
    paths = {id(part): path for path, part in optimizers.items()}
    scheduled = {
        path: paths[id(part.optimizer)]
        for path, part in found.objects.items()
        if isinstance(part, LRScheduler) and id(part.optimizer) in paths
    }
    return OptimizerGroups(
        names_by_group,
        {
            path: unnamed and unnamed.intersection(_flat(each))
            for path, each in names_by_group.items()
        },
        {path: _stale(part, names) for path, part in optimizers.items()},
        scheduled,
    )


def _stale(optimizer: Optimizer, names: dict[int, str]) -> list[str]:
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return []
    # torch's own error shows only the address of such a parameter.
    moved = set(map(id, parameters_of(optimizer)))
    held = [id(part) for part in optimizer.state if isinstance(part, Tensor)]
    return sorted(names.get(part, "an unnamed one") for part in held if part not in moved)


def changes_of_optimizers(
    before: OptimizerGroups, found: ObjectNames, parameters: Parameters
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is saved of optimizers besides their own state, and what a resume cannot rebuild.

    Args:
        before: the groups after ``setup``.
        found: what the owner holds now.
        parameters: its parameters.

    Returns:
        ``members``: the names of parameters by group; ``built``: those that setup gave to
        optimizers that training has changed since, to recognize them in a resume; ``drivers``: the
        optimizer of each scheduler. And what does not match setup, by path.

    Raises:
        StateError: if an optimizer has state that its ``state_dict`` cannot return.
    """
    now = groups_of_optimizers(found, parameters)
    for path, left in now.stale.items():
        if left:
            raise StateError(
                f"{path} must have all parameters in its groups that it has state of, to return "
                f"its state_dict, but it has none of these: {_some(left)}. Delete their state when "
                "they leave a group: del optimizer.state[parameter]."
            )
    built: dict[str, Members] = {}
    misfits: dict[str, str] = {}
    for path in sorted(before.names_by_group.keys() & now.names_by_group.keys()):
        old, new = before.names_by_group[path], now.names_by_group[path]
        if old != new and _unordered(old) != _unordered(new):
            built[path] = old
        if added := sorted(now.unnamed[path] - before.unnamed[path]):
            shown = [as_written(name, optimizers_of(found)) for name in added]
            misfits[path] = f"updates what no attribute of the model holds: {_some(shown)}"
    for path in sorted(before.scheduled.keys() & found.objects.keys()):
        if before.scheduled[path] != (other := now.scheduled.get(path, "another optimizer")):
            misfits[path] = f"set the learning rates of {before.scheduled[path]}, now {other}"
        elif id(found.objects[path]) not in found.rules.known:
            misfits[path] = "another object than that of setup(), which goes on stepping"
    state = {"members": now.names_by_group, "built": built, "drivers": now.scheduled}
    return state, misfits


@contextmanager
def collecting(unfit: dict[str, str] | None, path: str) -> Iterator[None]:
    """Collect why an object cannot have its state, in a table; ``None`` to raise it."""
    try:
        yield
    except StateError as error:
        if unfit is None:
            raise
        unfit[path] = str(error)


def arrange(
    found: ObjectNames,
    state: dict[str, Any],
    parameters: Parameters,
    unfit: dict[str, str] | None = None,
) -> None:
    """Bring the parameters of optimizers into the saved groups and order.

    Args:
        found: what the owner holds now.
        state: the saved state.
        parameters: the parameters of the owner.
        unfit: objects to pass over, by path; receives others, with the reason, instead of an error.

    Raises:
        StateError: if an optimizer has other parameters, or they cannot be brought into that order;
            then nothing is changed.
    """
    present = groups_of_optimizers(found, parameters)
    states = {**state["objects"], **state.get("inner", {})}
    tensors = tensors_of(found)
    arrange_covered(found, state, parameters)
    plans: dict[str, _Tensors] = {}
    for path, part in optimizers_of(found).items():
        if path not in states or path in (unfit or {}):
            continue
        now = present.names_by_group[path]
        saved = state["members"].get(path, now)
        built = state["built"].get(path, saved)
        with collecting(unfit, path):
            plan = _plan(path, part, [saved, built], tensors)
            _check_functions(path, part, plan, found)
            plans[path] = plan
    _check_drivers(present.scheduled, state["drivers"], unfit)
    for path, part in optimizers_of(found).items():
        if path in plans:
            _regroup(part, plans[path], {id(tensor): name for name, tensor in tensors.items()})


def arrange_covered(found: ObjectNames, state: dict[str, Any], parameters: Parameters) -> None:
    """Bring optimizers whose state another ``state_dict`` contains into the saved order.

    Its loading is by position. An optimizer with other groups now is left to it, and checked by
    :func:`check_covered`.
    """
    tensors = tensors_of(found)
    names = {id(tensor): name for name, tensor in tensors.items()}
    for path, part, saved in _covered(found, state):
        if set(_flat(saved)) <= tensors.keys():
            plan = [[tensors[name] for name in group] for group in saved]
            if _keys(group["params"] for group in part.param_groups) == _keys(plan):
                _check_functions(path, part, plan, found)
                _regroup(part, plan, names)


def check_covered(
    found: ObjectNames,
    state: dict[str, Any],
    parameters: Parameters,
    unfit: dict[str, str] | None = None,
) -> None:
    """Reject optimizers whose state user code has loaded for other parameters.

    Raises:
        StateError: if an optimizer does not have the saved parameters in the saved order.
    """
    tensors = tensors_of(found)
    for path, part, saved in _covered(found, state):
        now = [[id(tensor) for tensor in group["params"]] for group in part.param_groups]
        if now != [[id(tensors.get(name)) for name in group] for group in saved]:
            with collecting(unfit, path):
                _refuse(path, part, saved, tensors)


def _covered(found: ObjectNames, state: dict[str, Any]) -> Iterator[tuple[str, Optimizer, Members]]:
    members = state.get("members", {})
    states = {**state["objects"], **state.get("inner", {})}
    for path, part in optimizers_of(found).items():
        if path in members and path not in states:
            yield path, part, members[path]


def names_of(found: ObjectNames) -> dict[int, str]:
    """Return the name of each tensor that an optimizer may update, by id."""
    return {**found.outside_names, **found.names} if found.outside_names else found.names


def tensors_of(found: ObjectNames) -> dict[str, Tensor]:
    """Return the tensors that an optimizer may update, by each of their names."""
    named = {**found.rules.outside.parts, **found.shared, **found.parts}
    return {name: part for name, part in named.items() if isinstance(part, Tensor)}


def optimizers_of(found: ObjectNames) -> dict[str, Optimizer]:
    """Return the optimizers by path, with those within other objects first."""
    parts = {**found.inner, **found.objects}
    return {path: part for path, part in parts.items() if isinstance(part, Optimizer)}


def _unordered(groups: Members) -> Members:
    return sorted(map(sorted, groups))


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [member for group in groups for member in group]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _plan(
    path: str, optimizer: Optimizer, known: list[Members], tensors: dict[str, Tensor]
) -> _Tensors:
    """Return the tensors of each group as they were saved.

    Args:
        path: path of the optimizer.
        optimizer: the optimizer as ``setup`` made it.
        known: the saved names, and those that setup gave it when it was saved.
        tensors: all parameters, by each of their names.
    """
    saved, _ = known
    if unknown := sorted(set(_flat(saved)) - tensors.keys()):
        raise StateError(
            f"{path} had a group of parameters that do not exist: {_some(unknown)}. "
            "Build the networks in setup() as they were when the state was saved."
        )
    now = _keys(group["params"] for group in optimizer.param_groups)
    if not any(
        now == _keys([tensors[name] for name in group if name in tensors] for group in groups)
        for groups in known
    ):
        _refuse(path, optimizer, known[1], tensors)
    return [[tensors[name] for name in group] for group in saved]


def _keys(groups: Iterable[Iterable[Tensor]]) -> list[tuple[int, ...]]:
    """Return the groups without order, for comparison."""
    return sorted(tuple(sorted(map(id, group))) for group in groups)


def _refuse(path: str, optimizer: Optimizer, known: Members, tensors: dict[str, Tensor]) -> None:
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    now = [names.get(id(part), "") for part in parameters_of(optimizer)]
    saved = [names[id(tensors[name])] if name in tensors else name for name in _flat(known)]
    missing, left_over = sorted(set(saved) - set(now)), sorted(set(now) - set(saved))
    found = (
        f"Saved, but not in it now: {_some(missing) or 'nothing'}. In it now, but not saved: "
        f"{_some(left_over) or 'nothing'}."
        if missing or left_over
        else f"The saved groups were {known}, and the same parameters are in other groups now, or "
        "in another order."
    )
    raise StateError(
        f"{path} must have the parameters that it had when the state was saved, since its state "
        f"belongs to them. {found} Give it the same parameters in setup(); if their order comes "
        "from a set, sort it."
    )


def _check_functions(path: str, optimizer: Optimizer, plan: _Tensors, found: ObjectNames) -> None:
    """Reject another order of groups if a scheduler has a function for each group."""
    order = [sorted(map(id, group)) for group in plan]
    now = [sorted(map(id, group["params"])) for group in optimizer.param_groups]
    if order[: len(now)] == now:
        return
    for name, part in found.objects.items():
        if (
            isinstance(part, LRScheduler)
            and part.optimizer is optimizer
            and _has_functions_by_group(part)
        ):
            raise StateError(
                f"The groups of {path} must be in the order in which they were saved, since "
                f"{name} has a function for each of them, but their order is different now. Build "
                "them in setup() in a fixed order: sort what comes from a set."
            )


def _has_functions_by_group(scheduler: LRScheduler) -> bool:
    attributes = vars(scheduler)
    functions = attributes.get("lr_lambdas", ())
    return len(set(map(id, functions))) > 1 or any(
        map(_has_functions_by_group, attributes.get("_schedulers", ()))
    )


def _check_drivers(
    now: dict[str, str], saved: dict[str, str], unfit: dict[str, str] | None
) -> None:
    for path in sorted(now.keys() & saved.keys()):
        if now[path] != saved[path]:
            with collecting(unfit, path):
                raise StateError(
                    f"{path} must set the learning rates of {saved[path]}, as when the state was "
                    f"saved, but sets those of {now[path]}. Build schedulers in setup() in a fixed "
                    "order: sort what comes from a set."
                )


def _regroup(optimizer: Optimizer, plan: _Tensors, names: dict[int, str]) -> None:
    """Put tensors into groups, in place: some optimizers keep the list of their first group."""
    groups = optimizer.param_groups
    is_named = any("param_names" in group for group in groups)
    names = names | {
        id(part): name
        for group in groups
        for part, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    chosen = _choose(groups, plan)
    for group, tensors in zip(chosen, plan, strict=True):
        if group is not None:
            group["params"][:] = tensors
            if is_named:
                group["param_names"] = [names[id(tensor)] for tensor in tensors]
    groups[:] = [group for group in chosen if group is not None]
    for position, tensors in enumerate(plan):
        if chosen[position] is None:
            pairs = [(names[id(tensor)], tensor) for tensor in tensors]
            # Its settings are in the state; only the parameters must exist.
            optimizer.add_param_group({"params": pairs if is_named else list(tensors)})
            groups.insert(position, groups.pop())


def _choose(groups: list[dict[str, Any]], plan: _Tensors) -> list[dict[str, Any] | None]:
    """Return the current group for each planned one: that with its parameters if there is one."""
    alike: defaultdict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for group in reversed(groups):
        alike[tuple(sorted(map(id, group["params"])))].append(group)
    keys = [tuple(sorted(map(id, tensors))) for tensors in plan]
    chosen = [alike[key].pop() if alike[key] else None for key in keys]
    taken = set(map(id, chosen))
    rest: Iterator[dict[str, Any]] = (group for group in groups if id(group) not in taken)
    return [next(rest, None) if group is None else group for group in chosen]


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
    for path, optimizer in optimizers_of(found).items():
        if not _is_odd(optimizer):
            continue
        names = names_of(found)
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
