"""Metrics by name and their state: as many as replicas, or one for all.

What has ``merge_state`` is measured in each replica and merged in their order; what cannot be
merged is one object, which is updated with the batches of all replicas in their order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import nn

from helios.core.memory import same
from helios.errors import ArgumentTypeError
from helios.protocols import Stateful


@runtime_checkable
class Metric(Stateful, Protocol):
    """A metric that accumulates over batches."""

    def update(self, *args: Any) -> Any:
        """Add a batch."""
        ...

    def compute(self) -> Any:
        """Return the value over all data since the last reset."""
        ...

    def reset(self) -> Any:
        """Discard all data."""
        ...


@runtime_checkable
class Mergeable(Protocol):
    """A metric that several replicas can measure."""

    def merge_state(self, other: Any, /) -> Any:
        """Add the data of another metric of the same kind, as if it came before this one's."""
        ...


@runtime_checkable
class _OfTorchmetrics(Protocol):
    """A metric that omits its state from its ``state_dict``, and merges over a process group."""

    distributed_available_fn: Any

    def persistent(self, mode: bool) -> Any: ...


def _is_never_available() -> bool:
    return False


@final
class MetricSet:
    """Metrics by name, and their number of updates.

    A metric that is a module may hold counters beside its state, such as its number of updates:
    numeric attributes that differ from those of a metric without data are saved, too.

    Args:
        metrics: the metrics; they are reset.
        device: where those are moved that are modules.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics = metrics
        self._device = device
        self.reset()
        for metric in metrics.values():
            for part in _modules_in(metric).values():
                if isinstance(part, _OfTorchmetrics):
                    part.persistent(True)
                    # Data would count twice.
                    part.distributed_available_fn = _is_never_available
        self._fresh = {name: _numbers_in(metric) for name, metric in metrics.items()}
        self._move()

    def _move(self) -> None:
        for metric in self.metrics.values():
            if isinstance(metric, nn.Module):
                metric.to(self._device)

    def reset(self) -> None:
        """Discard all data."""
        for metric in self.metrics.values():
            metric.reset()
        self.num_updates = 0

    def update(self, arguments: Sequence[Any]) -> None:
        """Add a batch."""
        for metric in self.metrics.values():
            metric.update(*arguments)
        self.num_updates += 1

    def merge_before(self, earlier: MetricSet) -> MetricSet:
        """Return a set with this data after that of an earlier one.

        One without data is left out, because an empty state need not be neutral.
        """
        if not (earlier.num_updates and self.num_updates):
            return earlier if earlier.num_updates else self
        for name, metric in self.metrics.items():
            assert isinstance(metric, Mergeable)
            metric.merge_state(earlier.metrics[name])
        self.num_updates += earlier.num_updates
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by reference."""
        metrics = {}
        for name, metric in self.metrics.items():
            numbers, fresh = _numbers_in(metric), self._fresh[name]
            metrics[name] = {
                "state": dict(metric.state_dict()),
                "numbers": {key: n for key, n in numbers.items() if n != fresh.get(key)},
            }
        return {"num_updates": self.num_updates, "metrics": metrics}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the metrics that exist."""
        self.num_updates = state_dict["num_updates"]
        for name in state_dict["metrics"].keys() & self.metrics.keys():
            metric, saved = self.metrics[name], state_dict["metrics"][name]
            metric.load_state_dict(dict(saved["state"]))
            modules = _modules_in(metric)
            for key, number in (self._fresh[name] | saved["numbers"]).items():
                path, _, attribute = key.rpartition(".")
                setattr(modules[path], attribute, number)
        self._move()


def _modules_in(metric: object) -> dict[str, nn.Module]:
    return dict(metric.named_modules()) if isinstance(metric, nn.Module) else {}


def _numbers_in(metric: object) -> dict[str, float]:
    return {
        f"{path}.{name}": value
        for path, part in _modules_in(metric).items()
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }


def can_merge(metric: Metric) -> bool:
    """Return whether a metric without data can be merged with its like, and stays without data."""
    if not isinstance(metric, Mergeable):
        return False
    own = type(metric).merge_state
    for path, part in _modules_in(metric).items():
        # A method that is that of a metric inside does not merge the metric inside.
        if path and isinstance(part, Mergeable) and type(part).merge_state is own:
            return False
    try:
        one, other = copy.deepcopy(metric), copy.deepcopy(metric)
        one.merge_state(other)
        return same(dict(one.state_dict()), dict(other.state_dict()))
    except Exception:
        return False


def take_apart(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name, with module dicts split into their members.

    Some collections decide in their first update which members share a state. A run that resumes
    inside an epoch could decide differently.

    Raises:
        ArgumentTypeError: for something that is not a metric, or if there is none.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items() if isinstance(metrics, Mapping | nn.ModuleDict) else ():
        if isinstance(metric, nn.ModuleDict):
            found |= {f"{name}/{key}": part for key, part in metric.items()}
        else:
            found[name] = metric
    odd = [name for name, metric in found.items() if not isinstance(metric, Metric)]
    if odd or not found:
        raise ArgumentTypeError(
            "Metrics(metrics=...) must be a dict of names to at least one object with update, "
            "compute, reset, state_dict and load_state_dict, got "
            f"{', '.join(f'{name!r}: {found[name]!r}' for name in odd) or repr(metrics)}."
        )
    return found
