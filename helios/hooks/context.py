"""``Context``: what hooks may see of a run, and ``CHANGES``: what they may change of it.

One live object for the whole run, which reads the run. Plugins have it as ``self.context``; a
:class:`helios.plugins.HookContext` gets it as its argument. Nothing can be assigned: a batch or a
loss that a hook replaced there would be used by some parts of Helios, and not by others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVar

from helios.core.loss_means import as_number
from helios.core.utils import Stateful
from helios.counters import Cursor, Phase, TrainingState, TrainingUnit
from helios.data.source import Source
from helios.engines.device import move_to_device
from helios.engines.engine import Engine
from helios.errors import ArgumentTypeError, ReadOnlyError, UsageError

if TYPE_CHECKING:
    from helios import Model
    from helios.run_parts import RunParts
    from helios.run_state import RunState

Item = TypeVar("Item")
Part = TypeVar("Part", bound=Stateful)
RunModel = TypeVar("RunModel", bound="Model", default="Model", covariant=True)


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of the table.

    Attributes:
        what: what a hook may do.
        by: how, in Markdown.
        attributes: what users assign to instead.
    """

    what: str
    by: str
    attributes: tuple[str, ...] = ()


CHANGES = (
    Change(
        "replace the batch",
        "return it from `process_*_batch`, in one plugin",
        ("batch", "raw_batch"),
    ),
    Change(
        "change gradients",
        "change `parameter.grad`, from `on_backward_end` to `on_optimizer_step_start`",
    ),
    Change(
        "skip an update",
        "call `self.context.skip_step(reason)`, until `on_optimizer_step_start`",
        ("is_optimizer_step_committed",),
    ),
    Change(
        "stop, interrupt or save",
        "call `request_stop(reason)`, `interrupt(reason)` or `request_checkpoint()`",
        ("max_epoch", "max_step", "num_steps", "steps_per_epoch"),
    ),
    Change("log", "call `self.context.log({name: number})`"),
    Change(
        "change weights, buffers, optimizers and schedulers",
        "change the objects themselves, between updates",
        ("model", "optimizer", "optimizers", "lr_scheduler", "lr_schedulers"),
    ),
    Change(
        "change the loss or the outputs",
        "return other ones from `train_step`; a hook cannot",
        ("loss", "model_outputs"),
    ),
)
"""What a hook may change; everything else is read-only. The page of events and errors show it."""


class Context(Generic[RunModel]):
    """The run, as hooks see it: one live object.

    Hooks read it and call its methods; nothing can be assigned. Ids count from 0 and increase after
    the end hooks of the epoch, step or batch that they number; the counters of :attr:`state` count
    from 1. ``Context[MyModel]`` tells type checkers which model it has.
    """

    __slots__ = ("__weakref__", "_parts", "_run")

    _parts: RunParts
    _run: RunState

    def __init__(self, parts: RunParts) -> None:
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_run", parts.run)

    def __setattr__(self, name: str, value: object) -> None:
        rule = f"context.{name} must not be assigned: hooks only read the context."
        for change in CHANGES:
            if name in change.attributes:
                way = change.by.replace("`", "")
                raise ReadOnlyError(f"{rule} To {change.what}, {way}.")
        raise ReadOnlyError(f"{rule} Keep your own values in self.{name}.")

    @property
    def batch(self) -> Any:
        """The current batch; ``None`` between batches.

        As fetched in batch hooks, transformed in forward hooks.
        """
        return self._run.batch

    @property
    def raw_batch(self) -> Any:
        """The current batch as it was fetched."""
        return self._run.raw_batch

    @property
    def model_outputs(self) -> Any:
        """The result of the current step, or the outputs of its batch processor."""
        return self._run.model_outputs

    @property
    def is_optimizer_step_committed(self) -> bool | None:
        """Whether the last update was made; ``None`` before the first."""
        return self._run.is_optimizer_step_committed

    @property
    def exception(self) -> BaseException | None:
        """The exception that ended the run, for exits of contexts; otherwise ``None``."""
        return self._run.exception

    @property
    def resumed(self) -> bool:
        """Whether the scope began before this start of the run, in another process."""
        return self._run.resumed

    @property
    def start_epoch(self) -> int:
        """The epoch in which this start of the run began, from 0."""
        return self._run.start[0]

    @property
    def start_step(self) -> int:
        """Optimizer steps made before this start."""
        return self._run.start[1]

    @property
    def is_replay(self) -> bool:
        """Whether a part of a run is only repeated, to compare it with the run's ledger.

        Its logs and uploads exist already: write nothing then.
        """
        return self._parts.is_replay

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run's checkpoints and records; ``None`` without checkpoints."""
        return self._parts.run_folder

    @property
    def has_changed(self) -> bool:
        """Whether this start may compute other values than the last one, on purpose.

        It went back to ``Trainer(resume=<path>)``, or values that define it have changed.
        """
        return self._run.has_changed

    @property
    def loss(self) -> Tensor | None:
        """The current loss, detached; ``None`` before there is one, and in manual mode."""
        loss = self._run.loss
        return None if loss is None else loss.detach()

    @property
    def model(self) -> RunModel:
        """The user's model."""
        model: Any = self._parts.model
        return model  # type: ignore[no-any-return]

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._parts.engine

    @property
    def state(self) -> TrainingState:
        """The counters."""
        return self._run.state

    @property
    def phase(self) -> Phase:
        """The current phase; a validation inside fit is ``Phase.VALIDATION``."""
        return self._run.phase

    @property
    def is_sanity_check(self) -> bool:
        """Whether the current validation is a sanity check, which has no side effects."""
        return self._run.is_sanity_check

    @property
    def can_save(self) -> bool:
        """Whether the run writes checkpoints; without them, an interruption loses all progress."""
        return self._parts.can_save

    @property
    def is_in_epoch(self) -> bool:
        """Whether the run resumes from a checkpoint that was taken inside an epoch."""
        return self._run.is_in_epoch

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted, now or soon: a scope may end early."""
        return self._run.is_interrupted

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas that define the run; 1 for most runs."""
        return self._parts.replicas.num_replicas

    def choose(self, lone: Any, shared: Any) -> Any:
        """Return one of two values, for one replica or for several; call it once, at the start."""
        return lone if self._parts.replicas.has_single_replica else shared

    @property
    def num_processes(self) -> int:
        """Number of processes that run the replicas; no result may depend on it."""
        return self._parts.replicas.num_processes

    @property
    def global_rank(self) -> int:
        """Rank of this process among all of them, from 0."""
        return self._parts.replicas.rank

    rank = global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self._parts.model.local_rank

    @property
    def replica(self) -> int:
        """Number of the current replica, from 0.

        Valid from ``on_forward_start`` to ``on_backward_end``, which are called once for each
        replica of this process; :attr:`batch`, :attr:`model_outputs` and :attr:`loss` are the
        replica's.
        """
        return self._parts.runner.replica

    @property
    def padding(self) -> tuple[int, int]:
        """The number of padding samples at the end of the replica's batch, and the batch size.

        With several replicas, the first samples of an epoch occur a second time at its end, so that
        all replicas get equally many, unless ``drop_last`` is set. Valid as :attr:`replica` is, in
        training; (0, 0) for batches without padding.
        """
        batches = self._run.batches
        if batches is None or not batches.repeats:
            return 0, 0
        size = self._parts.find_batch_size()
        if size is None:
            return 0, 0
        index = self._parts.replicas.local_replicas.index(self.replica)
        return batches.repeats[index], size

    def agree(self, flag: bool) -> bool:
        """Return whether any process passes True; the same on all processes.

        All processes must call this, in the same order: in the events of iterations, windows,
        updates, epochs and whole passes. Forward and backward events, and the batches of an
        evaluation, occur once per replica with data: a process that calls this there may wait
        forever.

        Args:
            flag: the flag of this process.
        """
        (is_raised,) = self._parts.replicas.agree(flag)
        return bool(is_raised)

    def gather(self, value: Any) -> list[Any]:
        """Return a small value of every process, in the order of ranks.

        All processes must call it, where :meth:`agree` may be called.

        Args:
            value: plain values and CPU tensors.
        """
        return self._parts.replicas.gather_objects(value)

    def gather_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Return a small value of every replica, in their order; otherwise as :meth:`gather`.

        Args:
            values: one for each replica of this process, in order.
        """
        return self._parts.replicas.gather_replicas(values)

    def per_replica(
        self, make: Callable[[], Part], merge: Callable[[Part, Part], Part]
    ) -> PerReplica[Part]:
        """Return an accumulator for each replica, such as for sums over batches.

        Update ``current`` in the events that occur once per replica, or those in ``local``.
        ``merged()`` has the data of all replicas, the same for every number of processes, and
        ``state_dict()`` their states, of which each process loads its own. All processes must call
        these two, where :meth:`agree` may be called.

        Args:
            make: returns an object without data that has ``state_dict`` and ``load_state_dict``.
            merge: gets two objects and returns one with the data of the first, then of the second;
                it may be one of them. The last two replicas are merged first.
        """
        return PerReplica(self._parts, make, merge)

    @property
    def epoch_id(self) -> int:
        """Number of the epoch, from 0."""
        return self._run.cursor.epoch

    @property
    def step_id(self) -> int:
        """Number of the current optimizer step in its epoch, from 0."""
        return self._run.cursor.step

    @property
    def global_step_id(self) -> int:
        """Number of the current optimizer step in the run, from 0."""
        return self._run.state.global_step

    @property
    def micro_step_id(self) -> int:
        """Number of the current batch in its epoch, from 0; skipped batches count."""
        return self._run.cursor.batch

    @property
    def global_micro_step_id(self) -> int:
        """Number of the current batch in the run, from 0."""
        return max(self._run.state.global_iteration - 1, 0)

    @property
    def window_index(self) -> int:
        """Number of the current batch in its accumulation window, from 0."""
        schedule = self._parts.schedule
        if not schedule.is_by_epoch:
            return self.global_micro_step_id % schedule.accumulation_steps
        if self._run.is_manual:
            return 0
        number = self._run.cursor.batch - self._run.num_skipped_batches
        return number % schedule.accumulation_steps

    @property
    def max_epoch(self) -> float | None:
        """Number of epochs of the run; ``None`` if steps are counted."""
        schedule = self._parts.schedule
        return schedule.total_steps if schedule.unit is TrainingUnit.EPOCH else None

    @property
    def max_step(self) -> float | None:
        """Number of optimizer steps of the run; ``None`` if only epochs are counted."""
        schedule = self._parts.schedule
        is_length = schedule.unit is TrainingUnit.ITERATION
        return schedule.total_steps if is_length else schedule.max_steps

    @property
    def num_steps(self) -> int | None:
        """Number of optimizer steps of the run if nothing ends it early; ``None`` if unknown.

        Also in ``setup`` of the model: for a learning rate over the whole run.
        """
        return self._count(Source.count_steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps of an epoch; ``None`` if unknown, or if epochs differ.

        Also in ``setup`` of the model.
        """
        return self._count(Source.count_steps_per_epoch)

    def _count(self, count: Callable[..., int | None]) -> int | None:
        parts, sources = self._parts, self._parts.sources.get(Phase.TRAINING)
        if parts.schedulers is None or not sources:
            # An evaluation.
            return None
        return count(sources[0], parts.schedule, is_manual=bool(self._run.is_manual))

    @property
    def dataloader(self) -> DataLoader[Any] | None:
        """The loader of the phase, to read its properties; the loop iterates over it.

        A loader that is not a ``torch.utils.data.DataLoader`` is returned unchanged.
        """
        sources = self._parts.sources.get(self._run.phase)
        return sources[0].loader if sources else None

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers of the model, by attribute path; read-only."""
        return MappingProxyType(self._parts.model.discovery.optimizers())

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps, or the model's only one; ``None`` if there are several."""
        return self._run.optimizer or _only(self.optimizers)

    @property
    def lr_schedulers(self) -> Mapping[str, LRScheduler]:
        """The learning-rate schedulers of the model, by attribute path; read-only."""
        return MappingProxyType(self._parts.model.discovery.schedulers())

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The model's only learning-rate scheduler; ``None`` if there are none or several."""
        return _only(self.lr_schedulers)

    @property
    def is_optimizer_step_boundary(self) -> bool:
        """Whether the current batch is the last of its accumulation window."""
        return self._run.state.is_step_boundary

    @property
    def place(self) -> Cursor:
        """Position of the current training batch in the data, as a copy that you may keep."""
        return dataclasses.replace(self._run.cursor)

    def indices_of(self, place: Cursor | None = None) -> list[Any] | None:
        """Return the indices of the samples of a training batch; ``None`` if unknown.

        They are computed from the position, so nothing is kept for this in each iteration. With
        several replicas they cover the whole iteration, replica by replica.

        Args:
            place: the value of :attr:`place` in that batch; by default the current batch.
        """
        place = place or self._run.cursor
        source = self._parts.training_source
        return source.indices(place.epoch, batch=place.batch, sample=place.sample)

    def log(self, scalars: Mapping[str, Any], *surplus: object) -> None:
        """Log numbers by name, for the current iteration: to TensorBoard and all loggers.

        Args:
            scalars: numbers, or tensors of one element, by name, such as ``"train/loss"``.
            surplus: must be empty.

        Raises:
            ArgumentTypeError: if they are not a mapping.
        """
        if not isinstance(scalars, Mapping) or surplus:
            raise ArgumentTypeError(
                "context.log(...) must be called with one mapping of names to numbers, got "
                f"{', '.join(map(repr, (scalars, *surplus)))}. Pass e.g. {{'train/loss': loss}}."
            )
        run, hooks = self._run, self._parts.hooks
        files = self._parts.get_scalars()
        is_wanted = files is not None or "on_log" in hooks.active
        if run.is_sanity_check or run.is_repeating or not is_wanted or not scalars:
            return
        if hooks.is_logging:
            raise UsageError(
                "Context.log(...) must not be called in on_log, because it calls on_log itself and "
                "would never return. Log in another event."
            )
        numbers = {name: as_number(name, value) for name, value in scalars.items()}
        step = run.state.global_iteration
        for name, value in numbers.items():
            # One that user code has written at this iteration, as scripts of Helios 1 do, is kept.
            if files is not None and not files.has_point(name, step):
                files.add_scalar(name, value, step)
        hooks.is_logging = True
        try:
            hooks.emit("on_log", numbers, run.state)
        finally:
            hooks.is_logging = False

    def request_checkpoint(self) -> None:
        """Request a checkpoint at the next safe point."""
        self._parts.agreement.check_open("Context.request_checkpoint()")
        self._run.asked.is_checkpoint_wanted = True

    def request_stop(self, reason: str) -> None:
        """Request to finish the run at the next safe point; the first reason counts."""
        self._parts.agreement.check_open("Context.request_stop()")
        self._run.asked.stop_reason = self._run.asked.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """Request a checkpoint and the end of the call at the next safe point, as a signal does.

        ``fit`` then raises ``helios.Interrupted``. Run the same command again to resume.
        """
        self._parts.agreement.check_open("Context.interrupt()")
        self._run.asked.interruption = self._run.asked.interruption or reason

    def skip_step(self, reason: str) -> None:
        """Skip the current update; call this before or in ``on_optimizer_step_start``.

        Its gradients are discarded; schedulers and, in ITERATION unit, ``current_iteration`` do not
        advance. A request of one process is enough: all of them skip the update, and
        :attr:`is_optimizer_step_committed` is False in ``on_before_zero_grad``.

        Raises:
            UsageError: in manual mode, where the model steps its optimizers itself, and outside an
                accumulation window: the skip would affect the next window, and be lost if the run
                resumes in between.
        """
        if self._run.is_manual:
            raise UsageError(
                "Context.skip_step() must be called in automatic mode, but train_step returns None "
                "and updates the weights itself. Skip the update there, or return the loss."
            )
        if not self._run.is_window_open:
            raise UsageError(
                "Context.skip_step() must be called between on_training_step_start and the update "
                "that it skips, in on_optimizer_step_start at the latest. No window is open "
                "here."
            )
        self._run.skip_reason = self._run.skip_reason or reason


def _only(found: Mapping[str, Item]) -> Item | None:
    return next(iter(found.values())) if len(found) == 1 else None


@final
class PerReplica(Generic[Part]):
    """A plugin's accumulators, one per replica; see :meth:`Context.per_replica`.

    Merged in the order of the replicas, it does not depend on the number of processes.

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
        """The object of the current replica, where ``Context.replica`` is valid."""
        return self.local[self._parts.runner.replica]

    def merged(self) -> Part:
        """Return an object with the data of all replicas; all processes must call this together."""
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
        own = [
            move_to_device(part.state_dict(), torch.device("cpu")) for part in self.local.values()
        ]
        return self._parts.replicas.gather_replicas(own)

    def _load(self, state: dict[str, Any]) -> Part:
        part = self._make()
        part.load_state_dict(copy.deepcopy(state))
        return part
