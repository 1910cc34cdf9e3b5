"""The plugins of a trainer: every way to register one ends here, and is checked here."""

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
from helios.startup.options.object_checks import check_file, check_made, check_state_methods
from helios.startup.options.validators import refusal

_LOGGER = logging.getLogger(__name__)


def check_plugin_list(plugins: object) -> None:
    """Check the argument of ``Trainer(plugins=...)``.

    Raises:
        ArgumentError: for something that is not a list of plugins.
    """
    if not isinstance(plugins, list | tuple):
        raise refusal("plugins", "a list of Plugin objects", plugins, "Pass [plugin].")
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            rule = "a list of Plugin objects"
            raise refusal("plugins", rule, plugin, "Derive it from helios.plugins.Plugin.")


class PluginTable(UserDict[str, Plugin]):
    """Plugins by id, in order of registration; fixed while a run uses them."""

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
            DuplicateError: if the id is taken, or differs from ``plug_id`` (a ``KeyError``).
            ArgumentTypeError: for something that is not a plugin, and for a method whose parameters
                are not those of its event.
            ArgumentError: if another plugin overrides the same ``process_*_batch`` or writes the
                same file, or if it overrides only one of ``state_dict`` and ``load_state_dict``.
            UsageError: if its ``__init__`` does not call that of ``Plugin``.
            UsageError: while a run uses the table: it would not be set up and receive no events.
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
                f"A plugin must have a unique id, but {name!r} is registered already. Pass "
                "another plug_id."
            )
        check_made(plugin)
        check_state_methods(plugin)
        check_file(plugin, self.data.values())
        check_receiver(plugin)
        check_owners([*self.data.values(), plugin])
        self.data[name] = plugin

    def __delitem__(self, name: str) -> None:
        """Remove a plugin.

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
        """Register the plugins of another table: the built-in operator would bypass the checks."""
        self.update(other)
        return self


def log_order(plugins: Mapping[str, Plugin], hooks: Bus) -> None:
    """Log at DEBUG level the order of the receivers, and those of each event."""
    if not plugins or not _LOGGER.isEnabledFor(logging.DEBUG):
        return
    _LOGGER.debug("Hook order: the plugins %s, the model, the engine.", ", ".join(plugins))
    monitors = [name for name, plugin in plugins.items() if plugin.monitor]
    if monitors:
        _LOGGER.debug(
            "Called after the model at the ends of validations and epochs: %s.", ", ".join(monitors)
        )
    for event in EVENTS:
        if event in hooks.active:
            _LOGGER.debug("%s: %s.", event, ", ".join(hooks.names_of_receivers(event)))
