"""Notices that the steps of a new run learn nothing, as with a forgotten ``return loss``.

A step that returns ``None`` may collect data, or update tables as k-means and EM do, so everything
that the owners of state hold is compared with what it was before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from helios.errors import UsageError
from helios.state.discovery import Discovery
from helios.state.owners import Owners
from helios.state.steps import mark_of_tensor

# BatchNorm counts and averages in every forward, also in one whose loss is forgotten.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@final
class IdleWatch:
    """Compares what a run holds now with what it held before its first step.

    Args:
        name: the name of the model's class, for messages.
        discovery: finds the model's state.
        owners: the attributes of all others.
        gather: returns the values of all processes.
    """

    def __init__(
        self,
        name: str,
        discovery: Discovery,
        owners: Owners,
        *,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._name, self._discovery, self._gather = name, discovery, gather
        others = owners.watch(sees_unsaved=True, sees_data=True)
        self._watches = [discovery.watch(sees_unsaved=True), *(watch for _, watch in others)]
        self._buffers = self._mark_buffers()

    def refuse(self, iteration: int) -> None:
        """Refuse a run that has learned nothing so far.

        Raises:
            UsageError: in all processes, if nothing has changed in any of them.
        """
        found = [path for watch in self._watches for path in watch.changed()]
        marks = self._mark_buffers()
        found += [name for name in marks if marks[name] != self._buffers.get(name)]
        for network in self._discovery.modules().values():
            found += [name for name, each in network.named_parameters() if each.grad is not None]
        changed = [path for paths in self._gather(found) for path in paths]
        if all(path.endswith(_STATISTICS) for path in changed):
            raise UsageError(
                f"{self._name}.train_step has returned None in all {iteration} batches, and "
                "nothing was learned: no optimizer has stepped, and no parameter has a gradient or "
                "has changed. Did you forget `return loss`? If it collects data, keep it in an "
                "attribute of the model, which is saved."
            )

    def _mark_buffers(self) -> dict[str, bytes]:
        return {
            f"{path}.{name}": mark_of_tensor(buffer, reads_bits=True)
            for path, network in self._discovery.modules().items()
            for name, buffer in network.named_buffers()
        }
