"""The learning rates that the last steps of the optimizers have used, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from helios.text import rate_text


class UsedRates:
    """Notes the rates of each step when it is made: schedulers may change them right after it.

    Args:
        find_optimizers: returns those of the run, by path.
    """

    def __init__(self, find_optimizers: Callable[[], Mapping[str, Optimizer]]) -> None:
        self._find_optimizers = find_optimizers
        # A script may make new optimizers all the time.
        self._used: MutableMapping[Optimizer, list[Any]] = WeakKeyDictionary()
        self._hook: Any = None

    @property
    def is_open(self) -> bool:
        """Whether steps are watched."""
        return self._hook is not None

    def open(self) -> None:
        """Begin to watch the steps; a second call does nothing."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._see)

    def close(self) -> None:
        """Stop watching, and forget what was seen; a second call does nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._used.clear()

    def _see(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[optimizer] = _rates_of(optimizer)

    def texts(self) -> list[str]:
        """Return e.g. ``["lr 8.2e-4"]``: of each optimizer, and of each group if they differ.

        An optimizer whose steps were not watched has the rates of its next one.
        """
        found = self._find_optimizers()
        parts = []
        for path, optimizer in found.items():
            rates = self._used.get(optimizer) or _rates_of(optimizer)
            texts = dict.fromkeys(rate_text(float(rate)) for rate in rates)
            name = "lr" if len(found) == 1 else f"lr {path}"
            if texts:
                parts.append(f"{name} {'/'.join(texts)}")
        return parts


def _rates_of(optimizer: Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # Schedulers change a tensor in place.
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
