"""The plugins of a trainer: every way to register one leads here, and is checked here."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from helios.errors import ArgumentTypeError, DuplicateError, UsageError
from helios.hooks.bus import Bus, check_owners, check_receiver
from helios.hooks.events import EVENTS
from helios.plugins.plugin import Plugin
from helios.startup.options.object_checks import check_state_methods
from helios.startup.options.validators import refusal

_LOGGER = logging.getLogger(__name__)


def check_plugin_list(plugins: object) -> None:
    """Check what ``Trainer(plugins=...)`` was given.

    Raises:
        ArgumentError: for something that is no list of plugins.
    """
    if not isinstance(plugins, list | tuple):
        raise refusal("plugins", "a list of Plugin objects", plugins, "Pass [plugin].")
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            rule = "a list of Plugin objects"
            raise refusal("plugins", rule, plugin, "Derive it from helios.plugins.Plugin.")


class PluginTable(UserDict[str, Plugin]):
    """Plugins by id, in order of registration; while a run uses them, none may come or go."""

    def __init__(self) -> None:
        self._is_in_use = False
        super().__init__()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the table as used by a run."""
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False

    def __setitem__(self, name: str, plugin: Plugin) -> None:
        """Register a plugin under its id.

        Raises:
            DuplicateError: if the id is taken, or is not the plugin's own (a ``KeyError``, H59).
            ArgumentTypeError: for something that is no plugin, and for a method whose parameters
                are not those of its event.
            ArgumentError: if it overrides a ``process_*_batch`` that another one owns (H60), or
                only one of ``state_dict`` and ``load_state_dict``.
            UsageError: if its ``__init__`` left out that of ``Plugin``.
            UsageError: while a run uses the table: it would neither be set up nor hear anything.
        """
        self._refuse_in_use(name)
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
        check_state_methods(plugin)
        check_receiver(plugin)
        check_owners([*self.data.values(), plugin])
        self.data[name] = plugin

    def __delitem__(self, name: str) -> None:
        """Take a plugin out.

        Raises:
            UsageError: while a run uses the table.
        """
        self._refuse_in_use(name)
        super().__delitem__(name)

    def _refuse_in_use(self, name: str) -> None:
        if self._is_in_use:
            raise UsageError(
                f"Trainer.plugins[{name!r}] must be set or removed between runs, but a call of "
                "the trainer is running. Register plugins before fit."
            )

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
            "After the model, at the ends of validations and epochs: %s.", ", ".join(monitors)
        )
    for event in EVENTS:
        if event in hooks.heard:
            _LOGGER.debug("%s: %s.", event, ", ".join(hooks.hearers(event)))
