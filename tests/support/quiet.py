"""A plugin and a model that do nothing, for tests to build on."""

from __future__ import annotations

from helios.model import Model
from helios.plugins import Plugin


class Quiet(Plugin):
    """A plugin that overrides no event.

    Args:
        plug_id: its name; by default that of its class, in small letters.
    """

    def __init__(self, plug_id: str | None = None) -> None:
        super().__init__(plug_id or type(self).__name__.lower())

    def setup(self) -> None:
        """Nothing to prepare."""


class QuietModel(Model):
    """A model without networks."""

    def setup(self, fast_init: bool = False) -> None:
        """Nothing to prepare."""
