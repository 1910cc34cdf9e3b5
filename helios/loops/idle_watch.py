"""Notices that the steps of a new run learn nothing, as with a forgotten ``return loss``.

A step that returns ``None`` may collect data, or update tables as k-means and EM do, so everything
that the owners of state hold is compared with what it was before the first step.
"""

from __future__ import annotations

from typing import final

from torch.nn.parameter import is_lazy

from helios.core.sharded_tensors import is_sharded
from helios.errors import UsageError
from helios.session import Session
from helios.state.steps import mark_of_tensor

# BatchNorm counts and averages in every forward, also in one whose loss is forgotten.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def watch_idle_steps(session: Session) -> IdleWatch | None:
    """Begin to watch whether the steps of a new run learn anything, if that can be seen."""
    processor = session.model.batch_processor
    if processor is not None and not processor.need_backward:
        return None
    networks = session.model.discovery.modules().values()
    tensors = [each for net in networks for each in (*net.parameters(), *net.buffers())]
    # Lazy ones get their values in the first step; sharded ones need a loss that is returned.
    if any(is_lazy(each) or is_sharded(each) for each in tensors):
        return None
    return IdleWatch(session)


@final
class IdleWatch:
    """Compares what a run holds now with what it held before its first step.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._name = type(session.model).__name__
        self._discovery = discovery = session.model.discovery
        self._gather = session.replicas.gather_objects
        others = session.owner_states.watch(sees_unsaved=True, sees_data=True)
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
