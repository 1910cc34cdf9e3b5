"""Saves and loads optimizers by the names of parameters, and schedulers with their optimizers.

torch saves the state of an optimizer by position, and gradients are clipped in that order: a resume
brings the groups into the saved order first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.memory import has_plain_bytes, is_expanded, storage_of
from helios.core.utils import parameters_of
from helios.errors import StateError
from helios.state.anchors import Anchors
from helios.state.networks import hook_tables_of_optimizers, load_network
from helios.text import some_text

Members: TypeAlias = list[list[str]]
"""The names of an optimizer's parameters by group, in order."""

TABLES = ("param_groups", "state")
"""The attributes in which an optimizer keeps settings and moments."""

TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)
"""Objects that only training needs, so that an evaluation may lack them."""

FINE_TUNING = (
    " To fine-tune with other sizes, in a run with another save_name, build it as it was, call "
    "helios.load_weights() in setup(), replace the layer then, and create optimizers after that."
)


def complete(optimizers: Iterable[Optimizer]) -> bool:
    """Create what torch's methods need; published wrappers do not call ``super().__init__()``."""
    has_lacked = False
    for table in map(vars, optimizers):
        lacked = {*hook_tables_of_optimizers()} - table.keys()
        table.update((name, OrderedDict()) for name in lacked)
        defaults = table.setdefault("defaults", {})
        # Otherwise load_state_dict() would add it, and a resumed optimizer differ from a new one.
        has_lacked |= bool(lacked) or "differentiable" not in defaults
        defaults.setdefault("differentiable", False)
    return has_lacked


def members_of(anchors: Anchors) -> dict[str, Members]:
    """Return the names of the parameters of each optimizer."""
    return {
        path: [[str(anchors.name_of(t)) for t in group["params"]] for group in part.param_groups]
        for path, part in anchors.of_kind(Optimizer, with_inner=True).items()
    }


def built_differently(
    built: Mapping[str, Members], now: Mapping[str, Members]
) -> dict[str, Members]:
    """Return the parameters that setup gave to optimizers with other groups now."""
    return {
        path: members
        for path, members in built.items()
        if sorted(map(sorted, now.get(path, members))) != sorted(map(sorted, members))
    }


def drivers_of(anchors: Anchors) -> dict[str, str]:
    """Return the path of the optimizer whose learning rates a scheduler sets, by its path."""
    paths = {id(part): path for path, part in anchors.of_kind(Optimizer, with_inner=True).items()}
    return {
        path: paths[id(part.optimizer)]
        for path, part in anchors.of_kind(LRScheduler).items()
        if id(part.optimizer) in paths
    }


def tables_of(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Return the tables of an optimizer as values, for one whose ``state_dict`` is the user's."""
    state = {k: dict(v) if type(v) is dict else v for k, v in optimizer.state.items()}
    return [("state", state), ("param_groups", [dict(group) for group in optimizer.param_groups])]


def misfits_of(
    anchors: Anchors, built: Mapping[str, Members], drivers: Mapping[str, str]
) -> dict[str, str]:
    """Return the optimizers and schedulers that a resume could not rebuild, by path."""
    misfits: dict[str, str] = {}
    objects = anchors.objects
    now = drivers_of(anchors)
    for path in anchors.of_kind(Optimizer):
        members = {name for group in members_of(anchors)[path] for name in group}
        known = {*anchors.leaves, *(anchors.rules.tops or ())}
        lost = (members & anchors.loose.keys()) - known
        stray = sorted(lost)
        if stray and path in built:
            misfits[path] = (
                f"updates tensors that no attribute of the model holds: {some_text(stray)}"
            )
    for path in sorted(drivers.keys() & objects.keys()):
        driver, is_known = now.get(path), id(objects[path]) in anchors.rules.known
        if driver != drivers[path] or not is_known:
            by = f"{'' if is_known else 'a new scheduler, of '}{driver or 'another optimizer'}"
            misfits[path] = f"set the learning rates of {drivers[path]} after setup, now {by}"
    return misfits


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
    anchors: Anchors,
    state: Mapping[str, Any],
    unfit: dict[str, str] | None = None,
    *,
    is_loaded_next: bool = False,
) -> None:
    """Bring the parameters of optimizers into the saved groups and order.

    Args:
        anchors: what there is.
        state: the saved state.
        unfit: what is passed over, by path; receives more, with the reason, instead of an error.
        is_loaded_next: whether user code is to load optimizers, which may add groups itself.

    Raises:
        StateError: if an optimizer has other parameters; then nothing is changed.
    """
    tensors = anchors.tensors()
    plans = {}
    optimizers = anchors.of_kind(Optimizer, with_inner=True)
    for path, part in optimizers.items():
        saved = state["members"].get(path)
        if saved is None or path in (unfit or {}):
            continue
        with collecting(unfit, path):
            plan = _plan(path, part, [saved, state["built"].get(path, saved)], tensors)
            groups = [group["params"] for group in part.param_groups]
            if not is_loaded_next or _keys(groups) == _keys(plan):
                _check_functions(path, part, plan, anchors)
                plans[path] = plan
    now, drivers = drivers_of(anchors), state["drivers"]
    for path in sorted(now.keys() & drivers.keys()):
        if now[path] != drivers[path]:
            with collecting(unfit, path):
                raise StateError(
                    f"{path} must set the learning rates of {drivers[path]}, as when the state was "
                    f"saved, but sets those of {now[path]}. Build schedulers in setup() in a fixed "
                    "order: sort what comes from a set."
                )
    for path, plan in plans.items():
        _regroup(optimizers[path], plan)


def _plan(
    path: str, optimizer: Optimizer, known: list[Members], tensors: Mapping[str, Tensor]
) -> list[list[Tensor]]:
    """Return the tensors of each group as they were saved.

    Args:
        path: path of the optimizer.
        optimizer: the optimizer as ``setup`` made it.
        known: the saved names, and those that setup gave it when it was saved.
        tensors: all parameters, by each of their names.
    """
    saved, built = known
    if unknown := sorted({name for group in saved for name in group} - tensors.keys()):
        raise StateError(
            f"{path} had a group of parameters that do not exist: {some_text(unknown)}. "
            "Build the networks in setup() as they were when the state was saved."
        )
    now = _keys(group["params"] for group in optimizer.param_groups)
    if not any(
        now == _keys([tensors[name] for name in group if name in tensors] for group in groups)
        for groups in known
    ):
        _refuse(path, optimizer, built, tensors)
    return [[tensors[name] for name in group] for group in saved]


def _regroup(optimizer: Optimizer, plan: list[list[Tensor]]) -> None:
    """Put tensors into groups, in place: some optimizers keep the list of their first group."""
    groups = optimizer.param_groups
    by_keys = {tuple(sorted(map(id, group["params"]))): group for group in groups}
    names = {
        id(tensor): name
        for group in groups
        for tensor, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    found = [by_keys.get(tuple(sorted(map(id, tensors)))) for tensors in plan]
    ordered = [group for group in found if group is not None]
    if len(ordered) < len(plan):
        ordered = [*groups[: len(plan)]]
        ordered += [{**groups[-1], "params": []} for _ in range(len(plan) - len(ordered))]
    for group, tensors in zip(ordered, plan, strict=True):
        group["params"][:] = tensors
        if names:
            group["param_names"] = [names.get(id(tensor), "") for tensor in tensors]
    groups[:] = ordered


def load_into(path: str, part: Any, state: dict[str, Any]) -> None:
    """Load the state of an object, which keeps no part of it.

    Args:
        path: its path.
        part: the object.
        state: its state, which is not changed.

    Raises:
        StateError: if ``load_state_dict`` fails.
    """
    try:
        if isinstance(part, nn.Module):
            load_network(part, state)
        elif isinstance(part, Optimizer):
            complete([part])
            part.load_state_dict(copy.deepcopy(state))
            _restore_types(part, state)
        else:
            part.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        fine_tuning = FINE_TUNING if isinstance(part, nn.Module) else ""
        raise StateError(
            f"{path} ({type(part).__name__}) rejected its saved state: {error} Build it in setup() "
            f"as it was when the state was saved.{fine_tuning}"
        ) from error


@final
class Tables:
    """The groups and the state of optimizers, into which loaded state is copied.

    Wrappers share these with what they wrap; attributes and closures may hold them.

    Args:
        optimizers: those that a loader may reach.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        # Groups come last: training may have added some, or a load.
        self._held = [
            (part, [part.param_groups, part.state, *part.param_groups]) for part in optimizers
        ]

    def put_back(self) -> None:
        """Give optimizers their former lists, dicts and tensors, with the loaded content."""
        own = {id(each) for _, before in self._held for each in before}
        places: dict[int, tuple[Any, Any]] = {}
        for part, before in self._held:
            now = [part.param_groups, part.state, *part.param_groups]
            for new, old in zip(now, before, strict=False):
                if id(new) not in own and isinstance(new, dict) == isinstance(old, dict):
                    places.setdefault(id(new), (new, old))
        if not places:
            return
        parameters = {storage_of(each) for part, _ in self._held for each in parameters_of(part)}
        for new, old in places.values():
            if isinstance(old, dict):
                _put(old, new, parameters)
            else:
                old[:] = [places.get(id(group), (None, group))[1] for group in new]
        for part, _ in self._held:
            table = vars(part)
            for name in TABLES:
                # A property tells of an inner optimizer.
                if name in table and id(table[name]) in places:
                    setattr(part, name, places[id(table[name])][1])


def _put(old: Any, now: Any, foreign: set[int]) -> Any:
    """Return what was there, with the content of what was loaded; otherwise that itself.

    Args:
        old: what was there.
        now: what was loaded.
        foreign: places of memory that must not be written to, as that of parameters.
    """
    if old is now:
        return old
    if isinstance(old, dict) and isinstance(now, dict):
        content = {key: _put(old.get(key), part, foreign) for key, part in now.items()}
        old.clear()
        old.update(content)
    elif type(old) is type(now) is list and len(old) == len(now):
        old[:] = [_put(before, part, foreign) for before, part in zip(old, now, strict=True)]
    elif _is_moment(old) and _is_moment(now) and old.device == now.device:
        form = old.dtype, old.shape, old.stride()
        fits = form == (now.dtype, now.shape, now.stride()) and not is_expanded(old)
        if fits and storage_of(old) not in foreign:
            old.copy_(now)
        else:
            old.data = now
    else:
        return now
    return old


def _is_moment(part: Any) -> bool:
    return type(part) is Tensor and has_plain_bytes(part) and not part.requires_grad


def _restore_types(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Undo that torch rounds float32 copies of bfloat16 parameters to their parameter's type."""
    numbers = [n for group in state.get("param_groups", ()) for n in group["params"]]
    entries = {id(key): entry for key, entry in optimizer.state.items() if isinstance(key, Tensor)}
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        loaded = entries.get(id(parameter), {})
        for name, saved in state.get("state", {}).get(number, {}).items():
            if name in loaded:
                loaded[name] = _typed(loaded[name], saved)


def _typed(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        fits = loaded.dtype == saved.dtype
        return loaded if fits else saved.detach().to(loaded.device, copy=True)
    if type(loaded) is dict and isinstance(saved, dict):
        return {key: _typed(part, saved.get(key)) for key, part in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        return type(loaded)(map(_typed, loaded, saved))
    return loaded


def _keys(groups: Iterable[Iterable[Tensor]]) -> list[list[int]]:
    return sorted(sorted(map(id, group)) for group in groups)


def _refuse(path: str, part: Optimizer, known: Members, tensors: Mapping[str, Tensor]) -> None:
    names = {id(tensor): name for name, tensor in reversed([*tensors.items()])}
    now = {names.get(id(each), "") for each in parameters_of(part)}
    saved = {
        names[id(tensors[name])] if name in tensors else name for group in known for name in group
    }
    missing, left_over = sorted(saved - now), sorted(now - saved)
    raise StateError(
        f"{path} must have the parameters that it had when the state was saved, in the same "
        "groups, since its state belongs to them. Saved, but not in it now: "
        f"{some_text(missing) or 'nothing'}. In it now, but not saved: "
        f"{some_text(left_over) or 'nothing'}. Give it the same parameters in setup(); if their "
        "order comes from a set, sort it."
    )


def _check_functions(
    path: str, optimizer: Optimizer, plan: list[list[Tensor]], anchors: Anchors
) -> None:
    """Reject another order of groups if a scheduler has a function for each group."""
    order = [sorted(map(id, group)) for group in plan]
    now = [sorted(map(id, group["params"])) for group in optimizer.param_groups]
    for name, part in anchors.of_kind(LRScheduler).items() if order[: len(now)] != now else ():
        if part.optimizer is optimizer and _has_functions_by_group(part):
            raise StateError(
                f"The groups of {path} must be in the order in which they were saved, since "
                f"{name} has a function for each of them, but their order is different now. Build "
                "them in setup() in a fixed order: sort what comes from a set."
            )


def _has_functions_by_group(scheduler: LRScheduler) -> bool:
    functions = vars(scheduler).get("lr_lambdas", ())
    return len(set(map(id, functions))) > 1 or any(
        map(_has_functions_by_group, vars(scheduler).get("_schedulers", ()))
    )
