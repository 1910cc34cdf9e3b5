"""``HookContext``: methods that are called at the beginning and the end of a part of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, final

from typing_extensions import TypeVar

from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.bus import signature_of
from helios.hooks.context import Context
from helios.hooks.overrides import check_state_methods, warn_of_near_names
from helios.hooks.scopes import join_errors, leave
from helios.model.model import Model

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
    warn_of_near_names(hook, HookContext)
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
