"""``YieldLoop``: a training step that is a generator and yields one loss for each optimizer.

Each optimizer makes its update between its yield and the next one, so the rest of the step computes
with the new weights and still has its local variables: nothing is computed twice.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from types import GeneratorType
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from helios.core.loss_means import WeightedLoss
from helios.core.utils import parameters_of
from helios.engines.engine import redefines
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.loops.loop import make_stray_stop
from helios.loops.optimizer import OptimizerLoop, refuse_closures
from helios.loops.step import begin_forward, end_forward, weighted_in
from helios.model.model import Model

_LOGGER = logging.getLogger(__name__)

_END = object()
_STALE_GRAPH = ("backward through the graph a second time", "modified by an inplace operation")

Losses = Generator[Any, None, Any]


class YieldLoop(OptimizerLoop):
    """Trains with a ``train_step`` that yields one loss for each optimizer of the model.

    Each yield affects only the parameters of its optimizer: backward, and at the last micro-batch
    of a window the average, the clipping, the update and the optimizer's own schedulers. An
    optimizer whose parameters are all frozen gets no backward. The generator's body runs under the
    engine's autocast, from yield to yield; a ``with`` block must not contain a yield.

    Attributes:
        SKIP: what a step yields, instead of a loss, to leave out the update of an optimizer.

    Args:
        optimizers: the model's optimizers in the order of the yields, by attribute name
            (``"optimizers.0"`` inside a list); by default the order in which they were assigned.

    Raises:
        ArgumentError: for an optimizer that is named twice.
        ArgumentTypeError: for something that is not a sequence of names.
    """

    _internals: ClassVar[str] = "_holders _order _skips _turns _unreached _yielded"

    SKIP: ClassVar[object] = object()

    def __init__(self, optimizers: Sequence[str] = ()) -> None:
        super().__init__()
        self._order = _as_names(optimizers)
        self._turns: dict[str, Optimizer] = {}
        self._holders: dict[str, Any] = {}
        self._skips: dict[str, str] = {}
        self._unreached: set[str] = set()
        self._yielded: list[Any] = []

    def advance(self, batch: Any) -> None:
        """Run the step from yield to yield, with a backward and an update at each.

        Raises:
            UsageError: if ``StopIteration`` is raised, which must not end a loop.
        """
        outer, self._round = self._round, None
        if outer is not None:
            outer.earlier.add_back()
        # The step counts a micro-batch, even if no optimizer trains.
        self._is_done = self._is_counted = True
        if not self._has_begun:
            self._keep_shown()
        try:
            self._train(batch)
        except StopIteration as error:
            raise make_stray_stop(error) from error
        if outer is not None:
            outer.see_default(is_manual=False)
            self._round = outer

    def _train(self, batch: Any) -> None:
        session = self._session
        is_boundary, engine = session.state.is_step_boundary, session.engine
        session.replicas.require_one_each(
            "A YieldLoop", why=", since an update between two yields needs the gradients of all"
        )
        turns = self._find_turns()
        self._hold_skip(*turns)
        losses: dict[str, Any] = {}
        self._yielded.clear()
        is_committed = False
        watch = session.turns.begin_step()
        session.turns.has_collected = True
        with closing(self._start(batch)) as generator:
            self._fix_mode(is_manual=False)
            self._hold_skip(next(iter(turns)))
            engine._count_micro_batch()
            earlier = ""
            for path, optimizer in turns.items():
                loss = self._learn(generator, path, earlier)
                if loss is not None:
                    losses[path] = loss
                if is_boundary:
                    is_committed |= self._update_now(path, optimizer)
                earlier = path
            self._finish(generator, earlier)
        if watch is not None:
            watch.conclude(is_manual=True)
        is_one = len(turns) == 1
        shown = {"loss" if is_one else f"loss_{path}": x for path, x in losses.items()}
        self._show(shown, *self._yielded)
        if is_boundary:
            engine.close_window()
            if is_committed:
                self._updated_in = session.state.global_iteration
            self._correct_step()

    def _start(self, batch: Any) -> Losses:
        """Call the step, which does not run its body yet.

        Raises:
            UsageError: if it is not a generator.
        """
        session = self._session
        batch = begin_forward(session, batch)
        with session.engine.autocast():
            generator = session.hooks.call("train_step", batch, session.state)
        if isinstance(generator, GeneratorType):
            return generator
        raise UsageError(
            f"With a YieldLoop {type(session.model).__name__}.train_step must be a generator "
            f"(`yield loss`, once for each optimizer), but it returned "
            f"{type(generator).__name__}. Write yield instead of return, or remove the "
            "YieldLoop."
        )

    def _learn(self, generator: Losses, path: str, earlier: str) -> Tensor | WeightedLoss | None:
        """Run the step to its next yield and do backward.

        Args:
            generator: the step.
            path: the optimizer whose loss is next.
            earlier: the one before it; empty for the first.

        Returns:
            The detached loss, or the one with a weight; ``None`` if the step leaves this optimizer
            out.
        """
        session = self._session
        if earlier:
            session.model_outputs = session.attached_loss = None
            session.hooks.emit("on_forward_start", session.context)
            self._hold_skip(path)
        result = self._run_on(generator, earlier)
        if result is _END:
            raise self._make_count_error(f"ended before it had yielded a loss for {path!r}")
        if result is YieldLoop.SKIP:
            self._skips.setdefault(path, f"train_step has yielded SKIP for {path!r}")
            end_forward(session, None, None)
            self._collect(path)
            self._hold_skip(path)
            return None
        inputs = [
            parameter
            for group in self._turns[path].param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        loss, weighted = _loss_for(path, result, needs_graph=bool(inputs)), weighted_in(result)
        self._yielded.append(result)
        end_forward(session, result, loss if weighted is None else weighted.mean)
        if inputs:
            self._learn_from(weighted or loss, inputs, path)
        self._hold_skip(path)
        return weighted or loss.detach()

    def _learn_from(self, loss: Tensor | WeightedLoss, inputs: list[Tensor], path: str) -> None:
        try:
            self.backward(loss, self._turns[path])
        except RuntimeError as error:
            if any(words in str(error) for words in _STALE_GRAPH):
                error.args = (
                    f"The loss yielded for {path!r} depends on values computed before "
                    "an earlier yield (of this batch or the one before), and the backward "
                    "or the update there has freed or changed them. Compute them again after that "
                    f"yield, or detach them (x.detach()).\n\n{error}",
                )
            raise
        is_reached = any(parameter.grad is not None for parameter in inputs)
        self._collect(path)
        if not is_reached and path not in self._unreached:
            self._unreached.add(path)
            _LOGGER.warning(
                "The loss yielded for %r reaches none of its parameters, so they stay as they are. "
                "Yields belong to the optimizers in the order %s: correct their order, or pass "
                "YieldLoop(optimizers=(...)).",
                path,
                ", ".join(self._turns),
            )

    def _collect(self, path: str) -> None:
        session = self._session
        ends_window = session.state.is_step_boundary
        session.turns.end_backward((self._turns[path],), self._shown, ends_window=ends_window)

    def _run_on(self, generator: Losses, earlier: str) -> Any:
        """Run the step to its next yield; returns what it yields, or ``_END`` at its end.

        Args:
            generator: the step.
            earlier: the optimizer whose yield the code follows; empty for the first.
        """
        with self._session.engine.autocast():
            try:
                result = next(generator, _END)
            except RuntimeError as error:
                # Python's message for a StopIteration in the body of a generator.
                if isinstance(error.__cause__, StopIteration):
                    raise make_stray_stop(error.__cause__) from error
                raise
        if reason := self._session.pop_skip_reason():
            if not earlier:
                self._skips = dict.fromkeys(self._turns, reason) | self._skips
            elif self._session.state.is_step_boundary:
                raise UsageError(
                    f"Context.skip_step() must be called before the update that it skips, but that "
                    f"of {earlier!r} is made at its yield, and train_step called it after that "
                    f"({reason!r}). To leave out the update of an optimizer, yield YieldLoop.SKIP "
                    "instead of its loss."
                )
            else:
                self._skips.setdefault(earlier, reason)
        return result

    def _finish(self, generator: Losses, earlier: str) -> None:
        """Run what follows the last yield."""
        if self._run_on(generator, earlier) is not _END:
            raise self._make_count_error("yielded once more")

    def _update_now(self, path: str, optimizer: Optimizer) -> bool:
        reason = self._skips.pop(path, "")
        if reason:
            self._session.context.skip_step(reason)
        return self._updates.make(optimizer, optimizer, (optimizer,))

    def _hold_skip(self, *paths: str) -> None:
        """Keep a requested skip until the updates that it is meant for.

        It belongs to the optimizer whose yield it followed, or, if requested before the first one,
        to all. Otherwise it would apply to the next update at the end of the window.
        """
        reason = self._session.pop_skip_reason()
        if reason:
            self._skips = dict.fromkeys(paths, reason) | self._skips

    def _find_turns(self) -> dict[str, Optimizer]:
        """Return the optimizers by path, in the order of the yields.

        Searched again if an attribute of the model holds another object.
        """
        attributes = vars(self._session.model)
        holders = self._holders.items()
        if not holders or any(attributes.get(name) is not held for name, held in holders):
            self._turns = self._order_optimizers(self._session.model.discovery.optimizers())
            names = {path.partition(".")[0] for path in self._turns}
            self._holders = {name: attributes[name] for name in names}
            self._check_turns()
        return self._turns

    def _order_optimizers(self, found: dict[str, Optimizer]) -> dict[str, Optimizer]:
        if not found:
            raise UsageError(
                "A YieldLoop needs at least one optimizer as an attribute of the model, found "
                "none. Build it in setup()."
            )
        if not self._order:
            # Discovery sorts by name: `disc` would come before `gen`, whatever setup() does.
            places = {name: place for place, name in enumerate(vars(self._session.model))}
            paths = sorted(found, key=lambda path: places[path.partition(".")[0]])
            return {path: found[path] for path in paths}
        if set(self._order) != set(found):
            raise UsageError(
                f"YieldLoop(optimizers=...) must name each optimizer of the model once "
                f"({sorted(found)}), got {list(self._order)}. Correct the names."
            )
        return {path: found[path] for path in self._order}

    def _check_turns(self) -> None:
        for optimizer in self._turns.values():
            refuse_closures(optimizer)
        if redefines(self._session.model, Model, "backward"):
            raise UsageError(
                f"{type(self._session.model).__name__}.backward must not be overridden with a "
                "YieldLoop, in which each loss has a backward and an optimizer of its own. Remove "
                "the method, or the YieldLoop."
            )
        self._refuse_shared_windows()
        intervals = self._session.model.scheduler_interval
        for path, scheduler in self._session.model.discovery.schedulers().items():
            is_by_step = intervals.get(path, "step") == "step"
            is_owned = any(scheduler.optimizer is owner for owner in self._turns.values())
            if is_by_step and not is_owned:
                _LOGGER.warning(
                    "The scheduler %r belongs to none of the optimizers %s, so it never steps. "
                    "Build it with one of them.",
                    path,
                    ", ".join(self._turns),
                )

    def _refuse_shared_windows(self) -> None:
        """Refuse parameters of two optimizers if both would accumulate gradients in them."""
        if self._session.schedule.accumulation_steps == 1:
            return
        owners: dict[int, str] = {}
        for path, optimizer in self._turns.items():
            members = set(map(id, parameters_of(optimizer)))
            shared = next((owners[member] for member in members if member in owners), None)
            if shared is not None:
                raise UsageError(
                    f"With accumulation_steps > 1 a parameter must belong to one optimizer, but "
                    f"{shared!r} and {path!r} share some: the gradients of both would be summed "
                    "in it. Give each its own, or train without accumulation."
                )
            owners |= dict.fromkeys(members, path)

    def _make_generator_error(self) -> UsageError:
        name = type(self).__name__
        return UsageError(
            f"{name}.advance must call super().advance(batch), which runs the step from yield to "
            "yield, and not forward(batch). Derive it from OptimizerLoop if train_step returns its "
            "losses."
        )

    def _make_count_error(self, what: str) -> UsageError:
        names = ", ".join(self._turns)
        return UsageError(
            f"{type(self._session.model).__name__}.train_step must yield exactly one loss for each "
            f"optimizer, in this order: {names}; but it {what}. Write one `yield` for each, for "
            "the last one too (a value that is returned is lost)."
        )

    def teardown(self) -> None:
        """Release the optimizers of this training."""
        self._turns, self._holders, self._skips = {}, {}, {}
        self._unreached = set()
        super().teardown()


def _loss_for(path: str, result: Any, *, needs_graph: bool) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if isinstance(loss, WeightedLoss):
        loss = loss.sum
    if not isinstance(loss, Tensor):
        shown = "None" if result is None else type(result).__name__
    elif loss.numel() == 1 and (loss.requires_grad or not needs_graph):
        return loss
    else:
        shown = f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
    raise UsageError(
        f"train_step must yield a scalar loss for {path!r}, a WeightedLoss, or a dict with one of "
        f"them under 'loss', got {shown}. Reduce it (loss.mean()) and do not detach it; "
        "YieldLoop.SKIP leaves it out."
    )


def _as_names(optimizers: Sequence[str]) -> tuple[str, ...]:
    is_sequence = isinstance(optimizers, list | tuple)
    if not is_sequence or not all(isinstance(name, str) for name in optimizers):
        raise ArgumentTypeError(
            "YieldLoop(optimizers=...) must be a tuple of the names of optimizers, got "
            f'{optimizers!r}. Pass e.g. ("critic_optimizer", "generator_optimizer").'
        )
    if len(set(optimizers)) != len(optimizers):
        raise ArgumentError(
            "YieldLoop(optimizers=...) must name each optimizer once, got "
            f"{list(optimizers)}. Remove the repetition; each has one yield in a step."
        )
    return tuple(optimizers)
