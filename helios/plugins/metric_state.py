"""Metrics and their state: one set for each replica, and the merged one.

Replicas use their own batches. When a value is due, the states of all replicas are merged in the
order of replicas, so that the value does not depend on the number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from helios.core.memory import same
from helios.errors import ArgumentError, ArgumentTypeError
from helios.protocols import Stateful

_METHODS = "update, compute, reset, state_dict and load_state_dict"
_REMEDY = (
    "Give it merge_state(other), which adds the data of another metric before its own; or "
    "return {name: (sum, weight)} from the step, which is summed over all replicas."
)


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
class _Persistent(Protocol):
    """A metric that omits its state from its ``state_dict`` unless ``persistent`` is called."""

    def persistent(self, mode: bool) -> Any: ...


@runtime_checkable
class _SelfJoining(Protocol):
    """A metric that merges its state over a process group by itself, if a function says so."""

    distributed_available_fn: Any


def _is_never_there() -> bool:
    return False


class _Holder:
    """One metric and its state.

    A metric that is a module may hold counters beside its state, such as its number of updates:
    numeric attributes that differ from those of a metric without data are saved, too.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        metric.reset()
        for part in self._parts().values():
            if isinstance(part, _Persistent):
                part.persistent(True)
        self._fresh = self._numbers()

    def _parts(self) -> dict[str, nn.Module]:
        return dict(self.metric.named_modules()) if isinstance(self.metric, nn.Module) else {}

    def _numbers(self) -> dict[str, float]:
        return {
            f"{path}.{name}": value
            for path, part in self._parts().items()
            for name, value in vars(part).items()
            if type(value) in (int, float)
        }

    def move(self, device: torch.device) -> None:
        """Move a metric that is a module to the device of its inputs."""
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)

    def capture(self) -> dict[str, Any]:
        """Return the state."""
        numbers = self._numbers()
        return {
            "state": dict(self.metric.state_dict()),
            "numbers": {
                name: value for name, value in numbers.items() if value != self._fresh.get(name)
            },
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state."""
        self.metric.load_state_dict(dict(saved["state"]))
        present, parts = self._numbers(), self._parts()
        for name, value in (self._fresh | saved["numbers"]).items():
            if present.get(name) != value:
                path, _, attribute = name.rpartition(".")
                setattr(parts[path], attribute, value)

    def leave_alone(self) -> None:
        """Keep the metric from merging over processes by itself: data would count twice."""
        for part in self._parts().values():
            if isinstance(part, _SelfJoining):
                vars(part)["distributed_available_fn"] = _is_never_there

    def find_fault(self) -> str:
        """Return why metrics of this kind cannot be merged; empty if they can."""
        if not isinstance(self.metric, Mergeable):
            return "it has no merge_state"
        inner = [path for path, part in self._parts().items() if path and self._is_missed(part)]
        if inner:
            return f"its merge_state does not merge the metrics in it ({', '.join(inner)})"
        try:
            one, other = copy.deepcopy(self.metric), copy.deepcopy(self.metric)
        except Exception as error:
            return f"it cannot be copied: {error!r}"
        try:
            one.merge_state(other)
        except Exception as error:
            return f"two without data cannot be merged: {error!r}"
        if not _are_same_states(one.state_dict(), other.state_dict()):
            return "merging two without data does not give one without data"
        return ""

    def _is_missed(self, part: nn.Module) -> bool:
        """Whether a part has the same merge_state as the whole, which does not handle parts."""
        owner = next(kind for kind in type(self.metric).__mro__ if "merge_state" in vars(kind))
        return isinstance(part, owner)


@final
class Tally:
    """Metrics by name, and their number of updates: those of one replica, or of all.

    Args:
        metrics: the metrics; they are reset.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._holders = {name: _Holder(metric) for name, metric in metrics.items()}
        self._device = torch.device("cpu")
        self.num_updates = 0

    @property
    def names(self) -> list[str]:
        """The names of the metrics."""
        return list(self._holders)

    def reset(self) -> None:
        """Discard all data."""
        for holder in self._holders.values():
            holder.metric.reset()
        self.num_updates = 0

    def move(self, device: torch.device) -> None:
        """Move to the device of the inputs."""
        self._device = device
        for holder in self._holders.values():
            holder.move(device)

    def update(self, arguments: Sequence[Any]) -> None:
        """Add a batch."""
        for holder in self._holders.values():
            holder.metric.update(*arguments)
        self.num_updates += 1

    def compute(self) -> dict[str, Any]:
        """Return the values by name."""
        return {name: holder.metric.compute() for name, holder in self._holders.items()}

    def capture(self) -> dict[str, Any]:
        """Return the state, by reference."""
        metrics = {name: holder.capture() for name, holder in self._holders.items()}
        return {"num_updates": self.num_updates, "metrics": metrics}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of the metrics that exist."""
        self.num_updates = saved["num_updates"]
        for name in saved["metrics"].keys() & self._holders.keys():
            self._holders[name].restore(saved["metrics"][name])
            self._holders[name].move(self._device)

    def prepare_to_join(self) -> None:
        """Reset the metrics, and check that those of several replicas can be merged.

        Raises:
            ArgumentError: for one that cannot.
        """
        self.reset()
        for name, holder in self._holders.items():
            holder.leave_alone()
            if fault := holder.find_fault():
                raise ArgumentError(
                    f"Metrics(metrics=...) must hold metrics that can be merged, because each of "
                    f"several replicas measures by itself, got {name!r} "
                    f"({type(holder.metric).__name__}): {fault}. {_REMEDY}"
                )

    def copy(self) -> Tally:
        """Return a copy without data."""
        metrics = {name: copy.deepcopy(part.metric) for name, part in self._holders.items()}
        tally = Tally(metrics)
        tally.move(self._device)
        return tally

    def join(self, states: Sequence[Mapping[str, Any]], spare: Tally) -> None:
        """Merge the states of several tallies into this one, one after the other.

        Args:
            states: the captured states, in order. Those without data are skipped, because an
                empty state need not be neutral.
            spare: a copy to load each state into.
        """
        self.reset()
        full = [state for state in states if state["num_updates"]]
        if not full:
            return
        self.restore(full.pop())
        for state in reversed(full):
            spare.reset()
            spare.restore(state)
            for mine, theirs in zip(self._metrics, spare._metrics, strict=True):
                assert isinstance(mine, Mergeable)
                mine.merge_state(theirs)
            self.num_updates += spare.num_updates
        spare.reset()

    @property
    def _metrics(self) -> list[Metric]:
        return [holder.metric for holder in self._holders.values()]


def portable(tree: Any) -> Any:
    """Return a state with copies of its tensors on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {name: portable(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(portable, tree))
    return tree


def _are_same_states(one: Any, other: Any) -> bool:
    """Return whether two states have the same values, in whatever order and kind of container."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = one.keys()
        return names == other.keys() and all(_are_same_states(one[n], other[n]) for n in names)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same_states, one, other))
    # A number of the one may be a tensor of the other.
    return same(one, other) or bool(not isinstance(one, type(other)) and one == other)


def take_apart(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name, with module dicts split into their members.

    Some collections decide in their first update which members share a state. A run that resumes
    inside an epoch could decide differently.

    Raises:
        ArgumentError: if there is none, or the same one twice.
        ArgumentTypeError: for something that is not a metric.
    """
    if not isinstance(metrics, Mapping | nn.ModuleDict) or not metrics:
        raise ArgumentError(
            f"Metrics(metrics=...) must be a dict of at least one metric, got {metrics!r}. Pass "
            'e.g. {"accuracy": Accuracy(task="multiclass", num_classes=10)}.'
        )
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            found |= {f"{name}/{key}": part for key, part in metric.items()}
        else:
            found[name] = metric
    for name, metric in found.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            raise ArgumentTypeError(
                f"Metrics(metrics=...) must map names to objects with {_METHODS}, got "
                f"{name!r}: {type(metric).__name__}. Add the missing methods."
            )
    if len({id(metric) for metric in found.values()}) < len(found):
        raise ArgumentError(
            f"Metrics(metrics=...) must hold each metric once, got one twice among {list(found)}. "
            "Pass a copy: it would be updated twice."
        )
    return found
