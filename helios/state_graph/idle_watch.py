"""Notices that the steps of a new run learn nothing, as with a forgotten ``return loss``.

A step that returns ``None`` may collect data, or update tables as k-means and EM do, so everything
that the owners of state hold is compared with what it was before the first step. This happens after
the first window, after a number of batches, at the end of the first epoch and before a save, and
never again once something has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from helios.errors import UsageError
from helios.state_graph.discovery import Discovery
from helios.state_graph.owner_states import Owners
from helios.state_graph.step_effects import mark_of_tensor

_LOGGER = logging.getLogger(__name__)
_MOST_BATCHES = 100
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
        self._name = name
        self._discovery = discovery
        self._gather = gather
        self._has_warned = False
        self._model = discovery.watch(sees_unsaved=True)
        self._others = owners.watch(sees_unsaved=True, sees_data=True)
        self._buffers = self._mark_buffers()

    def follow(self, iteration: int, *, is_manual: bool, ends_window: bool) -> bool:
        """Look at the end of the first window and after a number of batches.

        Returns:
            Whether to go on watching.

        Raises:
            UsageError: if nothing was learned in that many batches.
        """
        if not is_manual:
            return False
        if iteration >= _MOST_BATCHES:
            self.refuse(iteration)
            return False
        if self._has_warned or not ends_window:
            return True
        self._has_warned = True
        changes = self._find_changes()
        if not all(change.endswith(_STATISTICS) for change in changes):
            return False
        _LOGGER.warning(
            "%s.train_step has returned None, and nothing was learned: did you forget `return "
            "loss`? No optimizer has stepped, and no parameter has a gradient or has changed.",
            self._name,
        )
        return not changes

    def refuse(self, iteration: int) -> None:
        """Refuse a run that has learned nothing so far.

        Raises:
            UsageError: in all processes, if nothing has changed in any of them.
        """
        if self._find_changes():
            return
        raise UsageError(
            f"{self._name}.train_step must return the loss or learn by itself, but it has returned "
            f"None in all {iteration} batches, no optimizer has stepped, no parameter has a "
            "gradient, and nothing of the model has changed since setup. Did you forget `return "
            "loss`? If it collects data, keep it in an attribute of the model, which is saved."
        )

    def _find_changes(self) -> list[str]:
        """Return the paths of what has changed or has a gradient in any process."""
        found = self._model.changed()
        for _, watch in self._others:
            found += watch.changed()
        buffers = self._mark_buffers()
        names = sorted(buffers.keys() | self._buffers.keys())
        found += [name for name in names if buffers.get(name) != self._buffers.get(name)]
        named = dict(self._discovery.moved()[0])
        for network in self._discovery.modules().values():
            named |= network.named_parameters()
        found += [name for name, parameter in named.items() if parameter.grad is not None]
        return [path for paths in self._gather(found) for path in paths]

    def _mark_buffers(self) -> dict[str, bytes]:
        return {
            f"{path}.{name}": mark_of_tensor(buffer, reads_bits=True)
            for path, network in self._discovery.modules().items()
            for name, buffer in network.named_buffers()
        }
