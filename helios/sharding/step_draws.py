"""Refuses updates of sharded models that draw random numbers.

Each process draws for its shards only, so the weights would depend on the number of processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from helios.core import rng
from helios.core.generators import Generator, is_generator, state_of_generator
from helios.core.memory import same
from helios.core.sharded_tensors import local_of
from helios.core.utils import parameters_of
from helios.errors import UsageError


@final
class StepDraws:
    """Looks for random numbers in the updates of a run."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._generators: WeakKeyDictionary[Optimizer, list[Generator]] = WeakKeyDictionary()

    @contextmanager
    def refused(self, optimizer: Optimizer, name: str) -> Iterator[None]:
        """Refuse random numbers in a step of an optimizer, in a ``with`` statement.

        In the first step of a start, and in those whose number is a power of two, each operation is
        looked at, and the parameters are put back. In the others the generators are compared.

        Args:
            optimizer: the optimizer.
            name: what is called, for the error.

        Raises:
            UsageError: if some were drawn.
        """
        number = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        watch, parameters = None, []
        if not number & (number - 1):
            watch, parameters = _Watch(name), parameters_of(optimizer)
            self._generators[optimizer] = _find_generators(optimizer)
        # On the host: there may be no room for them on the device.
        kept = [local_of(each.detach()).to("cpu", copy=True) for each in parameters]
        before = self._read(optimizer)
        try:
            with watch or nullcontext():
                yield
            after = self._read(optimizer)
            if not all(map(_is_same, before, after)):
                raise _make_error(name)
        except UsageError:
            for parameter, values in zip(parameters, kept, strict=True):
                local_of(parameter.detach()).copy_(values)
            raise

    def _read(self, optimizer: Optimizer) -> list[Any]:
        """Return the states of the default generators and of those that the optimizer uses."""
        own = map(state_of_generator, self._generators[optimizer])
        return [*rng.read_states().values(), *own]


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that draw random numbers, from whichever generator."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let what is compiled stay compiled: its bits would be others for this step only."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _make_error(self._name)
        return func(*args, **(kwargs or {}))


def _is_same(before: Any, after: Any) -> bool:
    # The state of random is a tuple of 625 numbers.
    return bool(before == after) if isinstance(before, tuple) else same(before, after)


def _find_generators(optimizer: Optimizer) -> list[Generator]:
    """Return the generators that an optimizer and the modules of its classes hold."""
    tables: list[Mapping[Any, Any]] = [vars(optimizer), *optimizer.param_groups]
    tables += optimizer.state.values()
    names = {kind.__module__ for kind in type(optimizer).__mro__ if kind is not object}
    own = sorted(name for name in names if name.partition(".")[0] != "torch")
    tables += [vars(sys.modules[name]) for name in own if name in sys.modules]
    found = [value for table in tables for value in list(table.values()) if is_generator(value)]
    return list({id(each): each for each in found}.values())


def _make_error(name: str) -> UsageError:
    return UsageError(
        f"{name} must not draw random numbers with "
        'Trainer(sharding="full"), but it does: each process draws for its shards only, so the '
        "weights would depend on the number of processes. Nothing of this update is saved. Use an "
        'optimizer and an engine that draw none, or sharding="none".'
    )
