"""``SessionView``: what custom loops may access; docs/loops.md lists the same members."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from helios.counters import Cursor, TrainingState
from helios.engines.engine import Engine
from helios.hooks.bus import Bus
from helios.hooks.context import Context
from helios.model.model import Model
from helios.replicas.replicas import Replicas
from helios.schedule import Schedule


@runtime_checkable
class SessionView(Protocol):
    """The run as ``Loop.session`` shows it, while a trainer runs the loop."""

    @property
    def model(self) -> Model:
        """The user's model."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    @property
    def state(self) -> TrainingState:
        """The counters that users see; read only: the default loops advance them."""
        ...

    @property
    def cursor(self) -> Cursor:
        """Position of the next batch; read only: the default loops advance it."""
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
        """The receivers of each event: ``emit``, ``ask``, ``transform``."""
        ...

    @property
    def replicas(self) -> Replicas:
        """Numbers of replicas and processes; ``agree(flag)`` combines flags of all processes."""
        ...

    def agree(self) -> bool:
        """Exchange requests; all processes call this at the same place.

        Returns:
            Whether anything is requested.
        """
        ...
