"""What a model may know in its ``setup``: how long the run is, and whether a checkpoint follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, final

import torch

from helios.core import rng
from helios.data.horizon import count_steps, count_steps_per_epoch
from helios.data.source import Source
from helios.model.model import Model
from helios.schedule import Schedule


@final
class SetupContext:
    """``context`` of a model while its ``setup`` runs, before there are counters.

    Args:
        model: the model.
        schedule: the options of the run.
        open_source: opens the training data; ``None`` if there is none, or nothing is trained.
        is_loaded_next: whether the state of a checkpoint replaces what ``setup`` makes.

    Attributes:
        current: the set-up that runs in this process; ``None`` outside one.
        model: as given.
        is_loaded_next: as given.
    """

    current: ClassVar[SetupContext | None] = None

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        open_source: Callable[[], Source | None],
        *,
        is_loaded_next: bool,
    ) -> None:
        self.model, self.is_loaded_next = model, is_loaded_next
        self._schedule, self._open_source = schedule, open_source
        self._device = torch.get_default_device()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the model have it within a block."""
        vars(self.model)["_run_context"] = SetupContext.current = self
        try:
            yield
        finally:
            vars(self.model)["_run_context"] = SetupContext.current = None

    @property
    def num_steps(self) -> int | None:
        """As :attr:`helios.Context.num_steps`; ``None`` in an evaluation."""
        return self._count(count_steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """As :attr:`helios.Context.steps_per_epoch`; ``None`` in an evaluation."""
        return self._count(count_steps_per_epoch)

    def _count(self, count: Callable[[Schedule, Source], int | None]) -> int | None:
        states = rng.read_states()
        try:
            # Inside it, keyed initialization builds without values; data has values.
            with self._device:
                source = self._open_source()
        finally:
            # What setup draws next does not depend on who asks.
            rng.load_states(states)
        return None if source is None else count(self._schedule, source)
