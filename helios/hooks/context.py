"""What hooks may see of a run: one live object, the same from its start to its end (R23).

Loops move its fields; everything else is read where it lives. Plugins have it as ``self.context``,
and every :class:`helios.plugins.HookContext` gets it as its argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from helios.errors import UsageError
from helios.hooks.run_view import RunView
from helios.state import Cursor, Phase, TrainingState, TrainingUnit

if TYPE_CHECKING:
    from helios.engines.engine import Engine
    from helios.model.model import Model


Item = TypeVar("Item")


class Context:
    """The live object that hooks get.

    Ids count from 0 and rise after the end hooks of what they number (C13, R25); the counters of
    :attr:`state` are the published ones, from 1.

    Attributes:
        batch: the present batch: as it came for the batch's hooks, transformed for the forward
            ones (R31); ``None`` between batches.
        model_outputs: what the present step returned, or its batch processor's outputs.
        attached_loss: the present loss with its graph, for the loops; hooks read :attr:`loss`.
        stepping_optimizer: the optimizer that steps; ``None`` outside an optimizer step.
        is_optimizer_step_committed: whether the last update was made; ``None`` before the first.
        exception: what ended the run, for exits of contexts; ``None`` while all is well (R16).
        resumed: whether the scope was begun before this start of the run, in another process.
        start_epoch: epoch in which this start of the run began, from 0.
        start_step: optimizer steps that were made before this start.
    """

    def __init__(self, run: RunView) -> None:
        self._run = run
        self.batch: Any = None
        self._raw_batch: Any = None
        self.model_outputs: Any = None
        self.attached_loss: Tensor | None = None
        self.stepping_optimizer: Optimizer | None = None
        self.is_optimizer_step_committed: bool | None = None
        self.exception: BaseException | None = None
        self.resumed = False
        self.start_epoch = 0
        self.start_step = 0
        self._skip_reason = ""
        self._is_window_open = False

    def begin_batch(self, batch: Any) -> None:
        """Show a new batch; for the loops."""
        self.batch = self._raw_batch = batch

    def show_raw_batch(self) -> None:
        """Show the batch as it came, for the ends of its hooks (R31); for the loops."""
        self.batch = self._raw_batch

    def end_batch(self) -> None:
        """Let go of the batch and all that was computed from it; for the loops."""
        self.batch = self._raw_batch = self.model_outputs = self.attached_loss = None

    @property
    def loss(self) -> Tensor | None:
        """The present loss, detached; ``None`` before there is one, and in manual steps (R7)."""
        return None if self.attached_loss is None else self.attached_loss.detach()

    @property
    def model(self) -> Model:
        """The user's model."""
        return self._run.model

    @property
    def engine(self) -> Engine:
        """The engine: the device and what it does."""
        return self._run.engine

    @property
    def state(self) -> TrainingState:
        """The counters, as users know them."""
        return self._run.state

    @property
    def phase(self) -> Phase:
        """What the run is doing now; a validation inside fit is ``Phase.VALIDATION``."""
        return self._run.phase

    @property
    def is_sanity_check(self) -> bool:
        """Whether the present validation is a trial before the training, that leaves no trace."""
        return self._run.is_sanity_check

    @property
    def can_save(self) -> bool:
        """Whether the run writes checkpoints at all; without them an interruption loses all."""
        return self._run.can_save

    @property
    def is_in_epoch(self) -> bool:
        """Whether the run goes on from a checkpoint that was taken inside an epoch."""
        return self._run.is_in_epoch

    @property
    def is_interrupted(self) -> bool:
        """Whether the run breaks off, or has broken off, unfinished: a scope may end early."""
        return self._run.is_interrupted

    @property
    def num_replicas(self) -> int:
        """The data-parallel workers over which the run is defined (DESIGN R3); 1 for most runs."""
        return self._run.replicas.num_replicas

    def choose(self, lone: Any, shared: Any) -> Any:
        """Return the way for one replica, or that for several: to be chosen once, at a start."""
        return lone if self._run.replicas.is_lone else shared

    @property
    def num_processes(self) -> int:
        """The processes that carry the replicas; no result may depend on it."""
        return self._run.replicas.num_processes

    @property
    def global_rank(self) -> int:
        """Number of this process among all of them, from 0."""
        return self._run.replicas.rank

    rank = global_rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0."""
        return self._run.model.local_rank

    @property
    def replica(self) -> int:
        """Number of the replica that trains now, from 0.

        It holds from ``on_forward_start`` to ``on_backward_end``, which come once for each replica
        of this process; :attr:`batch`, :attr:`model_outputs` and :attr:`loss` are the replica's.
        """
        return self._run.turns.replica

    def agree(self, flag: bool) -> bool:
        """Return whether any process raises a flag; the same on all of them.

        All processes must ask, in the same order: in the events of iterations, windows, updates,
        epochs and whole passes. Forwards and backwards, and the batches of an evaluation, come as
        often as a process has replicas with data: one that asks there waits for ever.

        Args:
            flag: what this process says.
        """
        (is_raised,) = self._run.replicas.agree(flag)
        return bool(is_raised)

    def gather(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks.

        All processes must call it, where :meth:`agree` may be called. Blocks of replicas follow
        each other, so values by replica, put one behind the other, are in the order of replicas.

        Args:
            value: plain values and CPU tensors.
        """
        return self._run.replicas.gather_objects(value)

    @property
    def epoch_id(self) -> int:
        """Number of the epoch, from 0."""
        return self._run.cursor.epoch

    @property
    def step_id(self) -> int:
        """Number of the present optimizer step in its epoch, from 0."""
        return self._run.cursor.step

    @property
    def global_step_id(self) -> int:
        """Number of the present optimizer step in the run, from 0."""
        return self._run.state.global_step

    @property
    def micro_step_id(self) -> int:
        """Number of the present batch in its epoch, from 0."""
        return self._run.cursor.batch

    @property
    def global_micro_step_id(self) -> int:
        """Number of the present batch in the run, from 0."""
        return max(self._run.state.global_iteration - 1, 0)

    @property
    def window_index(self) -> int:
        """Number of the present batch in its accumulation window, from 0."""
        schedule = self._run.schedule
        if not schedule.is_by_epoch:
            return self.global_micro_step_id % schedule.accumulation_steps
        if self._run.is_manual_mode:
            return 0
        return self._run.cursor.batch % schedule.accumulation_steps

    @property
    def max_epoch(self) -> float | None:
        """The epochs that the run is to have; ``None`` where steps are counted."""
        schedule = self._run.schedule
        return schedule.total_steps if schedule.unit is TrainingUnit.EPOCH else None

    @property
    def max_step(self) -> float | None:
        """The optimizer steps that the run is to have; ``None`` where epochs are counted."""
        schedule = self._run.schedule
        return schedule.total_steps if schedule.unit is TrainingUnit.ITERATION else None

    @property
    def dataloader(self) -> DataLoader[Any] | None:
        """The loader of the phase, to read its properties; the loop iterates over it.

        A loader that is no ``torch.utils.data.DataLoader`` is returned as it is.
        """
        return self._run.find_loader()

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers of the model, by attribute path."""
        return self._run.find_optimizers()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps, or the model's only one; ``None`` where there are several."""
        return self.stepping_optimizer or _only(self.optimizers)

    @property
    def lr_schedulers(self) -> dict[str, LRScheduler]:
        """The learning-rate schedulers of the model, by attribute path."""
        return self._run.find_schedulers()

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The model's only learning-rate scheduler; ``None`` where there are none or several."""
        return _only(self.lr_schedulers)

    @property
    def is_optimizer_step_boundary(self) -> bool:
        """Whether the present batch is the last of its window."""
        return self._run.state.is_step_boundary

    @property
    def place(self) -> Cursor:
        """Where the present training batch lies in the data: a copy, to be kept if wanted."""
        return dataclasses.replace(self._run.cursor)

    def indices_of(self, place: Cursor | None = None) -> list[Any] | None:
        """Return the indices of the samples of a training batch; ``None`` if nobody knows them.

        They are computed anew from the place, so that nothing is kept for it in every iteration.
        With several replicas they are those of the whole iteration, replica by replica.

        Args:
            place: what :attr:`place` was in that batch; the present batch if left out.
        """
        return self._run.indices_of(place or self._run.cursor)

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Log numbers by name, as of the present iteration: to TensorBoard and all who log.

        Args:
            scalars: numbers, or tensors of one element, by name, such as ``"train/loss"``.
        """
        self._run.log(scalars)

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint at the next safe point (DESIGN R4)."""
        self._run.request_checkpoint()

    def request_stop(self, reason: str) -> None:
        """Ask for the regular end of the run at the next safe point."""
        self._run.request_stop(reason)

    def interrupt(self, reason: str) -> None:
        """Ask for a checkpoint and an early return at the next safe point; the run is not finished.

        ``fit`` returns False then, with exit code 75, and the same command goes on.
        """
        self._run.interrupt(reason)

    def skip_step(self, reason: str) -> None:
        """Leave out the present update: from ``on_training_step_start`` to its own start event.

        Its gradients are thrown away; schedulers and, in ITERATION unit, ``current_iteration`` do
        not move. One process that asks is enough: all of them leave it out, and know by
        :attr:`is_optimizer_step_committed` in ``on_before_zero_grad``.

        Raises:
            UsageError: in manual steps, where the model makes the update itself, and outside of a
                window: the next one would be hit, and a resume in between would not know of it.
        """
        if self._run.is_manual_mode:
            raise UsageError(
                "Context.skip_step() must be called in automatic mode, but train_step returns None "
                "and steps itself. Leave out the step there, or return the loss."
            )
        if not self._is_window_open:
            raise UsageError(
                "Context.skip_step() must be called between on_training_step_start and the update "
                "that it leaves out, in on_optimizer_step_start at the latest. No window is open "
                "here."
            )
        self._skip_reason = self._skip_reason or reason

    def open_window(self) -> None:
        """Begin a window, whose update may be left out; for the loops."""
        self._is_window_open = True

    def close_window(self) -> None:
        """End a window; for the loops.

        Raises:
            UsageError: if a skip was asked for after the update that it was meant for.
        """
        self._is_window_open = False
        if self._skip_reason:
            self._skip_reason = ""
            raise UsageError(
                "Context.skip_step() must be called before the update that it leaves out: in "
                "on_optimizer_step_start at the latest. This window's update was made already."
            )

    def take_skip(self) -> str:
        """Return why the present update is left out, empty if it is not; for the loops."""
        reason, self._skip_reason = self._skip_reason, ""
        return reason


def _only(found: Mapping[str, Item]) -> Item | None:
    return next(iter(found.values())) if len(found) == 1 else None
