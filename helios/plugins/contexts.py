"""``HookContext``: called at the beginning and the end of a part of a run; and what is open.

Every context that was entered is left, once, whatever happens. Contexts of one scope are left in
the order in which they were entered; nested scopes are left from the inside out. An error in one
context never keeps the others from being left.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, final

from typing_extensions import TypeVar

from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.bus import check_state_methods, signature_of
from helios.hooks.context import Context
from helios.model.model import Model

_LOGGER = logging.getLogger(__name__)

Part = Callable[[Context], object]
Seen = TypeVar("Seen", bound=Model, default=Model)


class HookContext(Generic[Seen]):
    """Called at the beginning and the end of a scope; override one or both methods.

    A context that was entered is always left. If ``ctx.exception`` is set then, an exception ended
    the scope. Attributes that training changes survive a restart; to control what is saved,
    override :meth:`state_dict` and :meth:`load_state_dict`. ``HookContext[MyModel]`` tells type
    checkers which model ``ctx.model`` is.

    Attributes:
        unsaved: names of attributes that training changes and that need not be saved.
    """

    unsaved: tuple[str, ...] = ()

    def on_enter(self, ctx: Context[Seen]) -> None:
        """Called when the scope begins; if this raises, the context was not entered."""
        return

    def on_exit(self, ctx: Context[Seen]) -> None:
        """Called when the scope ends."""
        return

    @staticmethod
    def from_callable(before: Part | None = None, after: Part | None = None) -> HookContext:
        """Return a context made of functions; one of them may be omitted.

        Args:
            before: called with the run's ``Context`` when the scope begins.
            after: called with it when the scope ends.

        Raises:
            ArgumentTypeError: for something that cannot be called, does not take one argument, or
                is async or a generator.
            ArgumentError: if both are omitted.
        """
        for name, part in (("before", before), ("after", after)):
            if part is not None and not callable(part):
                raise ArgumentTypeError(
                    f"HookContext.from_callable({name}=...) must be a function of the context, "
                    f"got {part!r}. Pass e.g. lambda ctx: print(ctx.loss)."
                )
            if part is not None:
                _check_part(f"HookContext.from_callable({name}=...)", part)
        if before is None and after is None:
            raise ArgumentError(
                "HookContext.from_callable(before=..., after=...) must get at least one, got none: "
                "the context would do nothing. Pass a function of the context."
            )
        return _FunctionContext(before, after)

    @contextmanager
    def begin(self, ctx: Context[Seen]) -> Iterator[HookContext[Seen]]:
        """Enter, run the body of a ``with`` statement, and always leave.

        An exception in the body is in ``ctx.exception`` while the context is left, and propagates
        afterwards; what leaving raises is added to it as a note.
        """
        self.on_enter(ctx)
        errors: list[BaseException] = []
        try:
            yield self
        except BaseException as error:
            errors.append(error)
        errors += leave([self], ctx, errors[0] if errors else None)
        if errors:
            raise join_errors(errors)

    def state_dict(self) -> dict[str, Any]:
        """Return state besides changed attributes, in plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


def keeps_state(hook: HookContext[Any]) -> bool:
    """Whether a checkpoint saves state of a context.

    Raises:
        ArgumentError: if it overrides only one of the two methods.
    """
    return check_state_methods(hook, HookContext)


def check_parts(hook: HookContext[Any]) -> None:
    """Check that a context does something when it is entered or left.

    Raises:
        ArgumentError: if it overrides neither ``on_enter`` nor ``on_exit``.
        ArgumentTypeError: for one of them that does not take one argument, or is async or a
            generator.
    """
    kind = type(hook)
    bases = (HookContext.on_enter, HookContext.on_exit)
    if tuple(getattr(part, "__func__", None) for part in (hook.on_enter, hook.on_exit)) == bases:
        raise ArgumentError(
            f"{kind.__name__} must override on_enter(self, ctx), on_exit(self, ctx) or both, got "
            "neither: the context would do nothing. Check the names of its methods."
        )
    _check_part(f"{kind.__name__}.on_enter", hook.on_enter)
    _check_part(f"{kind.__name__}.on_exit", hook.on_exit)


def _check_part(name: str, part: Part) -> None:
    try:
        signature = signature_of(name, part)
    except ValueError:  # Some built-in functions have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} must take one argument, the context object, but takes {signature}. Correct "
            "its parameters."
        ) from error


@final
class _FunctionContext(HookContext):
    """A context made of functions."""

    _internals: ClassVar[str] = "_after _before"

    def __init__(self, before: Part | None, after: Part | None) -> None:
        self._before = before
        self._after = after

    def on_enter(self, ctx: Context) -> None:
        """Call the first function."""
        if self._before is not None:
            self._before(ctx)

    def on_exit(self, ctx: Context) -> None:
        """Call the second function."""
        if self._after is not None:
            self._after(ctx)


@dataclass
class _Scope:
    """An open scope, with the contexts that were entered."""

    kind: str
    ctx: Context
    is_resumed: bool
    begun: list[HookContext[Any]] = field(default_factory=list)


class Scopes:
    """The open scopes, as a stack.

    Attributes:
        is_run_resumed: whether the current run began in another process.
    """

    def __init__(self) -> None:
        self._open: list[_Scope] = []
        self.is_run_resumed = False

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, kind: object) -> bool:
        return any(scope.kind == kind for scope in self._open)

    def begin(
        self,
        kind: str,
        ctx: Context,
        hooks: Iterable[HookContext[Any]],
        *,
        is_resumed: bool = False,
    ) -> None:
        """Open a scope: enter contexts in order, until one raises.

        Args:
            kind: what begins it and ends it, such as ``on_training_batch``; an open scope of the
                same kind was interrupted and is closed first.
            ctx: passed to the contexts.
            hooks: the contexts.
            is_resumed: whether the scope began in another process.
        """
        self.end(kind)
        scope = _Scope(kind, ctx, is_resumed)
        self._open.append(scope)
        ctx._run.resumed = is_resumed
        try:
            for hook in hooks:
                hook.on_enter(ctx)
                scope.begun.append(hook)
        finally:
            ctx._run.resumed = False

    def end(self, kind: str) -> None:
        """Close a scope and all open ones inside it; does nothing if it is not open."""
        for depth in reversed(range(len(self._open))):
            if self._open[depth].kind == kind:
                self.unwind(depth)
                return

    def unwind(self, depth: int = 0, exception: BaseException | None = None) -> None:
        """Close all scopes above a depth, innermost first.

        Args:
            depth: how many stay open.
            exception: the exception that ended them, which the caller raises again; contexts see
                it in ``ctx.exception``, and what they raise is added to it as a note.

        Raises:
            BaseException: without ``exception``, the first one that was raised, after all contexts
                were left.
        """
        errors: list[BaseException] = [] if exception is None else [exception]
        while len(self._open) > depth:
            scope = self._open.pop()
            cause = errors[0] if errors else None
            errors += leave(scope.begun, scope.ctx, cause, is_resumed=scope.is_resumed)
        if errors:
            first = join_errors(errors)
            if exception is None:
                raise first


def leave(
    hooks: Iterable[HookContext[Any]],
    ctx: Context,
    exception: BaseException | None,
    *,
    is_resumed: bool = False,
) -> list[BaseException]:
    """Leave all contexts; returns what they raised."""
    outer, errors = ctx.exception, list[BaseException]()
    ctx._run.exception, ctx._run.resumed = exception, is_resumed
    for hook in hooks:
        try:
            hook.on_exit(ctx)
        except BaseException as error:
            errors.append(error)
            ctx._run.exception = errors[0] if exception is None else exception
    ctx._run.exception, ctx._run.resumed = outer, False
    return errors


def join_errors(errors: list[BaseException]) -> BaseException:
    """Return the first of some errors, with the others added as notes."""
    first = errors[0]
    for other in errors[1:]:
        chain = _chain(first)
        if any(other is link for link in chain):
            continue
        for link in _chain(other):
            if any(link.__context__ is earlier for earlier in chain):
                link.__context__ = None  # Python's chain leads back to the first: break the cycle
                break
        chain[-1].__context__ = other
        text = f"While hook contexts were left, {other!r} was raised too."
        if sys.version_info >= (3, 11):
            first.add_note(text)
        else:
            _LOGGER.error("%r: %s", first, text)
    return first


def _chain(error: BaseException) -> list[BaseException]:
    links = [error]
    while (context := links[-1].__context__) is not None:
        if any(context is link for link in links):
            break
        links.append(context)
    return links
