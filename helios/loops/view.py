"""What a loop of your own may see of a run, and build on: docs/loops.md names the same members."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from helios.engines.engine import Engine
from helios.hooks.bus import Bus
from helios.hooks.context import Context
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.schedule import Schedule
from helios.state import Cursor, TrainingState


@runtime_checkable
class SessionView(Protocol):
    """The run as ``Loop.session`` shows it, while a trainer runs the loop."""

    @property
    def model(self) -> Model:
        """The user's model."""
        ...

    @property
    def engine(self) -> Engine:
        """The device, and what it does with a loss."""
        ...

    @property
    def state(self) -> TrainingState:
        """The counters that users see; to be read, the default loops move them."""
        ...

    @property
    def cursor(self) -> Cursor:
        """Where the next batch lies; to be read, the default loops move it."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The options that decide when something happens."""
        ...

    @property
    def context(self) -> Context:
        """What hooks see: the batch, outputs and loss of the last step, requests."""
        ...

    @property
    def hooks(self) -> Bus:
        """Who hears what: ``emit``, ``ask``, ``transform``."""
        ...

    @property
    def replicas(self) -> Replicas:
        """How many replicas and processes there are; ``agree(flag)`` lets all decide alike."""
        ...

    def agree(self) -> bool:
        """Let every process know what any of them has asked for; all call it at one place.

        Returns:
            Whether anything is asked for.
        """
        ...
