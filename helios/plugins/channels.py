"""Hook channels: contexts that are entered and left around each part of a run.

A :class:`HookContext` is entered and left together with one of seven nested scopes; a
:class:`PipelineHooks` is the plugin that holds contexts, an ordered list for each channel. Scopes
are the pairs of events that the table of events names: on_loop around the whole run, on_epoch,
on_step (an accumulation window), on_batch, on_model_forward, on_model_backward and
on_optimizer_step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from helios.counters import Phase, TrainingState
from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS, EVENTS, Event
from helios.plugins.contexts import HookContext, Scopes, check_parts, keeps_state
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin, create_plugin

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """A context in a channel, the number of its registration, and its number of live handles."""

    hook: HookContext[Any]
    number: int
    claims: int = 0


class _Channel:
    """The contexts of one channel, in the order of their registration."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._count = 0

    def add(self, hook: HookContext[Any]) -> _Entry:
        for entry in self.entries:
            if entry.hook is hook:
                break
        else:
            # Never reused: another context must not get the state of one that was removed.
            entry = _Entry(hook, self._count)
            self._count += 1
            self.entries.append(entry)
        entry.claims += 1
        return entry

    def live(self) -> Iterator[HookContext[Any]]:
        """Yield the current contexts; one that is removed meanwhile is not yielded."""
        for entry in tuple(self.entries):
            if entry.claims:
                yield entry.hook

    def withdraw(self, entry: _Entry) -> None:
        if entry not in self.entries:
            return
        entry.claims -= 1
        if entry.claims == 0:
            self.entries.remove(entry)

    def clear(self) -> None:
        for entry in self.entries:
            entry.claims = 0
        self.entries.clear()


@final
class HookHandle:
    """Removes registrations: by :meth:`remove`, or at the end of a ``with`` statement."""

    def __init__(self, registrations: Iterable[tuple[_Channel, _Entry]]) -> None:
        self._registrations = list(registrations)

    def remove(self) -> None:
        """Remove the registrations; calling it again does nothing.

        A context that was registered several times is removed with the last of its handles.
        """
        registrations, self._registrations = self._registrations, []
        for channel, entry in registrations:
            channel.withdraw(entry)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@PLUGIN_REGISTRY.register
class PipelineHooks(Plugin):
    """Contexts by channel, as one plugin.

    Contexts of a channel are entered in the order of their registration and left in the same order.
    If a scope ends while scopes inside it are open, those end first; after an exception all entered
    contexts are left, innermost scope first, with ``ctx.exception`` set.

    Args:
        plug_id: unique id of the plugin; the states of its contexts are saved under it.
    """

    _internals: ClassVar[str] = "_channels _scopes"

    def __init__(self, plug_id: str = "pipeline-hooks") -> None:
        super().__init__(plug_id)
        self._channels = {name: _Channel() for name in CHANNELS}
        self._scopes = Scopes()

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
            ArgumentError: for a table without a type.
            KeyError: for a type that is not registered.
        """
        if source is None or isinstance(source, PipelineHooks):
            return PipelineHooks() if source is None else source
        if isinstance(source, Mapping):
            return _as_hooks(_build(source), source)
        if callable(source):
            return _as_hooks(source(), source)
        if isinstance(source, Iterable) and not isinstance(source, str | bytes):
            hooks = PipelineHooks()
            for part in source:
                hooks += PipelineHooks.from_hooks(part)
            return hooks
        return _as_hooks(source, source)

    def register(self, channel: str, hook: HookContext[Any]) -> HookHandle:
        """Add a context to a channel; returns a handle whose ``remove`` removes it.

        The same object counts once in a channel, at its first position. Each call has its own
        handle, and the context stays until the last of them was removed. An open scope does not
        change: a new context is entered when the scope next begins, and one that was entered is
        left, even if it was removed in between.

        Raises:
            ArgumentError: for a channel that does not exist, and a context that overrides neither
                ``on_enter`` nor ``on_exit``, or only one of ``state_dict`` and
                ``load_state_dict``.
            ArgumentTypeError: for anything but a ``HookContext``, and for methods that take other
                arguments than the context, or are async or generators.
        """
        place = self._find(channel)
        if not isinstance(hook, HookContext):
            raise ArgumentTypeError(
                f"PipelineHooks.register(hook=...) must be a HookContext object, got {hook!r}. "
                "Wrap functions with HookContext.from_callable(before=..., after=...)."
            )
        check_parts(hook)
        keeps_state(hook)  # raises
        return HookHandle([(place, place.add(hook))])

    def contexts(self, channel: str) -> list[HookContext[Any]]:
        """Return the contexts of a channel, in their order.

        Raises:
            ArgumentError: for a channel that does not exist.
        """
        return [entry.hook for entry in self._find(channel).entries]

    def unregister_all(self) -> None:
        """Remove all contexts from all channels; existing handles have no effect any more."""
        for channel in self._channels.values():
            channel.clear()

    def extend(self, other: PipelineHooks) -> HookHandle:
        """Add the contexts that another object holds now, channel by channel.

        Returns:
            One handle for all of them.

        Raises:
            ArgumentTypeError: for anything but a ``PipelineHooks``.
        """
        if not isinstance(other, PipelineHooks):
            raise ArgumentTypeError(
                f"PipelineHooks can be added to PipelineHooks only, got {other!r}. Use "
                "PipelineHooks.from_hooks(...), or register(channel, hook) for one context."
            )
        found = [(name, hook) for name in CHANNELS for hook in other.contexts(name)]
        return HookHandle(
            (self._channels[name], self._channels[name].add(hook)) for name, hook in found
        )

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
            for entry in channel.entries:
                if keeps_state(entry.hook):
                    found.setdefault(id(entry.hook), (f"{name}.{entry.number}", entry.hook))
        return list(found.values())

    def _begin(self, channel: str, kind: str, *, is_resumed: bool = False) -> None:
        hooks = self._channels[channel].live()
        self._scopes.begin(kind, self.context, hooks, is_resumed=is_resumed)

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
        """Begin the loop, if the validation is a run of its own."""
        if not self._scopes:
            self._begin("on_loop", "on_validation")

    def on_validation_end(self, validation_cycle: int) -> None:
        """End the loop, if it began with the validation."""
        self._scopes.end("on_validation")

    def on_exception(self, exception: BaseException) -> None:
        """Leave everything that was entered; the exception propagates."""
        if self._scopes:
            self.context._run.exception = exception
            self._scopes.unwind(exception=exception)

    def on_fit_end(self) -> None:
        """Leave what an interruption has left open: its end events are not emitted."""
        self._scopes.unwind()

    def teardown(self) -> None:
        """Leave what is still open, and prepare for another run."""
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


def _build(table: Mapping[str, Any]) -> Any:
    arguments = dict(table)
    if "type" not in arguments:
        raise ArgumentError(
            f"PipelineHooks.from_hooks(...) must get tables with a 'type', got {arguments!r}. Set "
            "it to a registered class, e.g. {'type': 'PipelineHooks'}."
        )
    return create_plugin(arguments.pop("type"), **arguments)


def _as_hooks(made: Any, source: Any) -> PipelineHooks:
    if not isinstance(made, PipelineHooks):
        raise ArgumentTypeError(
            "PipelineHooks.from_hooks(...) must get None, PipelineHooks, a table with a type, a "
            f"class or function that returns PipelineHooks, or an iterable of these, got "
            f"{source!r}. Register single contexts with register(channel, hook)."
        )
    return made
