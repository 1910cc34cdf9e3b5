"""What an engine does where models may be sharded over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from helios.engines.components import ComponentState
from helios.replicas.gradients import Gradients
from helios.replicas.replicas import Replicas
from helios.replicas.row_norm import norm_by_rows


class ShardingEngine(ComponentState):
    """Shards networks, ends turns without a replica, and measures gradients of shards."""

    _gradients: Gradients
    _replicas: Replicas

    def _shard(
        self,
        networks: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        units: Mapping[str, nn.Module],
        prepare: Callable[[str], None] | None = None,
    ) -> None:
        """Shard networks over the processes, if the run is sharded and there are several.

        Args:
            networks: the networks by path, the same in all processes.
            optimizers: the optimizers by path, which get the sharded parameters.
            units: modules whose parameters are gathered together, by name.
            prepare: is called with the name of a unit before it is sharded, and makes it whole;
                ``None`` if all are.

        Raises:
            UsageError: if this PyTorch cannot do it.
        """
        if self._replicas.is_sharded_over_processes:
            # Imported here because it takes long, and only such runs need it.
            from helios.sharding.networks import shard_networks

            self._gradients = shard_networks(networks, optimizers, units, self._replicas, prepare)

    @property
    def _has_idle_turn(self) -> bool:
        """Whether a turn of each iteration has no replica for this process."""
        return self._gradients.has_idle_turn

    def _sharded_parameters(self) -> Iterable[Tensor]:
        """Return the parameters of which each process holds a shard."""
        return self._gradients.sharded_parameters()

    def _end_turn(self) -> None:
        """End the turn of a replica, before one in which this process has none."""
        self._gradients.end_turn()

    def _compare_calls(self) -> None:
        """Compare which units the processes have called, at the end of a pass without gradients.

        Raises:
            UsageError: if they differ.
        """
        self._gradients.compare_calls()

    def find_norm(self, gradients: Sequence[Tensor] | Tensor, norm_type: float = 2.0) -> Tensor:
        """Return a norm of gradients; where models are sharded, all processes call this together.

        Args:
            gradients: one, or several in a list.
            norm_type: the ``p`` of the norm; 2 or ``inf`` where models are sharded.

        Raises:
            UsageError: for another one there, whose bits depend on the number of processes.
        """
        replicas = self._replicas
        if replicas.is_sharded:
            several = [gradients] if isinstance(gradients, Tensor) else gradients
            return norm_by_rows(several, replicas.num_processes, norm_type=norm_type)
        if isinstance(gradients, Tensor):
            found: Tensor = torch.linalg.vector_norm(gradients, norm_type)
            return found
        return get_total_norm(gradients, norm_type)
