"""Refuses updates of sharded models that draw random numbers.

Each process draws for its shards only, so the weights would depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from helios.core import rng
from helios.core.memory import same
from helios.errors import UsageError


@final
class StepDraws:
    """Looks for random numbers in the updates of a run."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @contextmanager
    def refused(self, optimizer: Optimizer, name: str) -> Iterator[None]:
        """Refuse random numbers in a step of an optimizer, in a ``with`` statement.

        In the first step of a start, and in those whose number is a power of two, each operation is
        looked at. In all, the default generators are compared.

        Args:
            optimizer: the optimizer.
            name: what is called, for the error.

        Raises:
            UsageError: if some were drawn.
        """
        number = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        before = [*rng.read_states().values()]
        with nullcontext() if number & (number - 1) else _Watch(name):
            yield
        if not all(map(_is_same, before, rng.read_states().values())):
            raise _make_error(name)


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


def _make_error(name: str) -> UsageError:
    return UsageError(
        f"{name} must not draw random numbers with "
        'Trainer(sharding="full"), but it does: each process draws for its shards only, so the '
        "weights would depend on the number of processes. Nothing of this update is saved. Use an "
        'optimizer and an engine that draw none, or sharding="none".'
    )
