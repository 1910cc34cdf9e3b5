"""Finds hooks on networks, parameters and optimizers, which no state_dict holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from helios.state_graph.object_names import ObjectNames
from helios.state_graph.values import table_of

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


def hooks_of(found: ObjectNames) -> dict[str, tuple[Any, ...]]:
    """Return the hooks of user code, in order, by the name that messages show.

    A new hook may have the id of one that is gone, so they are kept.
    """
    hooks: dict[str, tuple[Any, ...]] = {}
    for path, part in (*found.objects.items(), *found.inner.items()):
        if isinstance(part, nn.Module):
            network = found.networks.of(part)
            for name, module in network.modules:
                if tables := _tables_of(module):
                    _note(hooks, (path, name), tables)
            for name, tensor in network.parameters:
                if tables := _tables_of(tensor):
                    _note(hooks, (path, name), tables)
        elif isinstance(part, Optimizer):
            _note(hooks, (path, ""), _tables_of(part))
    return hooks


def has_hooks(part: Any) -> bool:
    """Return whether a module, an optimizer or a tensor has hooks, also of torch and Helios."""
    if isinstance(part, Tensor):
        return bool(part._backward_hooks or part._post_accumulate_grad_hooks)  # noqa: SLF001
    names = _OF_MODULES if isinstance(part, nn.Module) else OF_OPTIMIZERS
    return any(map(table_of(part).get, names))


def user_hooks_of(part: Any) -> list[tuple[tuple[str, int], Callable[..., Any]]]:
    """Return the hooks of user code on an object, each with its table and its place there."""
    return [
        ((name, place), hook)
        for name, table in _tables_of(part).items()
        for place, hook in enumerate(table.values())
        if not is_known(hook)
    ]


def _tables_of(part: Any) -> dict[str, dict[int, Callable[..., Any]]]:
    """Return the tables of hooks of a module, an optimizer or a tensor that are not empty."""
    if not has_hooks(part):
        return {}
    if isinstance(part, Tensor):
        found = {name: getattr(part, name) for name in _OF_TENSORS}
    else:
        names = _OF_MODULES if isinstance(part, nn.Module) else OF_OPTIMIZERS
        found = {name: table_of(part).get(name) for name in names}
    return {name: table for name, table in found.items() if table}


def _note(
    hooks: dict[str, tuple[Any, ...]],
    place: tuple[str, str],
    tables: Mapping[str, dict[int, Callable[..., Any]]],
) -> None:
    for name, table in tables.items():
        if own := tuple(hook for hook in table.values() if not is_known(hook)):
            shown = ".".join(place).rstrip(".")
            hooks[f"{shown} ({name.strip('_').replace('_', ' ').rstrip('s')})"] = own


def is_known(hook: Callable[..., Any]) -> bool:
    """Return whether a hook or a method belongs to torch or Helios."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.startswith(_KNOWN)
