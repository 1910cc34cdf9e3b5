"""``OptimizerLoop``: trains on the losses of a step, one micro-batch at a time.

A step yields its losses. Backward, the sum over micro-batches and replicas, the average, clipping,
updates and clearing all happen here, so users cannot forget them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.core.loss_means import WeightedLoss
from helios.core.sharded_tensors import is_sharded
from helios.core.step_log import StepLog
from helios.core.utils import parameters_of, read_rates
from helios.engines.engine import Engine, redefines
from helios.errors import ArgumentError, UsageError
from helios.findings import FindingKind
from helios.loops.loop import Forward, Loop, make_stray_stop, note_changes
from helios.model.model import Model
from helios.model.processor import Processed
from helios.run_parts import RunParts
from helios.run_state import Place
from helios.sharding.repeated_steps import without_trace
from helios.sharding.requirements import StepDraws
from helios.state.steps import ReplicaWatch

_LOGGER = logging.getLogger(__name__)
_END = object()
_CONTRACT = (
    "train_step must return a scalar loss tensor, a WeightedLoss, a dict with one of them under "
    "'loss' (or yield such losses), or None when the model runs backward and steps its optimizers "
    "itself"
)
SEPARATE_UPDATES = "updates between losses need a process for each replica"


class OptimizerLoop(Loop):
    """The default optimizer loop: trains on what :meth:`losses` yields.

    Override :meth:`losses` for another order of forward passes and updates.

    Attributes:
        SKIP: what a step yields instead of a loss, to skip the update of an optimizer.
    """

    _bound: ClassVar[str] = (
        "_apart _backward_ended _backward_started _engine _forward _gradients _has_begun "
        "_has_own_losses _holders _is_committed _iteration _last_batch _model _optimizers "
        "_log _own_backward _reads_gradients _runner _shared _shown _skips _take_step _unreached "
        "_updated_in _updates _weights"
    )
    _internals: ClassVar[str] = f"{_bound} _is_done _order"

    SKIP: ClassVar[object] = object()
    _needs_yields: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._order: tuple[str, ...] = ()
        self._is_done = False

    def _bind(self, parts: RunParts) -> None:
        self._model, self._engine, self._gradients = parts.model, parts.engine, parts.gradients
        self._runner, self._shared = parts.runner, parts.shared_runner
        self._iteration = parts.iteration
        self._log = StepLog(parts.find_batch_size)
        self._forward = Forward(parts, "train_step")
        self._updates = Updates(parts)
        self._has_own_losses = type(self).losses is not OptimizerLoop.losses
        self._take_step = self.losses if self._has_own_losses else self._find_losses
        is_own = redefines(parts.model, Model, "backward")
        self._own_backward = parts.model.backward if is_own else None
        self._reads_gradients = self._has_own_losses or is_own
        self._backward_started = parts.hooks.find("on_backward_start")
        self._backward_ended = parts.hooks.find("on_backward_end")
        self._has_begun = False
        # For a process that must compute along where it has no replica.
        self._last_batch: Any = None
        # By path, in the order of the yields; and the attributes of the model that hold them.
        self._optimizers: dict[str, Optimizer] = {}
        self._holders: dict[str, Any] = {}
        # Helios' own losses in the model's table.
        self._shown: dict[str, Any] = {}
        self._updated_in = 0
        self._unreached: set[str] = set()
        # Why the updates of optimizers are skipped at the end of the window.
        self._skips: dict[Optimizer, str] = {}
        # Of the micro-batch: losses of single optimizers by path, the weights of the others, and
        # whether an update was made.
        self._apart: dict[str, Any] = {}
        self._weights: list[float | None] = []
        self._is_committed = False

    @property
    def done(self) -> bool:
        """Whether the micro-batch is done."""
        return self._is_done

    def reset(self) -> None:
        """Prepare for one micro-batch."""
        self._is_done = False

    def losses(self, batch: Any) -> Iterator[Any]:
        """Yield the losses of a micro-batch; by default what ``train_step`` returns or yields.

        When the iterator continues after a loss, backward has run, and ``.grad`` holds the
        gradients of this micro-batch: read them, change or clear them. After the last loss they are
        added to those of other micro-batches and replicas, and at the end of a window all
        optimizers step. After ``(loss, optimizer)``, only the parameters of this optimizer have
        gradients, and it has stepped if the window ends; this needs a process for each replica.

        Args:
            batch: the batch, on the device.

        Yields:
            What a ``train_step`` may return: a loss, a ``WeightedLoss``, or a dict with one of them
            under ``"loss"``. Or a pair of that, or of :attr:`SKIP`, and an optimizer of the model.
        """
        yield from self._find_losses(batch)

    def _find_losses(self, batch: Any) -> Iterable[Any]:
        """Run ``train_step``, between the events of the forward; returns what it has to yield."""
        run, model, watch = self._run, self._model, self._runner.watch
        if self._forward.has_start or model.batch_processor is not None:
            batch = self._forward.begin(batch)
        else:
            run.batch = batch
        if self._gradients.has_idle_turn:
            self._last_batch = batch
        model._step_log = self._log
        result = self._forward.call(batch, run.state)
        model._step_log = None
        if type(result) is GeneratorType:
            return self._go_on(result)
        if self._needs_yields:
            raise UsageError(
                f"With a {type(self).__name__} {type(model).__name__}.train_step must be a "
                "generator (`yield loss`, once for each optimizer), but it returned "
                f"{type(result).__name__}. Write yield instead of return, or remove the loop."
            )
        loss = result
        if type(result) is not Tensor or result.numel() != 1:
            loss = loss_of(result, takes_several=self._own_backward is not None)
        if watch is not None:
            watch.conclude(is_manual=loss is None)
        if loss is result and not self._forward.has_end:
            run.model_outputs = run.loss = result
        else:
            self._forward.end(result, loss if loss is result else weighted_in(result) or loss)
        if loss is not result:
            self._add_numbers((result,))
        return () if loss is None else (result,)

    def _go_on(self, step: Iterator[Any]) -> Iterator[Any]:
        """Yield what a step yields, each with its optimizer, between the events of the forward.

        The body of the step runs in the precision of the run, from yield to yield.
        """
        run, forward, results, has_named = self._run, self._forward, [], False
        is_first, waiting = not self._has_begun, [*self._find_optimizers()]
        while True:
            self._model._step_log = self._log
            with self._engine.autocast():
                result = next(step, _END)
            self._model._step_log = None
            if result is _END:
                break
            if type(result) is tuple:
                result, optimizer = result
                has_named = True
            elif waiting:
                optimizer = self._optimizers[waiting.pop(0)]
            else:
                raise self._make_count_error("yielded once more")
            is_skipped = result is self.SKIP
            loss = None if is_skipped else loss_of(result, is_yielded=True)
            forward.end(None if is_skipped else result, weighted_in(result) or loss)
            yield result, optimizer
            results.append(result)
            if waiting:
                run.model_outputs = run.loss = None
                forward.emit("on_forward_start")
        if waiting and not has_named:
            raise self._make_count_error(f"ended before it had yielded a loss for {waiting[0]!r}")
        if waiting:
            forward.end(None, None)
        if is_first and not has_named and len(results) > 1:
            _LOGGER.info(
                "%s.train_step yields its losses for %s, in this order. To choose an optimizer, "
                "yield a pair: yield loss, self.optimizer.",
                type(self._model).__name__,
                ", then ".join(self._optimizers),
            )
        if self._runner.watch is not None:
            self._runner.watch.conclude(is_manual=True)
        self._add_numbers(results)

    def _add_numbers(self, results: Sequence[Any]) -> None:
        """Add the numbers that a step has returned beside its losses to the means."""
        numbers: dict[Any, Any] = {}
        for result in results:
            if isinstance(result, dict):
                numbers |= result
        shown = {
            str(name): part.detach() if isinstance(part, Tensor) else part
            for name, part in numbers.items()
            if name != "loss" and _is_number(part)
        }
        if shown:
            self._iteration.loss_means.add_beside(self._runner.replica, shown)

    def advance(self, batch: Any) -> None:
        """Train on one micro-batch, and make the updates at the end of a window.

        Raises:
            UsageError: if ``StopIteration`` is raised, which must not end a loop.
        """
        runner, num_shared, watch = self._runner, 0, None
        self._is_done = True
        if self._shared is not None or self._reads_gradients or not self._has_begun:
            watch = self._open_step()
        runner.has_collected = False
        try:
            for each in self._take_step(batch):
                if not runner.has_collected:
                    runner.has_collected = True
                    if not self._has_begun or self._run.is_manual:
                        self._fix_mode(is_manual=False)
                    self._engine._open_micro_batches += runner.is_first
                if type(each) is tuple:
                    self._train_apart(*each)
                else:
                    num_shared += 1
                    self._backward(each)
            if self._log.sums:
                logged, self._log.sums = self._log.sums, {}
                self._iteration.loss_means.add_beside(runner.replica, logged)
            if runner.has_collected:
                self._end_step(num_shared, watch)
            else:
                self._fix_mode(is_manual=True)
        except (StopIteration, RuntimeError) as error:
            # Python makes a RuntimeError of a StopIteration that a generator raises.
            stop = error.__cause__ if isinstance(error, RuntimeError) else error
            if isinstance(stop, StopIteration):
                raise make_stray_stop(stop) from error
            raise

    def _open_step(self) -> ReplicaWatch | None:
        """Begin a step of a replica, with an empty ``.grad`` where users read it.

        Returns:
            What watches the step, or ``None``.
        """
        runner, shared, watch = self._runner, self._shared, self._runner.watch
        if not self._has_begun:
            # A resume restores the table as a batch has left it.
            items = self._model._loss_items.items()
            self._shown = {name: loss for name, loss in items if name.startswith("loss")}
        if shared is not None:
            if shared.has_stepped:
                shared.begin_again()
            shared.has_stepped = True
        if watch is not None:
            watch.conclude("process_training_batch")
        if not runner.begins_window and not self._reads_gradients:
            return watch
        if self._has_own_losses:
            self._model._step_log = self._log
            # Weights may change between its losses. What has changed is seen when it is done.
            runner.watch = None
        optimizers = self._find_optimizers().values() if self._run.is_manual is False else ()
        if runner.begins_window:
            for optimizer in optimizers:
                self._gradients.drop_old(optimizer)
        if self._reads_gradients:
            self._gradients.set_aside(x for each in optimizers for x in parameters_of(each))
        return watch

    def _backward(self, result: Any, optimizer: Optimizer | None = None) -> Any:
        """Compute the gradients of a loss, between the backward events.

        Args:
            result: what the step has returned or yielded.
            optimizer: the only optimizer whose parameters get gradients; ``None`` for all.

        Returns:
            What is shown of the loss.
        """
        loss, weighted, inputs = result, None, None
        if result is not self._run.loss:
            takes_several = self._own_backward is not None
            loss = loss_of(result, takes_several=takes_several, is_yielded=True)
            weighted = weighted_in(result)
        shown = weighted or loss.detach()
        if optimizer is None:
            self._show({"loss": shown})
        else:
            inputs = [each for each in parameters_of(optimizer) if each.requires_grad]
            if not inputs:
                return shown
        if not loss.requires_grad:
            raise make_loss_error(loss)
        if weighted is not None or not self._updates.is_plain:
            self._weigh(None if weighted is None else weighted.weight, optimizer)
        if self._backward_started is not None:
            self._backward_started(loss)
            note_changes(self._runner.watch, "on_backward_start")
        if self._own_backward is not None:
            self._own_backward(losses_in(result))
        elif optimizer is None and self._gradients.sends_early and self._may_send_early():
            self._run.place = Place.BACKWARD
            assert self._shared is not None
            with self._shared.sending(*self._optimizers.values()):
                self._engine.backward_loss(loss)
        else:
            self._engine.backward_loss(loss, inputs)
        if self._backward_ended is not None:
            self._backward_ended()
            note_changes(self._runner.watch, "on_backward_end")
        return shown

    def _weigh(self, weight: float | None, optimizer: Optimizer | None) -> None:
        """Count the weight of a loss, before its backward."""
        if optimizer is not None:
            self._engine._weights.add(optimizer, self._runner.replica, weight)
            return
        # The weight of an earlier loss goes with its gradients, if the user has cleared these.
        optimizers = self._find_optimizers().values()
        if all(x.grad is None for each in optimizers for x in parameters_of(each)):
            self._weights.clear()
        self._weights.append(weight)

    def _may_send_early(self) -> bool:
        """Return whether gradients may leave during the only backward of the micro-batch."""
        updates = self._run.state.is_step_boundary and self._runner.is_last
        is_only = not self._has_own_losses and len(self._find_optimizers()) == 1
        return updates and is_only and self._parts.agreement.frees_gradients

    def _end_step(self, num_shared: int, watch: ReplicaWatch | None) -> None:
        """Hand the gradients of a micro-batch over, and make the update if one is due.

        Args:
            num_shared: the number of losses that are for all optimizers.
            watch: what watches the step.
        """
        state = self._run.state
        updates = state.is_step_boundary and self._runner.is_last
        if watch is not None and self._has_own_losses:
            watch.conclude(is_manual=not num_shared)
        if self._apart:
            self._end_apart(drops=updates and not num_shared)
        if num_shared:
            group = tuple(self._find_optimizers().values())
            if self._weights or self._reads_gradients or self._gradients.has_idle_turn:
                self._settle(group, num_shared)
            if self._shared is not None:
                ends_window = state.is_step_boundary
                self._shared.end_backward(
                    group, self._shown, ends_window=ends_window, updates=updates
                )
            if updates:
                self._is_committed |= self._updates.make(group, moves_all=len(group) == 1)
        if updates:
            is_committed, self._is_committed = self._is_committed, False
            if is_committed:
                self._updated_in = state.global_iteration
            if is_committed is not state.is_step_committed:
                self._correct_step()
            self._engine.close_window()

    def _end_apart(self, *, drops: bool) -> None:
        """Show the losses of single optimizers.

        Args:
            drops: whether gradients of earlier micro-batches are dropped, if their optimizers have
                no loss in the last one of the window.
        """
        optimizers, found, self._apart = self._find_optimizers(), self._apart, {}
        names = {path: f"loss_{path}" if len(optimizers) > 1 else "loss" for path in found}
        self._show({names[path]: loss for path, loss in found.items() if loss is not None})
        for path, optimizer in optimizers.items() if drops else ():
            if path not in found:
                optimizer.zero_grad()

    def _settle(self, group: Sequence[Optimizer], num_shared: int) -> None:
        """Make the gradients and weights of a micro-batch complete.

        Raises:
            UsageError: for several losses in a sharded run.
        """
        if self._gradients.has_idle_turn and self._runner.is_last:
            self._compute_along()
        if num_shared > 1 and self._parts.replicas.is_sharded:
            raise UsageError(
                f'{type(self).__name__}.losses must yield one loss with sharding="full", whose '
                "gradients are summed during backward, got another one. Add the losses, or use "
                'sharding="none".'
            )
        for optimizer in group:
            self._gradients.add_back(parameters_of(optimizer))
            for weight in self._weights:
                self._engine._weights.add(optimizer, self._runner.replica, weight)
        self._weights.clear()

    def _compute_along(self) -> None:
        """After the last replica of this process, repeat its step for the others."""
        batch, self._last_batch = self._last_batch, None
        self._gradients.end_turn()
        with without_trace(self._parts):
            loss = loss_of(self._forward.call(batch, self._run.state))
            assert loss is not None, "a step is automatic or manual, never both"
            self._engine.backward_loss(loss)

    def _train_apart(self, result: Any, optimizer: Optimizer) -> None:
        """Train one optimizer on a loss of its own.

        Args:
            result: what the step has yielded.
            optimizer: the optimizer.
        """
        run, optimizers = self._run, self._find_optimizers()
        path = self._check_apart(optimizer)
        # A skip that was requested before the first loss is for all, else for the next loss.
        self._hold_skip(*((optimizer,) if self._apart else optimizers.values()))
        if result is self.SKIP:
            self._apart.setdefault(path)
            self._skips.setdefault(optimizer, f"train_step has yielded SKIP for {path!r}")
        else:
            self._apart[path] = self._backward(result, optimizer)
            self._warn_of_unreached(path, optimizer)
        self._gradients.add_back(parameters_of(optimizer))
        ends_window = run.state.is_step_boundary
        if self._shared is not None:
            self._shared.end_backward((optimizer,), self._shown, ends_window=ends_window)
        self._hold_skip(optimizer)
        if ends_window:
            run.skip_reason = self._skips.pop(optimizer, "")
            is_only = len(optimizers) == 1
            self._is_committed |= self._updates.make((optimizer,), moves_all=is_only)

    def _check_apart(self, optimizer: Optimizer) -> str:
        """Check that an optimizer may be trained on a loss of its own; returns its path.

        Raises:
            ArgumentError: if it is none of the model.
            UsageError: if it may not.
        """
        parts, optimizers = self._parts, self._find_optimizers()
        path = next((path for path, known in optimizers.items() if known is optimizer), "")
        if not path:
            raise ArgumentError(
                "A step must yield a loss with an optimizer of the model, one of "
                f"{list(optimizers)}, got {type(optimizer).__name__}. Assign it to an attribute of "
                "the model in setup()."
            )
        parts.replicas.require_one_each(
            "A loss with an optimizer of its own",
            why=", since an update between two losses needs the gradients of all",
        )
        if not parts.replicas.has_single_replica:
            parts.findings.add(FindingKind.OBSTACLE, text=SEPARATE_UPDATES)
        if self._own_backward is not None:
            raise UsageError(
                f"{type(parts.model).__name__}.backward must not be overridden if each loss has "
                "its own optimizer. Remove the method, or return the losses in a dict."
            )
        if parts.schedule.accumulation_steps > 1:
            trained = {id(x) for known in self._apart for x in parameters_of(optimizers[known])}
            if any(id(each) in trained for each in parameters_of(optimizer)):
                raise UsageError(
                    "With accumulation_steps > 1 a parameter must be trained by one loss of a "
                    f"batch, but another one has trained some of {path!r}: both would be summed "
                    "up. Train without accumulation, and let no optimizers share parameters."
                )
        return path

    def _hold_skip(self, *optimizers: Optimizer) -> None:
        """Keep a requested skip until the updates that it is meant for."""
        reason = self._run.pop_skip_reason()
        if reason:
            self._skips = dict.fromkeys(optimizers, reason) | self._skips

    def _warn_of_unreached(self, path: str, optimizer: Optimizer) -> None:
        trained = [each for each in parameters_of(optimizer) if each.requires_grad]
        if path in self._unreached or not trained or any(x.grad is not None for x in trained):
            return
        self._unreached.add(path)
        _LOGGER.warning(
            "The loss yielded for %r reaches none of its parameters. Yields belong to the "
            "optimizers in the order %s: change it, or yield loss, optimizer.",
            path,
            ", ".join(self._optimizers),
        )

    def _correct_step(self) -> None:
        """Count the window's step if one of its updates was made.

        An outer loop may run this one several times in a window.
        """
        state, unit = self._run.state, self._parts.schedule.unit
        if self._updated_in != state.global_iteration:
            state.withdraw_step(unit)
        elif not state.is_step_committed:
            state.restore_step(unit)

    def _show(self, losses: dict[str, Any]) -> None:
        """Put detached losses into the table, unless the model has written to it in this batch.

        Args:
            losses: by name; of one with a weight the mean is shown.
        """
        if not self._updates.is_plain:
            self._iteration.weighted = weighted = {
                name: (loss.mean, loss.sum.detach(), loss.weight)
                for name, loss in losses.items()
                if isinstance(loss, WeightedLoss)
            }
            losses = losses | {name: shown for name, (shown, *_) in weighted.items()}
        table, shown = self._model._loss_items, self._shown
        # A model that overrides on_training_batch_start without super() does not clear it.
        if table and (table.keys() != shown.keys() or any(table[x] is not shown[x] for x in shown)):
            return
        self._shown = losses
        table.clear()
        table.update(losses)

    def _fix_mode(self, *, is_manual: bool) -> None:
        """Set the mode at the first step.

        Raises:
            UsageError: if a later step is of the other mode.
        """
        parts, run = self._parts, self._run
        if run.is_manual not in (None, is_manual):
            before, now = ("None", "a loss")[:: 1 if run.is_manual else -1]
            raise UsageError(
                f"{type(parts.model).__name__}.train_step returned {now} after it had returned "
                f"{before}; it must always return the same. To skip a batch, return a loss of zero."
            )
        if self._has_begun:
            return
        self._has_begun = True
        if run.is_manual is None:
            run.is_manual = is_manual
            run.state.is_step_boundary |= is_manual and parts.schedule.is_by_epoch
        if is_manual:
            parts.replicas.require_one_each(
                "A train_step that returns None", remedy=", or return the loss"
            )
            self._warn_of_automatic_options()
        elif self._own_backward is not None and parts.replicas.is_sharded:
            raise UsageError(
                f"{type(parts.model).__name__}.backward must not be overridden with "
                'sharding="full", whose gradients are summed during backward. Return one loss, or '
                'use sharding="none".'
            )

    def _make_count_error(self, what: str) -> UsageError:
        return UsageError(
            f"{type(self._model).__name__}.train_step must yield exactly one loss for each "
            f"optimizer, in this order: {', '.join(self._optimizers)}; but it {what}. Write one "
            "`yield` for each, for the last one too (a value that is returned is lost), or yield "
            "each loss with its optimizer: yield loss, optimizer."
        )

    def _warn_of_automatic_options(self) -> None:
        """Warn of options without effect because the model steps its optimizers itself."""
        ignored, schedulers = self._engine._automatic_options, self._parts.schedulers
        if schedulers is not None and schedulers.has_intervals_but_step:
            ignored = [*ignored, "Model.scheduler_interval"]
        if ignored:
            _LOGGER.warning(
                "%s has no effect: train_step returns None, so the model clips and steps itself. "
                "Return the loss to let Helios do it.",
                " and ".join(ignored),
            )

    def _find_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers; search again if an attribute holds another object."""
        attributes = vars(self._model)
        for name, holder in self._holders.items():
            if attributes.get(name) is not holder:
                self._optimizers = {}
        if not self._optimizers:
            self._optimizers = self._discover_optimizers(attributes)
            names = {path.partition(".")[0] for path in self._optimizers}
            self._holders = {name: attributes[name] for name in names}
        return self._optimizers

    def _discover_optimizers(self, attributes: Mapping[str, Any]) -> dict[str, Optimizer]:
        found = self._model.discovery.optimizers()
        if not found:
            raise UsageError(
                "A model whose train_step returns or yields its losses must have an optimizer as "
                "an attribute, found none. Build it in setup()."
            )
        # Discovery sorts by name: `disc` would come before `gen`, whatever setup() does.
        places = {name: place for place, name in enumerate(attributes)}
        order = self._order or sorted(found, key=lambda path: places[path.partition(".")[0]])
        if sorted(order) != sorted(found):
            raise UsageError(
                "YieldLoop(optimizers=...) must name each optimizer of the model once "
                f"({sorted(found)}), got {list(order)}. Pass these names."
            )
        return {path: found[path] for path in order}


class YieldLoop(OptimizerLoop):
    """Trains with a ``train_step`` that yields one loss for each optimizer of the model.

    The default loop does this, too; this one sets the order of the optimizers.

    Args:
        optimizers: the model's optimizers in the order of the yields, by attribute name
            (``"optimizers.0"`` inside a list); by default the order in which they were assigned.
    """

    _needs_yields: ClassVar[bool] = True

    def __init__(self, optimizers: Sequence[str] = ()) -> None:
        super().__init__()
        self._order = tuple(optimizers)


@final
class Updates:
    """Makes the updates of a training run.

    Args:
        parts: the objects of the run.

    Attributes:
        is_plain: whether all processes know that no loss has a weight.
    """

    def __init__(self, parts: RunParts) -> None:
        self._run = parts.run
        self._model, self._engine = parts.model, parts.engine
        self._shared, self._iteration = parts.shared_runner, parts.iteration
        schedulers = parts.schedulers
        self._schedulers = None if schedulers is None or schedulers.is_empty else schedulers
        self._agree_on_skip = parts.agreement.agree_on_skip
        self._draws = StepDraws() if parts.replicas.is_sharded else None
        self._step = self._engine.optimizer_step if self._draws is None else self._step_undrawn
        self._step_started = parts.hooks.find("on_optimizer_step_start")
        self._before_zero_grad = parts.hooks.find("on_before_zero_grad")
        self._step_ended = parts.hooks.find("on_optimizer_step_end")
        self.is_plain = False

    def make(self, group: Sequence[Optimizer], *, moves_all: bool) -> bool:
        """Make an update, unless a hook has requested to skip it; returns whether it was made.

        Args:
            group: the optimizers of the same losses, whose gradients are averaged and clipped
                together.
            moves_all: whether all schedulers step with it, and not only those of the optimizers.
        """
        run, engine = self._run, self._engine
        is_skipped, is_made = self._average_and_clip(group), False
        for optimizer in group:
            run.optimizer = optimizer
            is_committed = not is_skipped and self._step(optimizer)
            if is_committed is None:
                raise UsageError(
                    f"{type(engine).__name__}.optimizer_step must return whether it made the "
                    "update, True or False, got None: no step would count. Return "
                    "super().optimizer_step(optimizer), or True."
                )
            run.is_optimizer_step_committed = is_committed
            is_made |= is_committed
            if is_committed and self._schedulers is not None:
                self._iteration.rates[optimizer] = read_rates(optimizer)
                self._schedulers.after_step(None if moves_all else optimizer)
            if self._before_zero_grad is not None:
                self._before_zero_grad(optimizer)
            engine.zero_grad(optimizer)
            if self._step_ended is not None:
                self._step_ended(optimizer, is_committed)
        run.optimizer = None
        return is_made

    def _step_undrawn(self, optimizer: Optimizer) -> bool:
        """Make the update of a sharded model, which must not draw random numbers."""
        engine, name = self._engine, f"{type(optimizer).__name__}.step()"
        if redefines(engine, Engine, "optimizer_step"):
            name = f"{type(engine).__name__}.optimizer_step, with {name},"
        assert self._draws is not None
        with self._draws.refused(optimizer, name):
            return engine.optimizer_step(optimizer)

    def _average_and_clip(self, group: Sequence[Optimizer]) -> bool:
        """Average and clip gradients together, with the events between; returns whether to skip."""
        run, engine, shared, is_empty = self._run, self._engine, self._shared, False
        run.place = Place.UPDATE
        engine._group = group
        if len(group) > 1:
            engine._group_parameters = self._in_order(group)
        for optimizer in group:
            is_empty |= not self.is_plain and self._read_weight(optimizer) == 0
            engine.average_gradients(optimizer)
            if shared is not None and shared.has_message:
                shared.receive()
        for optimizer in group:
            run.optimizer = optimizer
            if self._step_started is not None:
                self._step_started(optimizer)
        if self._agree_on_skip() or is_empty:
            return True
        for optimizer in group if engine._clips else ():
            engine.clip_gradients(optimizer)
        return False

    def _read_weight(self, optimizer: Optimizer) -> float | None:
        """Let the engine divide by the weights of the window; returns their sum, if there are any.

        All processes call this together.
        """
        weights = self._engine._weights
        self._engine._weight = weight = weights.pop_sum(optimizer)
        if weight is None:
            self.is_plain = weights.are_plain(self._model.discovery.optimizers().values())
        return weight

    def _in_order(self, group: Iterable[Optimizer]) -> list[Tensor]:
        """Return the parameters of optimizers once each, in the order of the model's networks."""
        found = {id(each): each for optimizer in group for each in parameters_of(optimizer)}
        networks = self._model.discovery.modules()
        places = {name: place for place, name in enumerate(vars(self._model))}
        names = sorted(networks, key=lambda path: places.get(path.partition(".")[0], len(places)))
        order = [id(each) for name in names for each in networks[name].parameters()]
        return [*(found.pop(number) for number in order if number in found), *found.values()]


def losses_in(result: Any) -> dict[str, Tensor]:
    """Return the losses in what a training step returned, by name."""
    if isinstance(result, Processed):
        result = result.loss
    weighted = weighted_in(result)
    if weighted is not None:
        result = {**(result if isinstance(result, dict) else {}), "loss": weighted.sum}
    if isinstance(result, Tensor):
        return {"loss": result}
    if odd := [name for name, value in result.items() if isinstance(value, WeightedLoss)]:
        raise UsageError(
            f"A WeightedLoss must be under 'loss', got it under {', '.join(map(repr, odd))}. A "
            "window has one sum of weights: add the sums under 'loss'."
        )
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, Tensor) and value.requires_grad and value.numel() == 1
    }


def weighted_in(result: Any) -> WeightedLoss | None:
    """Return the loss in what a training step returned, if it has a weight."""
    loss = result.loss if isinstance(result, Processed) else result
    if isinstance(loss, dict):
        loss = loss.get("loss")
    return loss if isinstance(loss, WeightedLoss) else None


def loss_of(result: Any, *, takes_several: bool = False, is_yielded: bool = False) -> Tensor | None:
    """Return the loss in what a training step returned; ``None`` for a manual step.

    Args:
        result: what it returned.
        takes_several: whether a dict without ``"loss"`` stands for the sum of its losses.
        is_yielded: whether the step has yielded it, so that ``None`` is an error.

    Raises:
        UsageError: if it is none.
    """
    loss = result.loss if isinstance(result, Processed) else result
    if loss is None and not is_yielded:
        return None
    if isinstance(loss, dict) and "loss" in loss:
        loss = loss["loss"]
    elif isinstance(loss, dict) and takes_several and (losses := losses_in(loss)):
        loss = torch.stack([each.reshape(()) for each in losses.values()]).sum()
    if not isinstance(loss, Tensor):
        loss = _sum_of(loss)
    if type(loss) is not Tensor and is_sharded(loss):
        raise UsageError(
            "A loss must not be computed of sharded parameters outside of a forward, where they "
            "are shards, but train_step has returned such a loss. Compute the penalty in the "
            "forward of the module that holds the parameters."
        )
    if loss.numel() != 1:
        raise make_loss_error(loss)
    return loss


def make_loss_error(loss: Tensor) -> UsageError:
    """Make the error for a tensor of several elements, or one without a graph."""
    return UsageError(
        f"{_CONTRACT}; got a tensor of shape {tuple(loss.shape)} with requires_grad="
        f"{loss.requires_grad}. Reduce it (loss.mean()) and do not detach it."
    )


def _sum_of(loss: Any) -> Tensor:
    """Return the sum of a loss with a weight, which is the only other one that there may be."""
    if isinstance(loss, WeightedLoss):
        return loss.sum
    shown = "None" if loss is None else type(loss).__name__
    if isinstance(loss, dict):
        shown = (
            f"a dict of {', '.join(map(repr, loss)) or 'nothing'}. Add the losses under 'loss', "
            "or override Model.backward(losses) to make one gradient of several"
        )
    raise UsageError(f"{_CONTRACT}, got {shown}.")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)
