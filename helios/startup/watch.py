"""What plugins change while training, and no ``state_dict`` of theirs saves: it is named (R5)."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from helios.hooks.events import CHANNELS
from helios.model.model import Model
from helios.plugins.channels import PipelineHooks
from helios.plugins.contexts import HookContext, has_state
from helios.plugins.plugin import Plugin

_LOGGER = logging.getLogger(__name__)

_PLAIN = (int, float, complex, str, bytes, bool, type(None), list, tuple, dict, set, frozenset)


def _digest(value: Any) -> bytes | None:
    """Return the bytes of a plain value; ``None`` for what is none, or cannot be compared."""
    if not isinstance(value, _PLAIN):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # whatever an object inside of a container raises
        return None


def _without_state(plugins: Mapping[str, Plugin]) -> dict[str, Plugin | HookContext]:
    """Return plugins and hook contexts without a ``state_dict`` of their own, as messages say."""
    found: dict[str, Plugin | HookContext] = {}
    for name, plugin in plugins.items():
        if type(plugin).state_dict in (Plugin.state_dict, PipelineHooks.state_dict):
            found[f"Plugin {name!r}"] = plugin
        if not isinstance(plugin, PipelineHooks):
            continue
        for channel in CHANNELS:
            for place, hook in enumerate(plugin.contexts(channel)):
                if not has_state(hook):
                    kind = type(hook).__name__
                    found[f"Context {place} ({kind}) of {channel} in plugin {name!r}"] = hook
    return found


class PluginWatch:
    """Compares the attributes of plugins without a ``state_dict`` with what their setup made.

    Args:
        plugins: by id, right after their setup.
        model: whose networks and optimizers a plugin may hold without owning them.
    """

    def __init__(self, plugins: Mapping[str, Plugin], model: Model) -> None:
        self._model = model
        self._plugins = _without_state(plugins)
        self._digests = {
            name: {key: _digest(value) for key, value in vars(plugin).items()}
            for name, plugin in self._plugins.items()
        }
        self._has_looked = False

    def look(self) -> None:
        """Warn, at the first checkpoint, of what a resumed run will not have."""
        if self._has_looked:
            return
        self._has_looked = True
        for name, plugin in self._plugins.items():
            lost = sorted(self._find_lost(name, plugin))
            if lost:
                _LOGGER.warning(
                    "%s has no state_dict, so a resumed run finds %s as setup() makes it. "
                    "Define state_dict and load_state_dict, or declare what need not be saved: "
                    "unsaved = (%s,).",
                    name,
                    ", ".join(lost),
                    ", ".join(f'"{attribute}"' for attribute in lost),
                )

    def _find_lost(self, name: str, plugin: Plugin | HookContext) -> list[str]:
        discovery = self._model.discovery
        borrowed = {
            id(p) for p in (*discovery.modules().values(), *discovery.optimizers().values())
        }
        before = self._digests[name]
        return [
            key
            for key, value in vars(plugin).items()
            if key not in (*plugin.unsaved, "_context", "_channels")
            and (
                _digest(value) != before.get(key)
                or (isinstance(value, nn.Module | Optimizer) and id(value) not in borrowed)
            )
        ]
