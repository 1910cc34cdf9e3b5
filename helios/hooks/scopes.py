"""Open scopes: every context that was entered is left, once, whatever happens.

Contexts of one scope are left in the order in which they were entered; nested scopes are left from
the inside out. An error in one context never keeps the others from being left.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from helios.hooks.context import Context

_LOGGER = logging.getLogger(__name__)


class Enterable(Protocol):
    """A context that can be entered and left."""

    def on_enter(self, ctx: Any) -> object:
        """Called when the scope begins."""
        ...

    def on_exit(self, ctx: Any) -> object:
        """Called when the scope ends."""
        ...


@dataclass
class _Scope:
    """An open scope, with the contexts that were entered."""

    kind: tuple[str, str]
    ctx: Context
    is_resumed: bool
    begun: list[Enterable] = field(default_factory=list)

    def leave(self, exception: BaseException | None) -> list[BaseException]:
        return leave(self.begun, self.ctx, exception, is_resumed=self.is_resumed)


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
        kind: tuple[str, str],
        ctx: Context,
        hooks: Iterable[Enterable],
        *,
        is_resumed: bool = False,
    ) -> None:
        """Open a scope: enter contexts in order, until one raises.

        Args:
            kind: kind of the scope; an open one of the same kind was interrupted and is closed
                first.
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

    def end(self, kind: tuple[str, str]) -> None:
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
            errors += self._open.pop().leave(errors[0] if errors else None)
        if errors:
            first = join_errors(errors)
            if exception is None:
                raise first


def leave(
    hooks: Iterable[Enterable],
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
