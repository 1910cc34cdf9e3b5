"""What a model may know in its ``setup``: how long the run is, and whether a checkpoint follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from helios.core import rng
from helios.core.utils import version_of
from helios.data.horizon import count_steps, count_steps_per_epoch
from helios.data.source import Source
from helios.errors import UsageError
from helios.model.model import Model
from helios.schedule import Schedule
from helios.state.networks import Network, is_odd
from helios.state.owners import internals_of
from helios.state.values import children_of, each_in, is_dense
from helios.storage.content_hash import array_sum, tensor_sum

_Mark: TypeAlias = tuple[str, tuple[int, ...], int]
"""Type, shape and checksum of a tensor or an array; of a parameter, its version and identity."""


def _mark(value: object) -> _Mark | None:
    """Return the mark of a tensor or an array, on any device; ``None`` for anything else."""
    if isinstance(value, nn.Parameter):
        # Of these, there may be more than anybody wants to read.
        return "parameter", (version_of(value),), id(value)
    if isinstance(value, Tensor) and is_dense(value) and not value.is_meta:
        return str(value.dtype), tuple(value.shape), tensor_sum(value.detach().cpu())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, array_sum(value)
    return None


@final
class SetupContext:
    """``context`` of a model while its ``setup`` runs, before there are counters.

    Args:
        model: the model.
        schedule: the options of the run.
        open_source: opens the training data; ``None`` if there is none, or nothing is trained.
        horizon: what the start that wrote the checkpoint was told of the length of the run.
        is_loaded_next: whether the state of a checkpoint replaces what ``setup`` makes.

    Attributes:
        current: the set-up that runs in this process; ``None`` outside one.
        model: as given.
        horizon: what was asked for, by the name of the property.
        is_loaded_next: as given.
    """

    current: ClassVar[SetupContext | None] = None

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        open_source: Callable[[], Source | None],
        *,
        horizon: Mapping[str, int | None],
        is_loaded_next: bool,
    ) -> None:
        self.model, self.is_loaded_next = model, is_loaded_next
        self.horizon = dict(horizon)
        self._schedule, self._open_source = schedule, open_source
        self._device = torch.get_default_device()
        self._loaded: list[Model | nn.Module] = []
        self._known: set[_Mark] = set()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the model have it within a block."""
        vars(self.model)["_run_context"] = SetupContext.current = self
        try:
            yield
        finally:
            vars(self.model)["_run_context"] = SetupContext.current = None

    def note_load(self, module: Model | nn.Module) -> None:
        """Note that weights are loaded here, which a start from a checkpoint has from there.

        Args:
            module: what gets them.
        """
        if not self._loaded:
            members = vars(self.model)
            own = [members[name] for name in members.keys() - internals_of(self.model)]
            self._known = {*filter(None, map(_mark, each_in([own, module], children_of)))}
        self._loaded.append(module)

    @property
    def leaves_weights(self) -> bool:
        """Whether weights were not read, because the checkpoint has them."""
        return self.is_loaded_next and bool(self._loaded)

    def check_loads(self) -> None:
        """Refuse what ``setup`` has made of weights, if no checkpoint will hold it.

        Raises:
            UsageError: if the next start would make it of other weights.
        """
        # Keyed initialization loads after setup, which has made nothing of the weights then.
        if not self._loaded or self.model.loads_after_setup is not None:
            return
        names = [*self._find_dependent()]
        if names:
            raise UsageError(
                f"{type(self.model).__name__}.setup() calls load_weights, and makes "
                f"{', '.join(names)} after that or of these weights, which no checkpoint will "
                "hold: a resume loads none, and would make something else. Make it before "
                "load_weights, or pass load_weights(..., every_start=True)."
            )

    def _find_dependent(self) -> Iterator[str]:
        discovery = self.model.discovery
        if type(self.model).state_dict is not Model.state_dict:
            yield "what its own state_dict returns"
            return
        saved = discovery.saved_modules()
        loaded = {id(x) for net in self._find_loaded() for x in net.parameters()}
        for path, network in discovery.modules().items():
            tensors = [*network.parameters(), *network.buffers()]
            has_loaded = any(id(tensor) in loaded for tensor in tensors)
            if path not in saved:
                is_new = any(_mark(tensor) not in self._known for tensor in tensors)
                if has_loaded or is_new:
                    yield path
            elif has_loaded and is_odd(Network(network)):
                yield f"{path}, whose class has a state_dict of its own,"
        discovery.look_at_values()
        trained = tuple(f"{x}." for x in (*discovery.optimizers(), *discovery.schedulers()))
        for name, value in discovery.pop_values().items():
            mark = _mark(value)
            if mark and mark not in self._known and not name.startswith(trained):
                yield name

    def _find_loaded(self) -> Iterator[nn.Module]:
        for part in self._loaded:
            if isinstance(part, Model):
                yield from part.discovery.saved_modules().values()
            else:
                yield part

    @property
    def num_steps(self) -> int | None:
        """As :attr:`helios.Context.num_steps`; in an evaluation, as the checkpoint knows it."""
        return self._count("num_steps", count_steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """As :attr:`helios.Context.steps_per_epoch`; in an evaluation, as for the other one."""
        return self._count("steps_per_epoch", count_steps_per_epoch)

    def _count(self, name: str, count: Callable[[Schedule, Source], int | None]) -> int | None:
        states = rng.read_states()
        try:
            # Inside it, keyed initialization builds without values; data has values.
            with self._device:
                source = self._open_source()
        finally:
            # What setup draws next does not depend on who asks.
            rng.load_states(states)
        if source is not None:
            self.horizon[name] = count(self._schedule, source)
        return self.horizon.get(name)
