"""``Loop``, the base of all loops: reset, then advance until done.

Loops are small: they hold children by role and no counters. All progress is in the state of the
run, so a replaced loop resumes from any checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from typing_extensions import final

from helios.core.loss_means import WeightedLoss
from helios.counters import Cursor, TrainingState
from helios.engines.engine import Engine, redefines
from helios.errors import ArgumentError, UsageError
from helios.hooks.bus import check_overrides, check_state_methods
from helios.model.model import Model
from helios.model.processor import Processed
from helios.run_parts import RunParts
from helios.run_state import RunState
from helios.state.steps import ReplicaWatch

Child = TypeVar("Child", bound="Loop")
_HOOKS = ("skip", "reset", "on_run_start", "on_advance_start", "on_advance_end")
_CYCLE = {*_HOOKS, "advance", "on_run_end", "on_skip", "done"}


def make_stray_stop(error: StopIteration) -> UsageError:
    """Make the error for a ``StopIteration`` from a step, which must not end a loop.

    Otherwise it would end the innermost loop, and a batch would be dropped without an error.
    """
    return UsageError(
        "A StopIteration was raised in a step, the processing of a batch, or a hook that cannot "
        "end an epoch (on_training_batch_start can). It usually comes from next() on an exhausted "
        f"iterator: catch it there, or restart the iterator. ({error!r})"
    )


@final
class SessionView:
    """The run as ``Loop.session`` shows it, while a trainer runs the loop.

    Attributes:
        model: the user's model.
        engine: the engine.
        schedule: the options that decide when something happens.
        context: what hooks see: the batch, outputs and loss of the last step, requests.
        hooks: the receivers of each event: ``emit``, ``ask``, ``transform``.
        replicas: numbers of replicas and processes; ``agree(flag)`` combines flags of all
            processes.
    """

    def __init__(self, parts: RunParts) -> None:
        self.model = parts.model
        self.engine = parts.engine
        self.schedule = parts.schedule
        self.context = parts.context
        self.hooks = parts.hooks
        self.replicas = parts.replicas
        self._run = parts.run
        self._agreement = parts.agreement

    @property
    def state(self) -> TrainingState:
        """The counters that users see; read-only: the default loops advance them."""
        return self._run.state

    @property
    def cursor(self) -> Cursor:
        """Position of the next batch; read-only: the default loops advance it."""
        return self._run.cursor

    def agree(self) -> bool:
        """Exchange requests; all processes must call this at the same place.

        Returns:
            Whether anything is requested.
        """
        return self._agreement.settle()


class Loop(ABC):
    """Base of all loops.

    Attributes:
        roles: names of the children; each is an attribute that holds a loop.
        unsaved: names of attributes that training changes and that need not be saved.
        session: what the loop may access, while a trainer runs it. Built-in loops take what they
            need from the objects and the state of the run, when they are attached.
        has_left: of an epoch loop, whether the run ends after it; ``None`` if it ends after all
            processes have agreed on a stop.
    """

    _bound: ClassVar[str] = "_parts _run session"
    """Names of attributes that a loop has while it is attached."""
    _internals: ClassVar[str] = _bound
    unsaved: ClassVar[tuple[str, ...]] = ()

    roles: ClassVar[tuple[str, ...]] = ()
    session: SessionView
    _parts: RunParts
    _run: RunState
    has_left: bool | None = None
    _overridden: ClassVar[frozenset[str]] = frozenset()
    _has_own_cycle: ClassVar[bool] = False
    """Whether a user has written any of it. If not, one round of ours may stand for ``run``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Determine once which hooks a class overrides: run() calls no others."""
        super().__init_subclass__(**kwargs)
        cls._overridden = frozenset(
            name for name in _HOOKS if getattr(cls, name) is not getattr(Loop, name)
        )
        own = [base for base in cls.__mro__ if not _is_ours(base)]
        cls._has_own_cycle = any(vars(base).keys() & _CYCLE for base in own)

    @final
    def _children(self) -> dict[str, Loop]:
        """Return the child loops that are set, by role."""
        found = {role: getattr(self, role) for role in self.roles}
        return {role: child for role, child in found.items() if child is not None}

    @final
    def _adopt(self, other: Loop) -> None:
        """Take over the children of another loop in roles that are still empty here."""
        for role, child in other._children().items():
            if role in self.roles and getattr(self, role) is None:
                setattr(self, role, child)

    @final
    def _attach(self, parts: RunParts | None) -> None:
        """Give the loop and all loops below it what they need of a run, or take it away.

        Raises:
            UsageError: if a role is empty.
            ArgumentTypeError: for a method that does not take what is passed to it.
        """
        missing = sorted(set(self.roles) - set(self._children()))
        if missing:
            raise UsageError(
                f"{type(self).__name__} has no loop in the roles {missing}. Pass them to its "
                f"constructor, or replace it with connect(...), which keeps the current ones."
            )
        for kind in type(self).__mro__:
            for name in vars(kind).get("_bound", "").split():
                vars(self).pop(name, None)
        if parts is not None:
            self.session, self._parts, self._run = SessionView(parts), parts, parts.run
            if not _is_ours(type(self)):
                check_overrides(self, _find_base(type(self)))
                check_state_methods(self, Loop)
                parts.agreement.expect_late_requests()
                parts.agreement.has_own_loops = True
        for child in self._children().values():
            child._attach(parts)
        if parts is not None:
            self._bind(parts)

    def _bind(self, parts: RunParts) -> None:
        """Choose what stays the same in a run, before it begins and when a child is replaced."""

    def connect(self, **loops: Loop) -> None:
        """Replace children by role; roles that a new child leaves empty keep the old one's loops.

        Raises:
            ArgumentError: for an unknown role, or something that is not a loop.
        """
        for role, loop in loops.items():
            self._check_child(role, loop)
        for role, loop in loops.items():
            present = getattr(self, role)
            if present is not None:
                loop._adopt(present)
            setattr(self, role, loop)
            if "_parts" in vars(self):
                loop._attach(self._parts)
                self._bind(self._parts)

    def _check_child(self, role: str, loop: object) -> None:
        if role not in self.roles:
            raise ArgumentError(
                f"{type(self).__name__}.connect(...) must name one of its roles "
                f"{list(self.roles)}, got {role!r}. A child loop has its own roles."
            )
        if not isinstance(loop, Loop):
            raise ArgumentError(
                f"{type(self).__name__}.connect({role}=...) must be a Loop instance, got "
                f"{loop!r}. Pass an object of a class that derives from one in helios.loops."
            )

    @final
    def run(self, *args: Any) -> Any:
        """Reset, then advance until done; returns what :meth:`on_run_end` returns.

        ``StopIteration`` from an advance ends the loop like ``break``; other exceptions propagate
        at once.
        """
        overridden = self._overridden
        if "skip" in overridden and self.skip:
            return self.on_skip()
        if "reset" in overridden:
            self.reset()
        if "on_run_start" in overridden:
            self.on_run_start(*args)
        while not self.done:
            try:
                if "on_advance_start" in overridden:
                    self.on_advance_start(*args)
                self.advance(*args)
                if "on_advance_end" in overridden:
                    self.on_advance_end()
            except StopIteration:
                break
        return self.on_run_end()

    @property
    def skip(self) -> bool:
        """Whether there is nothing to run at all."""
        return False

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the loop has ended."""

    def on_skip(self) -> Any:
        """Return the result of :meth:`run` if :attr:`skip` is True."""
        return None

    def reset(self) -> None:
        """Prepare a run; a loop may run many times."""
        return

    def on_run_start(self, *args: Any) -> None:
        """Called before the first advance."""
        return

    def on_advance_start(self, *args: Any) -> None:
        """Called before each advance."""
        return

    @abstractmethod
    def advance(self, *args: Any) -> None:
        """Do one round."""

    def on_advance_end(self) -> None:
        """Called after each advance."""
        return

    def on_run_end(self) -> Any:
        """Called after the last advance; :meth:`run` returns its result."""
        return None

    def teardown(self) -> None:
        """Release resources; called on every exit path, children first."""
        for child in self._children().values():
            child.teardown()

    def state_dict(self) -> dict[str, Any]:
        """Return state besides changed attributes; children are saved separately."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return


@final
class Forward:
    """Calls a step of the model, between the events of the forward pass.

    Args:
        parts: the objects of the run.
        step: the name of the step, such as ``"train_step"``.

    Attributes:
        call: runs the step on a batch that :meth:`begin` has returned, in the precision of the run.
        has_start: whether anybody receives the start of a forward pass.
        has_end: whether anybody receives its end.
    """

    def __init__(self, parts: RunParts, step: str) -> None:
        self._run = parts.run
        self._model = parts.model
        self._engine = parts.engine
        self._hooks = parts.hooks
        self._context = parts.context
        self._runner = parts.runner
        self._step = parts.hooks.active[step]
        casts = parts.engine.precision.casts or redefines(parts.engine, Engine, "autocast")
        self.call = self._call_with_autocast if casts else self._step
        self.has_start = "on_forward_start" in parts.hooks.active
        self.has_end = "on_forward_end" in parts.hooks.active

    def _call_with_autocast(self, *args: Any) -> Any:
        with self._engine.autocast():
            return self._step(*args)

    def begin(self, batch: Any) -> Any:
        """Emit the start; returns the batch with the processor's transforms.

        Args:
            batch: the batch, on the device.
        """
        processor = self._model.batch_processor
        if processor is not None:
            batch = processor._transform(batch)
        self._run.batch = batch
        if self.has_start:
            self.emit("on_forward_start")
        return batch

    def end(self, result: Any, loss: Tensor | WeightedLoss | None) -> None:
        """Emit the end, with the outputs of the step and its loss in the context."""
        run = self._run
        run.model_outputs = result.outputs if isinstance(result, Processed) else result
        run.loss = loss.mean if isinstance(loss, WeightedLoss) else loss
        if self.has_end:
            self.emit("on_forward_end")

    def emit(self, event: str) -> None:
        """Emit an event of the forward pass."""
        self._hooks.emit(event, self._context)
        note_changes(self._runner.watch, event)


def moves_batches(parts: RunParts) -> bool:
    """Return whether a batch must be brought to the device, or in the way of the model."""
    is_own = type(parts.model).batch_to_device is not Model.batch_to_device
    return parts.engine.device.type != "cpu" or is_own


def note_changes(watch: ReplicaWatch | None, hook: str) -> None:
    """Note what a hook has changed in the step of a replica, if that is watched."""
    if watch is not None:
        watch.conclude(hook)


def find_loops(root: Loop, path: str = "fit") -> dict[str, Loop]:
    """Return a loop and all below it, by role path.

    Args:
        root: the loop; the outermost one is that over all epochs.
        path: its role, which is the first part of all names.
    """
    found = {path: root}
    for role, child in root._children().items():
        found |= find_loops(child, f"{path}.{role.removesuffix('_loop')}")
    return found


def find_loops_with_state(root: Loop) -> dict[str, Loop]:
    """Return those of :func:`find_loops` that load a state of their own."""
    base, found = Loop.load_state_dict, find_loops(root)
    return {where: each for where, each in found.items() if type(each).load_state_dict is not base}


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("helios.")


def _find_base(kind: type) -> type:
    """Return the class of Helios from which a loop of the user's derives."""
    return next(base for base in kind.__mro__ if _is_ours(base))
