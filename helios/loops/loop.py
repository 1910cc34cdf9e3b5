"""``Loop``, the base of all loops: reset, then advance until done.

Loops are small: they hold children by role and no counters. All progress is in the session's state
and cursor, so a replaced loop resumes from any checkpoint.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, TypeVar

from typing_extensions import final

from helios.errors import ArgumentError, StateError, UsageError
from helios.hooks.overrides import (
    check_arguments,
    check_overrides,
    check_state_methods,
    warn_of_reserved_names,
)
from helios.loops.view import SessionView
from helios.session import Session

_LOGGER = logging.getLogger(__name__)

Child = TypeVar("Child", bound="Loop")
_HOOKS = ("skip", "reset", "on_run_start", "on_advance_start", "on_advance_end")
_TAKING = ("on_run_start", "on_advance_start", "advance")
_PARTS = (
    *("reset", "on_run_start", "on_advance_start", "advance", "on_advance_end", "on_run_end"),
    *("skip", "on_skip", "done"),
)
_CYCLE = (*_PARTS, "run")


def require(loop: Child | None) -> Child:
    """Return a child loop that must be set by now.

    Raises:
        UsageError: if its role is empty.
    """
    if loop is None:
        raise UsageError("A role of this loop is empty: run it in a trainer, which attaches it.")
    return loop


def make_stray_stop(error: StopIteration) -> UsageError:
    """Make the error for a ``StopIteration`` from a step, which must not end a loop.

    Otherwise it would end the innermost loop, and a batch would be dropped without an error.
    """
    return UsageError(
        "A StopIteration was raised in a step, the processing of a batch, or a hook that cannot "
        "end an epoch (on_training_batch_start can). It usually comes from next() on an exhausted "
        f"iterator: catch it there, or restart the iterator. ({error!r})"
    )


class _StopAgreed:
    """Whether a run ends after an epoch loop that does not say so; an own attribute hides it."""

    def __get__(self, loop: Loop | None, kind: type[Loop]) -> bool:
        session = None if loop is None else vars(loop).get("_session")
        return session is not None and session.is_leaving


class Loop(ABC):
    """Base of all loops.

    Attributes:
        roles: names of the children; each is an attribute that holds a loop.
        role_types: which of Helios' own loops a role takes; a loop that derives from none of them
            may take any role.
        role_arguments: what a loop passes to its child in a role; nothing if it is not named.
        unsaved: names of attributes that training changes and that need not be saved.
        session: what the loop may access, while a trainer runs it. Helios' own loops access all of
            it, under another name.
        has_left: of an epoch loop, whether the run ends after it; by default, whether all processes
            have agreed on a stop.
    """

    _internals: ClassVar[str] = "_has_own_cycle _is_made _session session"
    unsaved: ClassVar[tuple[str, ...]] = ()

    roles: ClassVar[tuple[str, ...]] = ()
    _role_types: ClassVar[Mapping[str, type[Loop]]] = {}
    _role_arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    session: SessionView
    _session: Session
    has_left: bool = _StopAgreed()  # type: ignore[assignment]
    _overridden: ClassVar[frozenset[str]] = frozenset()
    _has_own: ClassVar[Mapping[str, bool]] = {}
    _made: ClassVar[Sequence[tuple[str, object]]] = ()
    """The parts of the cycle as Helios has made them, of a class or of its base in Helios."""
    _is_made = False
    _has_own_cycle = True
    """Whether a user has written a part of the cycle. If not, one round may stand for it."""

    def __init__(self) -> None:
        self._is_made = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Determine once which hooks a class overrides: run() calls no others."""
        super().__init_subclass__(**kwargs)
        cls._overridden = frozenset(
            name for name in _HOOKS if getattr(cls, name) is not getattr(Loop, name)
        )
        cls._has_own = {
            name: not _find_owner(cls, name).__module__.startswith("helios.") for name in _CYCLE
        }
        if cls.__module__.startswith("helios."):
            cls._made = [(name, inspect.getattr_static(cls, name)) for name in _PARTS]

    @final
    def _children(self) -> dict[str, Loop]:
        """Return the child loops that are set, by role.

        Raises:
            UsageError: if a subclass's ``__init__`` does not call that of its base.
        """
        self._check_made()
        found = {role: getattr(self, role) for role in self.roles}
        return {role: child for role, child in found.items() if child is not None}

    @final
    def _adopt(self, other: Loop) -> None:
        """Take over the children of another loop in roles that are still empty here."""
        for role, child in other._children().items():
            if role in self.roles and getattr(self, role) is None:
                setattr(self, role, child)

    @final
    def _attach(self, session: Session | None) -> None:
        """Set the session of the loop and all loops below it.

        Raises:
            UsageError: if a role is empty.
            ArgumentError: for a loop that was made for another role.
            ArgumentTypeError: for a method that does not take what is passed to it.
        """
        missing = sorted(set(self.roles) - set(self._children()))
        if missing:
            raise UsageError(
                f"{type(self).__name__} has no loop in the roles {missing}. Pass them to its "
                f"constructor, or replace it with connect(...), which keeps the current ones."
            )
        for name in ("session", "_session"):
            vars(self).pop(name, None)
        if session is not None:
            self.session = self._session = session
            self._has_own_cycle = self._find_own_cycle()
            if not type(self).__module__.startswith("helios.") or self._is_redefined():
                check_overrides(self, _find_base(type(self)), apart=_TAKING)
                check_state_methods(self, Loop)
                warn_of_reserved_names(self)
                session.agreement.expect_late_requests()
                session.agreement.has_own_loops = True
        self._adapt(session)
        for role, child in self._children().items():
            if session is not None:
                self._check_child(role, child)
                if not self._has_own["advance"]:
                    check_arguments(child, _TAKING, self._role_arguments.get(role, ()))
            child._attach(session)

    def connect(self, **loops: Loop) -> None:
        """Replace children by role; roles that a new child leaves empty keep the old one's loops.

        Raises:
            ArgumentError: for an unknown role, something that is not a loop, or a loop that was
                made for another role.
        """
        for role, loop in loops.items():
            self._check_child(role, loop)
        for role, loop in loops.items():
            present = getattr(self, role)
            if present is not None:
                loop._adopt(present)
            setattr(self, role, loop)
            if "_session" in vars(self):
                loop._attach(self._session)

    def _adapt(self, session: Session | None) -> None:
        """Choose children that the model decides, before they are attached."""

    def _check_made(self) -> None:
        if not self._is_made:
            raise UsageError(
                f"{type(self).__name__}.__init__ must call super().__init__(): without it the "
                "loop has neither children nor a session. Add the call."
            )

    def _check_child(self, role: str, loop: object) -> None:
        if role not in self.roles:
            raise ArgumentError(
                f"{type(self).__name__}.connect(...) must name one of its roles "
                f"{list(self.roles)}, got {role!r}. {self._find_role(role)}"
            )
        if not isinstance(loop, Loop):
            remedy = "Derive it from a class of helios.loops."
            if isinstance(loop, type) and issubclass(loop, Loop):
                remedy = f"Pass an object: {loop.__name__}()."
            raise ArgumentError(
                f"{type(self).__name__}.connect({role}=...) must be a Loop instance, got {loop!r}. "
                f"{remedy}"
            )
        loop._children()  # raises
        wanted = self._role_types.get(role, Loop)
        if not isinstance(loop, wanted) and _is_built_in(type(loop)):
            raise ArgumentError(
                f"{type(self).__name__}.{role} must be of class {wanted.__name__}, got "
                f"{type(loop).__name__}, which was made for another role. Derive the loop from "
                f"{wanted.__name__}, or connect it in the right role."
            )

    def _find_role(self, role: str) -> str:
        """Return where a role is that this loop does not have."""
        waiting = list(self._children().items())
        for path, child in waiting:
            if role in child.roles:
                return f"It is a role of {path}: call {path}.connect({role}=...)."
            waiting += [(f"{path}.{name}", each) for name, each in child._children().items()]
        close = difflib.get_close_matches(role, self.roles, n=1)
        return f"Did you mean {close[0]}?" if close else "Correct the name."

    @final
    def run(self, *args: Any) -> Any:
        """Reset, then advance until done; returns what :meth:`on_run_end` returns.

        ``StopIteration`` from an advance ends the loop like ``break``; other exceptions propagate
        at once.

        Raises:
            UsageError: if an ``advance`` that does not call ``super().advance`` has left an
                inherited ``done`` where it was, twice: it would run for ever.
        """
        overridden = self._overridden
        if "skip" in overridden and self.skip:
            return self.on_skip()
        if "reset" in overridden:
            self.reset()
        if "on_run_start" in overridden:
            self.on_run_start(*args)
        advance = self._guarded_advance()
        while not self.done:
            try:
                if "on_advance_start" in overridden:
                    self.on_advance_start(*args)
                advance(*args)
                if "on_advance_end" in overridden:
                    self.on_advance_end()
            except StopIteration:
                break
        return self.on_run_end()

    def _find_own_cycle(self) -> bool:
        """Whether a user has written a part of the cycle: in a subclass, or put it in later."""
        kind = type(self)
        return (
            any(self._has_own.values())
            or self._is_redefined()
            or any(inspect.getattr_static(kind, name) is not each for name, each in self._made)
        )

    def _is_redefined(self) -> bool:
        """Whether the instance itself has a method of the cycle."""
        return not vars(self).keys().isdisjoint(_CYCLE)

    def _may_stand_still(self) -> bool:
        """Whether an ``advance`` of the user's decides when a ``done`` of Helios ends the loop."""
        own = self._has_own
        return not own["done"] and (own["advance"] or "advance" in vars(self))

    def _guarded_advance(self) -> Callable[..., None]:
        """Return ``advance``, with the checks of what a subclass does in it."""
        return self._watched_advance() if self._may_stand_still() else self.advance

    def _watched_advance(self) -> Callable[..., None]:
        """Return ``advance``, which refuses a third round if the first two have moved nothing."""
        before, rounds = self._find_progress(), count()

        def advance(*args: Any) -> None:
            if next(rounds) == 2 and before is not None and before == self._find_progress():
                kind = type(self)
                origin = _find_owner(kind, "done").__name__
                raise UsageError(
                    f"{kind.__name__}.advance has run twice, and {origin}.done is where it was: it "
                    f"depends on what {origin}.advance does, so the loop would never end. Call "
                    f"super().advance(...) in {kind.__name__}.advance, or override done."
                )
            self.advance(*args)

        return advance

    def _find_progress(self) -> object:
        """Return what :meth:`advance` changes and ``done`` depends on; ``None`` for nothing."""
        return None

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
        """Release what the loop holds; called on every exit path, children first."""
        for child in self._children().values():
            child.teardown()

    def state_dict(self) -> dict[str, Any]:
        """Return state besides changed attributes; children are saved separately."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return

    @final
    def _collect_states(self, path: str) -> dict[str, dict[str, Any]]:
        """Return the states of the loop and all below it, by role path, without empty ones."""
        states = {path: self.state_dict()}
        for role, child in self._children().items():
            states |= child._collect_states(f"{path}.{role.removesuffix('_loop')}")
        return {where: state for where, state in states.items() if state}

    @final
    def _spread_states(self, path: str, states: dict[str, dict[str, Any]]) -> None:
        """Restore saved states, by role path, of the loop and all below it.

        Raises:
            StateError: if a loop refuses its state.
        """
        if path in states and type(self).load_state_dict is not Loop.load_state_dict:
            try:
                self.load_state_dict(states.pop(path))
            except Exception as error:
                raise StateError(
                    f"The loop {path} ({type(self).__name__}) refused its saved state: {error!r}. "
                    "Connect the loop that the state was saved with, or correct load_state_dict()."
                ) from error
        for role, child in self._children().items():
            child._spread_states(f"{path}.{role.removesuffix('_loop')}", states)


@final
class LoopStates:
    """Saves and restores the states of loops.

    Args:
        root: the outermost loop.
        path: its role, which is the first part of all names.
        carries: whether the state of a removed loop is saved again, unread; outside of training it
            is passed over.
    """

    def __init__(self, root: Loop, path: str, *, carries: bool) -> None:
        self._root = root
        self._path = path
        self._carries = carries
        self._carried: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        """Return the states by role path."""
        return self._carried | self._root._collect_states(self._path)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the state of each loop."""
        left = dict(states)
        self._root._spread_states(self._path, left)
        if left and self._carries:
            self._carried.update(left)
            _LOGGER.warning(
                "The checkpoint holds the state of a loop that is not connected: %s. It is kept "
                "unread in later checkpoints; connect the loop again to use it.",
                ", ".join(left),
            )


def _find_owner(kind: type, name: str) -> type:
    """Return the class that defines an attribute of a class."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _find_base(kind: type) -> type:
    """Return the class of Helios from which a loop of the user's derives."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("helios."))


def _is_built_in(kind: type) -> bool:
    """Whether a class is one of Helios' own loops, or derives from one."""
    kinds = (base for base in kind.__mro__ if issubclass(base, Loop) and base is not Loop)
    return any(base.__module__.startswith("helios.") for base in kinds)
