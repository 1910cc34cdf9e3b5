"""``PerReplica``: what a plugin accumulates separately in each replica, and merges in their order.

So what it computes does not depend on the number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch

from helios.core.utils import Stateful
from helios.engines.device import move_to_device

if TYPE_CHECKING:
    from helios.run_parts import RunParts

Part = TypeVar("Part", bound=Stateful)

_CPU = torch.device("cpu")


@final
class PerReplica(Generic[Part]):
    """One object for each replica of the run; see :meth:`helios.hooks.Context.per_replica`.

    Attributes:
        local: the objects of the replicas of this process, by the number of the replica, in order.

    Args:
        parts: the objects of the run.
        make: as there.
        merge: as there.
    """

    def __init__(
        self, parts: RunParts, make: Callable[[], Part], merge: Callable[[Part, Part], Part]
    ) -> None:
        self._parts = parts
        self._make = make
        self._merge = merge
        self.local = {replica: make() for replica in parts.replicas.local_replicas}

    @property
    def current(self) -> Part:
        """The object of the replica that runs, where ``Context.replica`` is valid."""
        return self.local[self._parts.runner.replica]

    def merged(self) -> Part:
        """Return an object with what all replicas have; all processes must call this together."""
        *others, last = self._gather()
        found = self._load(last)
        for state in reversed(others):
            found = self._merge(self._load(state), found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all replicas; all processes must call this together."""
        return {"replicas": self._gather()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of the replicas of this process."""
        for replica, state in enumerate(state_dict.get("replicas", ())):
            if replica in self.local:
                self.local[replica].load_state_dict(copy.deepcopy(state))

    def _gather(self) -> list[dict[str, Any]]:
        own = [move_to_device(part.state_dict(), _CPU) for part in self.local.values()]
        return self._parts.replicas.gather_replicas(own)

    def _load(self, state: dict[str, Any]) -> Part:
        part = self._make()
        part.load_state_dict(copy.deepcopy(state))
        return part
