"""The replicas of a process take turns in an iteration, each on its own random numbers and buffers.

What hooks draw comes from a stream without a replica, the same on all processes, so that it does
not depend on who carries what (DESIGN R2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import nn

from helios.core import rng
from helios.engines.buffers import ReplicaBuffers
from helios.engines.replicated import Replicas


@final
class Turns:
    """The turns of the replicas of this process, iteration by iteration.

    Args:
        replicas: the replicas of the run.
        seed: the run's seed.

    Attributes:
        replica: whose turn it is, or was last.
        opens_window: whether the turn is one of the first iteration of a window.
        is_watched: whether what a turn changes in the model is looked for.
        changes: what was found in the turns of this iteration, by path.
        is_manual: whether a turn that was watched made its updates itself.
    """

    def __init__(self, replicas: Replicas, seed: int) -> None:
        self.replica = replicas.block.start
        self.opens_window = False
        self.is_watched = False
        self.changes: set[str] = set()
        self.is_manual = False
        self._replicas = replicas
        self._buffers = ReplicaBuffers(replicas)
        self._seed = seed
        self._iteration = 0
        self._num_reopened = 0
        self._is_over = False
        lone = replicas.is_lone
        self._before = rng.KeySeries(seed, "train", suffix=(0,) if lone else ("before",))
        self._after = rng.KeySeries(seed, "train", suffix=("after",))
        self._own = {r: rng.KeySeries(seed, "train", suffix=(r,)) for r in replicas.block}

    @property
    def is_first(self) -> bool:
        """Whether it is the turn of the first replica of this process."""
        return self.replica == self._replicas.block.start

    @property
    def is_last(self) -> bool:
        """Whether it is the turn of the last replica of this process."""
        return self.replica == self._replicas.block.stop - 1

    def find_buffers(self, networks: Iterable[nn.Module]) -> None:
        """Look for the buffers of networks; before a window opens."""
        self._buffers.find(networks)

    def begin_iteration(self, iteration: int) -> None:
        """Set the random numbers of an iteration: one replica's for all of it, or its hooks'."""
        self._iteration = iteration
        self._num_reopened = 0
        self._is_over = False
        rng.reseed(self._before.at(iteration))

    def begin(self, replica: int, *, opens_window: bool) -> None:
        """Begin the turn of one of several replicas.

        Args:
            replica: its number.
            opens_window: whether this iteration is the first of a window.
        """
        self.replica = replica
        self.opens_window = opens_window
        if opens_window and self.is_first:
            self._buffers.begin_window()
        self._buffers.enter(replica)
        rng.reseed(self._own[replica].at(self._iteration))

    def end(self) -> None:
        """End a turn that is not the last of the iteration."""
        self._buffers.leave(self.replica)

    def finish(self, *, ends_window: bool) -> None:
        """End the last turn of an iteration: what follows is the same on all processes.

        Args:
            ends_window: whether the iteration is the last of its window.
        """
        if self._replicas.is_lone or self._is_over:
            return
        self._is_over = True
        self._buffers.leave(self.replica)
        if ends_window:
            self._buffers.commit()
        else:
            self._buffers.enter(self._replicas.block.start)
        rng.reseed(self._after.at(self._iteration))

    @property
    def is_over(self) -> bool:
        """Whether the last turn of several replicas has ended."""
        return self._is_over

    def reopen(self) -> None:
        """Go on with the last turn, for a batch that is trained on in several updates."""
        self._is_over = False
        self._num_reopened += 1
        fields = ("train", self._iteration, self.replica, self._num_reopened)
        rng.reseed(rng.key(self._seed, *fields))

    def drop_window(self) -> None:
        """End a window without an update."""
        if not self._replicas.is_lone:
            self._buffers.commit()
