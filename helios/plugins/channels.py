"""Hook channels: contexts that are entered and exited around each scope of a run.

A :class:`HookContext` is entered and left together with one of seven nested scopes; a
:class:`PipelineHooks` is the plugin that holds contexts, an ordered list for each channel. Scopes
are the pairs of events that the table of events names: on_loop around the whole run, on_epoch,
on_step (an accumulation window), on_batch, on_model_forward, on_model_backward and
on_optimizer_step.

Every entered context is exited once, also after an error. Contexts of one scope are exited in the
order in which they were entered, nested scopes from the inside out. An error in one context does
not keep the others from being exited.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, final

from typing_extensions import TypeVar

from helios.counters import Phase, TrainingState
from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.bus import check_state_methods, signature_of
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS, EVENTS, Event
from helios.model.model import Model
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin, create_plugin

_LOGGER = logging.getLogger(__name__)

Part = Callable[[Context], object]
Seen = TypeVar("Seen", bound=Model, default=Model)


class HookContext(Generic[Seen]):
    """Called at the beginning and the end of a scope; override one or both methods.

    An entered context is always exited. If ``ctx.exception`` is set then, an exception ended the
    scope. Attributes that training changes are saved; to save something else, override
    :meth:`state_dict` and :meth:`load_state_dict`. ``HookContext[MyModel]`` tells type checkers
    which model ``ctx.model`` is.

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
            ArgumentTypeError: for something that is not callable, does not take one argument, or is
                async or a generator.
        """
        for name, part in (("before", before), ("after", after)):
            if part is not None:
                _check_part(f"HookContext.from_callable({name}=...)", part)
        return _FunctionContext(before, after)

    @contextmanager
    def begin(self, ctx: Context[Seen]) -> Iterator[HookContext[Seen]]:
        """Enter, run the body of a ``with`` statement, and always exit.

        An exception in the body is in ``ctx.exception`` during the exit, and propagates afterwards;
        an error of the exit is added to it as a note.
        """
        self.on_enter(ctx)
        errors: list[BaseException] = []
        try:
            yield self
        except BaseException as error:
            errors.append(error)
        errors += _leave([self], ctx, errors[0] if errors else None)
        if errors:
            raise _join_errors(errors)

    def state_dict(self) -> dict[str, Any]:
        """Return state besides changed attributes, in plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


def keeps_state(hook: HookContext[Any]) -> bool:
    """Return whether a checkpoint saves state of a context.

    Raises:
        ArgumentError: if it overrides only one of the two methods.
    """
    return check_state_methods(hook, HookContext)


def _check_parts(hook: HookContext[Any]) -> None:
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
    if not callable(part):
        raise ArgumentTypeError(
            f"{name} must be a function of the context, got {part!r}. Pass e.g. lambda ctx: "
            "print(ctx.loss)."
        )
    try:
        signature = signature_of(name, part)
    except ValueError:  # Some built-in functions have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} must take one argument, the context object, but takes {signature}. Fix "
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


class _Scopes:
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
            errors += _leave(scope.begun, scope.ctx, cause, is_resumed=scope.is_resumed)
        if errors:
            first = _join_errors(errors)
            if exception is None:
                raise first


def _leave(
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


def _join_errors(errors: list[BaseException]) -> BaseException:
    """Return the first of some errors, with the others added as notes."""
    first = errors[0]
    for other in errors[1:]:
        text = f"While hook contexts were exited, {other!r} was raised too."
        if other is first:
            continue
        if sys.version_info >= (3, 11):
            first.add_note(text)
        else:
            _LOGGER.error("%r: %s", first, text)
    return first


_Channel: TypeAlias = dict[int, HookContext[Any]]
"""The contexts of a channel, by the number of their registration."""


@final
class HookHandle:
    """Removes registrations: by :meth:`remove`, or at the end of a ``with`` statement."""

    def __init__(self, registrations: Iterable[tuple[_Channel, int]]) -> None:
        self._registrations = list(registrations)

    def remove(self) -> None:
        """Remove what was added; calling it again does nothing."""
        for channel, number in self._registrations:
            channel.pop(number, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@PLUGIN_REGISTRY.register
class PipelineHooks(Plugin):
    """Contexts by channel, as one plugin.

    Contexts of a channel are entered and exited in the order of their registration. If a scope ends
    while scopes inside it are open, those end first; after an exception all entered contexts are
    exited, innermost scope first, with ``ctx.exception`` set.

    Args:
        plug_id: unique id of the plugin; the states of its contexts are saved under it.
    """

    _internals: ClassVar[str] = "_channels _counts _scopes"

    def __init__(self, plug_id: str = "pipeline-hooks") -> None:
        super().__init__(plug_id)
        self._channels: dict[str, _Channel] = {name: {} for name in CHANNELS}
        # Never reused: another context must not get the state of one that was removed.
        self._counts: Counter[str] = Counter()
        self._scopes = _Scopes()

    @staticmethod
    def from_hooks(source: Any) -> PipelineHooks:
        """Return the contexts that a value describes.

        Args:
            source: ``None`` (no contexts); a ``PipelineHooks`` (itself); a table ``{"type": name,
                ...}``, built by the registry of plugins with the rest as arguments; a class or a
                function without arguments that returns one; or an iterable of these, which gives a
                new object with all their contexts.

        Raises:
            ArgumentTypeError: for anything else.
            KeyError: for a table without a type, or with one that is not registered.
        """
        made = source
        if isinstance(source, Mapping):
            arguments = dict(source)
            made = create_plugin(arguments.pop("type"), **arguments)
        elif callable(source):
            made = source()
        elif source is None or (isinstance(source, Iterable) and not isinstance(source, str)):
            made = PipelineHooks()
            for part in source or ():
                made += PipelineHooks.from_hooks(part)
        if not isinstance(made, PipelineHooks):
            raise ArgumentTypeError(
                "PipelineHooks.from_hooks(...) must get None, PipelineHooks, a table with a type, "
                "a class or function that returns PipelineHooks, or an iterable of these, got "
                f"{source!r}. Register single contexts with register(channel, hook)."
            )
        return made

    def register(self, channel: str, hook: HookContext[Any]) -> HookHandle:
        """Add a context to a channel; returns a handle whose ``remove`` removes it.

        The same object counts once in a channel, at its first position: registering it again adds
        nothing, and that handle removes nothing. An open scope does not change: a new context is
        entered when the scope next begins, and an entered one is exited, even if it was removed in
        between.

        Raises:
            ArgumentError: for a channel that does not exist, and a context that overrides neither
                ``on_enter`` nor ``on_exit``, or only one of ``state_dict`` and
                ``load_state_dict``.
            ArgumentTypeError: for anything but a ``HookContext``, and for methods that take other
                arguments than the context, or are async or generators.
        """
        self._find(channel)
        if not isinstance(hook, HookContext):
            raise ArgumentTypeError(
                f"PipelineHooks.register(hook=...) must be a HookContext object, got {hook!r}. "
                "Wrap functions with HookContext.from_callable(before=..., after=...)."
            )
        _check_parts(hook)
        keeps_state(hook)  # raises
        return HookHandle(self._add(channel, hook))

    def _add(self, name: str, hook: HookContext[Any]) -> Iterator[tuple[_Channel, int]]:
        """Add a context that is not in the channel yet, and yield its place."""
        channel = self._channels[name]
        if not any(each is hook for each in channel.values()):
            number = self._counts[name]
            self._counts[name] += 1
            channel[number] = hook
            yield channel, number

    def contexts(self, channel: str) -> list[HookContext[Any]]:
        """Return the contexts of a channel, in their order.

        Raises:
            ArgumentError: for a channel that does not exist.
        """
        return list(self._find(channel).values())

    def unregister_all(self) -> None:
        """Remove all contexts from all channels; existing handles no longer have an effect."""
        for channel in self._channels.values():
            channel.clear()

    def extend(self, other: PipelineHooks) -> HookHandle:
        """Add the current contexts of another object, channel by channel.

        Returns:
            One handle for all of them.
        """
        found = [(name, hook) for name in CHANNELS for hook in other.contexts(name)]
        return HookHandle(place for name, hook in found for place in self._add(name, hook))

    def __iadd__(self, other: PipelineHooks) -> PipelineHooks:
        self.extend(other)
        return self

    def __add__(self, other: PipelineHooks) -> PipelineHooks:
        """Return a new object with the contexts of both, under the id of the first."""
        hooks = PipelineHooks(self.plug_id)
        hooks.extend(self)
        hooks.extend(other)
        return hooks

    def _find(self, channel: str) -> _Channel:
        if channel not in CHANNELS:
            raise ArgumentError(
                f"PipelineHooks has the channels {', '.join(CHANNELS)}, got {channel!r}. Pass one "
                "of them."
            )
        return self._channels[channel]

    def setup(self) -> None:
        """Nothing to prepare."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the contexts that have one, by ``<channel>.<number>``.

        Numbers count the registrations of a channel from 0. A context in several channels is saved
        once, under the first.
        """
        return {name: hook.state_dict() for name, hook in self._with_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of the contexts; warn if any are left over or missing."""
        left, missing = dict(state_dict), []
        for name, hook in self._with_state():
            if name in left:
                hook.load_state_dict(left.pop(name))
            else:
                missing.append(name)
        context: Context | None = vars(self).get("context")
        is_inference = context is not None and context.phase is not Phase.TRAINING
        if (left or missing) and not is_inference:
            _LOGGER.warning(
                "The contexts of plugin %r are not those of the checkpoint. States without a "
                "context: %s. Contexts without a saved state: %s. Register the same ones in the "
                "same order, before the run starts.",
                self.plug_id,
                ", ".join(left) or "none",
                ", ".join(missing) or "none",
            )

    def _with_state(self) -> list[tuple[str, HookContext[Any]]]:
        found: dict[int, tuple[str, HookContext[Any]]] = {}
        for name, channel in self._channels.items():
            for number, hook in channel.items():
                if keeps_state(hook):
                    found.setdefault(id(hook), (f"{name}.{number}", hook))
        return list(found.values())

    def _begin(self, channel: str, kind: str, *, is_resumed: bool = False) -> None:
        hooks = self._channels[channel]
        # One that is removed meanwhile is not entered.
        live = (hook for number, hook in [*hooks.items()] if number in hooks)
        self._scopes.begin(kind, self.context, live, is_resumed=is_resumed)

    def on_checkpoint_loaded(self) -> None:
        """Remember that the loop began in another process."""
        self._scopes.is_run_resumed = True

    def on_sanity_check_start(self) -> None:
        """Begin the loop before the sanity check, so that its batches are inside it."""
        self._begin("on_loop", "on_training")

    def on_training_start(self) -> None:
        """Begin the loop, unless a sanity check has done so."""
        if not self._scopes:
            self._begin("on_loop", "on_training", is_resumed=self._scopes.is_run_resumed)

    def on_training_resume(self, state: TrainingState) -> None:
        """Open the scope of the epoch in which the run resumes: its start is not emitted again."""
        if self.context.is_in_epoch:
            self._begin("on_epoch", "on_training_epoch", is_resumed=True)

    def on_training_batch_start(self, state: TrainingState) -> None:
        """Begin the batch; and a step, if a window that began in another epoch continues."""
        if "on_training_step" not in self._scopes:
            self._begin("on_step", "on_training_step")
        self._begin("on_batch", "on_training_batch")

    def on_validation_start(self, validation_cycle: int) -> None:
        """Begin the loop, if the validation is not part of a fit."""
        if not self._scopes:
            self._begin("on_loop", "on_validation")

    def on_validation_end(self, validation_cycle: int) -> None:
        """End the loop, if it began with the validation."""
        self._scopes.end("on_validation")

    def on_exception(self, exception: BaseException) -> None:
        """Exit all entered contexts; the exception propagates."""
        if self._scopes:
            self.context._run.exception = exception
            self._scopes.unwind(exception=exception)

    def on_fit_end(self) -> None:
        """Exit contexts that an interruption has left open, without their end events."""
        self._scopes.unwind()

    def teardown(self) -> None:
        """Exit open contexts, and prepare for another run."""
        self._scopes.is_run_resumed = False
        self._scopes.unwind()


def _receive(event: Event) -> Callable[..., None]:
    """Return a method that begins or ends the scope of an event."""
    kind, _, edge = event.name.rpartition("_")

    def begin(self: PipelineHooks, *args: object) -> None:
        self._begin(event.scope, kind)

    def end(self: PipelineHooks, *args: object) -> None:
        self._scopes.end(kind)

    return begin if edge == "start" else end


def _receive_scopes(kind: type[PipelineHooks]) -> None:
    """Let a class receive all events that begin or end a scope, if it has no method of its own."""
    for event in EVENTS.values():
        if event.scope and event.name not in vars(kind):
            setattr(kind, event.name, _receive(event))


_receive_scopes(PipelineHooks)
