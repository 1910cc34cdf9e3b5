"""The plugins of a trainer: every way to register one leads here, and is checked here."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from helios.errors import ArgumentTypeError, DuplicateError
from helios.hooks.bus import Bus, check_owners, check_receiver
from helios.hooks.events import EVENTS
from helios.plugins.plugin import Plugin

_LOGGER = logging.getLogger(__name__)


class PluginTable(UserDict[str, Plugin]):
    """Plugins by id, in order of registration."""

    def __setitem__(self, name: str, plugin: Plugin) -> None:
        """Register a plugin under its id.

        Raises:
            DuplicateError: if the id is taken, or is not the plugin's own (a ``KeyError``, H59).
            ArgumentTypeError: for something that is no plugin, and for a method whose parameters
                are not those of its event.
            ArgumentError: if it overrides a ``process_*_batch`` that another one owns (H60).
        """
        if not isinstance(plugin, Plugin):
            raise ArgumentTypeError(
                f"Trainer.plugins[{name!r}] must be a Plugin object, got {plugin!r}. Derive it "
                "from helios.plugins.Plugin."
            )
        if name != plugin.plug_id:
            raise DuplicateError(
                f"A plugin must be registered under its own id {plugin.plug_id!r}, got {name!r}."
            )
        if name in self.data:
            raise DuplicateError(
                f"A plugin must have an id of its own, but {name!r} is registered already. Pass "
                "another plug_id."
            )
        check_receiver(plugin)
        check_owners([*self.data.values(), plugin])
        self.data[name] = plugin

    def __ior__(self, other: Any) -> PluginTable:  # type: ignore[override, misc]
        """Register the plugins of another table: the operator would else pass by the checks."""
        self.update(other)
        return self


def log_order(plugins: Mapping[str, Plugin], hooks: Bus) -> None:
    """Log once in which order events are told (C8, C14); who hears each of them at DEBUG level."""
    if not plugins:
        return
    _LOGGER.info(
        "Events are told to the plugins %s, then to the model, then to the engine.",
        ", ".join(plugins),
    )
    monitors = [name for name, plugin in plugins.items() if plugin.monitor]
    if monitors:
        _LOGGER.info(
            "At the ends of validations and epochs %s come after the model.", ", ".join(monitors)
        )
    for event in EVENTS:
        if hooks.is_heard(event):
            _LOGGER.debug("%s: %s.", event, ", ".join(hooks.hearers(event)))
