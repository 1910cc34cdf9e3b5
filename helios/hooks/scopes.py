"""Scopes that are open: what has been entered is left, once, whatever happens (R12-R16).

Inside of one scope the order of leaving is that of entering; of nested scopes the innermost goes
first. An error of one is never the end of the others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from helios.hooks.context import Context

_LOGGER = logging.getLogger(__name__)


class Enterable(Protocol):
    """What can be entered and left."""

    def on_enter(self, ctx: Context) -> object:
        """Act when the scope begins."""
        ...

    def on_exit(self, ctx: Context) -> object:
        """Act when the scope ends."""
        ...


@dataclass
class _Scope:
    """A scope that is open, with the contexts that were entered."""

    kind: tuple[str, str]
    ctx: Context
    is_resumed: bool
    begun: list[Enterable] = field(default_factory=list)

    def leave(self, exception: BaseException | None) -> list[BaseException]:
        return leave(self.begun, self.ctx, exception, is_resumed=self.is_resumed)


class Scopes:
    """The scopes that are open, as a stack.

    Attributes:
        is_run_resumed: whether the run under way was begun in another process.
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
        """Open a scope: enter contexts in their order, until one raises (R14).

        Args:
            kind: what the scope is; one of the same kind that is still open was cut off, and is
                closed first.
            ctx: what the contexts get.
            hooks: the contexts.
            is_resumed: whether the scope was begun in another process.
        """
        self.end(kind)
        scope = _Scope(kind, ctx, is_resumed)
        self._open.append(scope)
        ctx.resumed = is_resumed
        try:
            for hook in hooks:
                hook.on_enter(ctx)
                scope.begun.append(hook)
        finally:
            ctx.resumed = False

    def end(self, kind: tuple[str, str]) -> None:
        """Close a scope and all inside of it that is open; one that is not open is no error."""
        for depth in reversed(range(len(self._open))):
            if self._open[depth].kind == kind:
                self.unwind(depth)
                return

    def unwind(self, depth: int = 0, exception: BaseException | None = None) -> None:
        """Close all scopes above a depth, innermost first.

        Args:
            depth: how many stay open.
            exception: what has broken them off, and goes on by itself; contexts find it in
                ``ctx.exception``, and what they raise is noted with it.

        Raises:
            BaseException: without ``exception``, the first that was raised on the way, after all
                contexts were left (R15).
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
    """Leave contexts, all of them; returns what they raised (R15)."""
    outer, errors = ctx.exception, list[BaseException]()
    ctx.exception, ctx.resumed = exception, is_resumed
    for hook in hooks:
        try:
            hook.on_exit(ctx)
        except BaseException as error:
            errors.append(error)
            ctx.exception = errors[0] if exception is None else exception
    ctx.exception, ctx.resumed = outer, False
    return errors


def join_errors(errors: list[BaseException]) -> BaseException:
    """Return the first of some errors, which carries the others along (R15)."""
    first = errors[0]
    for other in errors[1:]:
        chain = _chain(first)
        if any(other is link for link in chain):
            continue
        for link in _chain(other):
            if any(link.__context__ is earlier for earlier in chain):
                link.__context__ = None  # Python's chain leads back to the first: cut the ring
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
