"""Finds hooks on networks, parameters and optimizers, which no state_dict holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from helios.state_graph.object_names import ObjectNames

_OF_MODULES = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
)
OF_OPTIMIZERS = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_KNOWN = ("helios.", "torch.")
"""Modules that register and remove their own hooks."""


def hooks_of(found: ObjectNames) -> dict[str, frozenset[int]]:
    """Return the ids of the hooks of user code, by the name that messages show."""
    hooks: dict[str, frozenset[int]] = {}
    for path, part in found.objects.items():
        if isinstance(part, nn.Module):
            network = found.networks.of(part)
            for name, module in network.modules:
                if any(map(vars(module).get, _OF_MODULES)):
                    _note(hooks, (path, name), vars(module), _OF_MODULES)
            for name, tensor in network.parameters:
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # noqa: SLF001
                    tables = {key: getattr(tensor, key) for key in _OF_TENSORS}
                    _note(hooks, (path, name), tables, _OF_TENSORS)
        elif isinstance(part, Optimizer):
            _note(hooks, (path, ""), vars(part), OF_OPTIMIZERS)
    return hooks


def user_hooks_of(module: nn.Module) -> list[tuple[tuple[str, int], Callable[..., Any]]]:
    """Return the hooks of user code on a module, each with its table and its place there."""
    if not any(map(vars(module).get, _OF_MODULES)):
        return []
    tables = ((name, vars(module).get(name)) for name in _OF_MODULES)
    return [
        ((name, place), hook)
        for name, table in tables
        if table
        for place, hook in enumerate(table.values())
        if not is_known(hook)
    ]


def _note(
    hooks: dict[str, frozenset[int]],
    place: tuple[str, str],
    tables: Mapping[str, Any],
    names: Iterable[str],
) -> None:
    for name in names:
        table = tables.get(name)
        if table:
            own = frozenset(id(hook) for hook in table.values() if not is_known(hook))
            if own:
                shown = ".".join(place).rstrip(".")
                hooks[f"{shown} ({name.strip('_').replace('_', ' ').rstrip('s')})"] = own


def is_known(hook: Callable[..., Any]) -> bool:
    """Return whether a hook or a method belongs to torch or Helios."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.startswith(_KNOWN)
