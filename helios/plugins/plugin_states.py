"""Saves and restores the states of plugins, and keeps those of plugins that were removed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

from helios.hooks.bus import naming
from helios.plugins.plugin import Plugin

_LOGGER = logging.getLogger(__name__)


@final
class PluginStates:
    """Saves and restores the states of plugins.

    Args:
        plugins: by id.
        carries: whether the state of a removed plugin is saved again, unread; outside of training
            this is not needed.
    """

    def __init__(self, plugins: Mapping[str, Plugin], *, carries: bool) -> None:
        self._plugins = plugins
        self._carries = carries
        self._carried: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        """Return the states by id."""
        return self._carried | {name: _capture_state(part) for name, part in self._plugins.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the state of each plugin."""
        for name, state in states.items():
            if name in self._plugins:
                with naming(self._plugins[name], "load_state_dict"):
                    self._plugins[name].load_state_dict(state)
            elif state and self._carries:
                self._carried[name] = state
        if self._carried:
            _LOGGER.warning(
                "The checkpoint holds the state of a plugin that is not registered: %s. It is "
                "kept unread in later checkpoints; register the plugin again to use it.",
                ", ".join(self._carried),
            )


def _capture_state(plugin: Plugin) -> dict[str, Any]:
    with naming(plugin, "state_dict"):
        return plugin.state_dict()
