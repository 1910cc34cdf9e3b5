"""Adds the gradients of one unit over the replicas, each process for its own shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from helios.errors import UsageError
from helios.sharding.fsdp_adapter import is_in_backward
from helios.sharding.waves import NodeSums, Waves


@final
class UnitSum:
    """Adds what the processes compute in each turn, in the order of the tree.

    FSDP reduces after each backward of a module, with zeros for parameters without a gradient. If
    a module is called several times in a forward, autograd yields its gradients at the last one.
    FSDP sees no backward of a call whose inputs need no gradient, or whose result is not used; then
    nobody knows which one is the last, and the sum is made at the end of the turn.

    Args:
        waves: the turns of an iteration.
        note_sum: called before processes exchange gradients.
    """

    def __init__(self, waves: Waves, note_sum: Callable[[], None]) -> None:
        self._waves = waves
        self._note_sum = note_sum
        self._sums = NodeSums(waves.num_replicas)
        self._num_forwards = 0
        self._num_turns = 0
        self._has_new = False
        self._leaf: Tensor | None = None
        self._late: tuple[Tensor, dist.ProcessGroup] | None = None
        self._has_added = False

    def add_late(self) -> None:
        """Add what no backward of this turn was known to be the last for."""
        if self._late is not None:
            output, group = self._late
            leaf = output.new_zeros(group.size(), output.numel())
            self._add(output, leaf if self._leaf is None else self._leaf, group)

    def end_turn(self, name: str) -> None:
        """Forget forward passes without a backward, as those of a loss that left out a module.

        :meth:`add_late` has been called, and gradients were taken.

        Args:
            name: of the unit, for the message.

        Raises:
            UsageError: if there was a sum in some turns of the iteration, but not in all.
        """
        self._num_forwards, self._has_new, self._leaf, self._late = 0, False, None, None
        self._has_added = False
        if not self._waves.is_last:
            return
        if self._num_turns not in (0, self._waves.turn + 1):
            raise UsageError(
                f"All replicas must use the sharded network {name!r} in a training step, but it "
                f"took part in {self._num_turns} of {self._waves.turn + 1} turns. Use it in each "
                'step, multiplied by zero if need be, or train with sharding="none".'
            )
        self._num_turns = 0

    def count_forward(self, *_: Any) -> None:
        """Count a call of the module that will have a backward; a forward pre-hook."""
        if torch.is_grad_enabled() and not is_in_backward():
            self._num_forwards += 1

    def note_gradient(self, _: Tensor) -> None:
        """Note that a parameter has got a gradient since the last reduction."""
        self._has_new = True

    def reduce(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        """Add a row for each process; the output is the whole sum after the last turn.

        Args:
            output: this process's shard of the sum.
            chunks: what this process has computed, one row per process.
            group: the processes.

        Raises:
            UsageError: if there was a sum in this turn, by another backward.
        """
        if self._has_whole_leaf(chunks):
            self._add(output, chunks if self._leaf is None else self._leaf, group)
            return
        # FSDP adds the outputs of a turn to the first one, in place: x + -0.0 has the bits of x.
        output.fill_(-0.0)
        if self._late is None:
            self._late = output, group

    def _add(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        if self._has_added:
            raise UsageError(
                "A training step of a sharded model must have one backward, that of the loss that "
                "it returns, but gradients of a unit came twice. Do not call backward() or "
                'torch.autograd.grad() in train_step(), or train with sharding="none".'
            )
        self._has_added = True
        self._note_sum()
        waves = self._waves
        self._num_turns += 1
        self._leaf = self._late = None
        if waves.is_node:
            self._sums.add(waves.replicas, _halve(chunks, group))
        else:
            received = torch.empty_like(chunks)
            dist.all_to_all_single(received, chunks, group=group)
            # What an idle process has sent is not looked at.
            for replica, row in zip(waves.replicas, received, strict=False):
                self._sums.add(range(replica, replica + 1), row)
            self._sums.release_buffers([received])
        if waves.is_last:
            output.copy_(self._sums.take())

    def _has_whole_leaf(self, chunks: Tensor) -> bool:
        """Return whether all backwards of this turn have been made; adds them up."""
        has_new, self._has_new = self._has_new, False
        self._num_forwards -= 1
        if self._num_forwards <= 0 and self._leaf is None:
            return True
        if has_new:
            # Zeros are not added where there is no gradient: -0.0 would become 0.0.
            self._leaf = chunks.clone() if self._leaf is None else self._leaf.add_(chunks)
        return self._num_forwards <= 0


def _halve(chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the row of this process over all processes, nearest rank first.

    Args:
        chunks: one row per process, of which there are 2^k.
        group: the processes.
    """
    rank, rows = group.rank(), chunks
    for level in range(group.size().bit_length() - 1):
        partner, bit = rank ^ (1 << level), (rank >> level) & 1
        mine, theirs = rows[bit::2], rows[1 - bit :: 2].contiguous()
        received = torch.empty_like(theirs)
        peer = dist.get_global_rank(group, partner)
        exchange = [
            dist.P2POp(dist.irecv, received, peer, group),
            dist.P2POp(dist.isend, theirs, peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        rows = torch.add(received, mine) if bit else torch.add(mine, received)
    return rows.reshape(-1)
