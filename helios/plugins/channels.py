"""Hook channels: contexts with a beginning and an end around each part of a run (R1-R22).

A :class:`HookContext` is entered and left together with one of seven nested scopes; a
:class:`PipelineHooks` is the plugin that holds contexts, an ordered list for each channel. Scopes
are the pairs of events that the table of events names: on_loop around the whole run, on_epoch,
on_step (a window of accumulation), on_batch, on_model_forward, on_model_backward and
on_optimizer_step (C10).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.events import CHANNELS, EVENTS
from helios.hooks.scopes import Scopes
from helios.plugins.contexts import HookContext, check_parts, keeps_state
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin, create_plugin
from helios.state import Phase, TrainingState

_LOGGER = logging.getLogger(__name__)
_HEARD = EVENTS.keys() - {"setup"}


@dataclass(eq=False)
class _Entry:
    """A context in a channel, the number of its registration, and how many of them still stand."""

    hook: HookContext
    number: int
    claims: int = 0


class _Channel:
    """The contexts of one channel, in the order of their registration."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._count = 0

    def add(self, hook: HookContext) -> _Entry:
        for entry in self.entries:
            if entry.hook is hook:
                break
        else:
            # Never given again: another context must not get the state of one that was removed.
            entry = _Entry(hook, self._count)
            self._count += 1
            self.entries.append(entry)
        entry.claims += 1
        return entry

    def live(self) -> Iterator[HookContext]:
        """Yield the contexts that are there now, without those that go away in the meantime."""
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
    """Takes registrations back: by :meth:`remove`, or at the end of a ``with`` statement (R17)."""

    def __init__(self, registrations: Iterable[tuple[_Channel, _Entry]]) -> None:
        self._registrations = list(registrations)

    def remove(self) -> None:
        """Take back what the handle stands for; more calls do nothing.

        A context that was registered several times goes with the last of its handles.
        """
        registrations, self._registrations = self._registrations, []
        for channel, entry in registrations:
            channel.withdraw(entry)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _opens(channel: str, noun: str = "") -> Callable[..., None]:
    """Return a method that hears the beginning of a scope."""

    def begin(self: PipelineHooks, *args: Any) -> None:
        self._begin(channel, noun)

    return begin


def _closes(channel: str, noun: str = "") -> Callable[..., None]:
    """Return a method that hears the end of a scope."""

    def end(self: PipelineHooks, *args: Any) -> None:
        self._end(channel, noun)

    return end


@PLUGIN_REGISTRY.register
class PipelineHooks(Plugin):
    """Contexts by channel, as one plugin (R19).

    Contexts of a channel are entered in the order of their registration and left in the same order
    (R13, C11). Where a scope ends while scopes inside of it are open, those end first; after an
    exception all that was entered is left, innermost scope first, with ``ctx.exception`` set.

    Args:
        plug_id: the plugin's name; the states of its contexts are saved under it.
    """

    _internals: ClassVar[str] = "_channels _scopes"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods that would switch a channel off: those that leave out the base's.

        Raises:
            UsageError: if a class overrides an event that opens or closes a scope, without a call
                of ``super()``.
        """
        super().__init_subclass__(**kwargs)
        bases = {"super", *(base.__name__ for base in cls.__mro__[1:])}
        for name in sorted(_HEARD & vars(PipelineHooks).keys() & vars(cls).keys()):
            function = inspect.unwrap(vars(cls)[name])
            code = function.__code__ if inspect.isfunction(function) else None
            if code is not None and bases.isdisjoint(code.co_names + code.co_freevars):
                raise UsageError(
                    f"{cls.__name__}.{name} must call super().{name}(...): by this event "
                    "PipelineHooks enters or leaves its contexts, which would else never run. Add "
                    "the call, or hear the event in a plugin of its own."
                )

    def __init__(self, plug_id: str = "pipeline-hooks") -> None:
        super().__init__(plug_id)
        self._channels = {name: _Channel() for name in CHANNELS}
        self._scopes = Scopes()

    @staticmethod
    def from_hooks(source: Any) -> PipelineHooks:
        """Return the set of contexts that something stands for (R21).

        Args:
            source: ``None`` (an empty set); a ``PipelineHooks`` (itself); a table ``{"type": name,
                ...}``, built by the registry of plugins with the rest as arguments; a class or a
                function without arguments that gives one; or an iterable of these, which gives a
                new set of all their contexts.

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

    def register(self, channel: str, hook: HookContext) -> HookHandle:
        """Add a context to a channel; returns a handle whose ``remove`` takes it back.

        The same object counts once in a channel, at its first place (R17). Each call has its own
        handle, and the context stays until the last of them was removed. In a scope that is open
        nothing changes: a context is entered from the next beginning on, and one that was entered
        is left, also if it was removed in between.

        Raises:
            ArgumentError: for a channel that does not exist (R18), and a context that overrides
                neither ``on_enter`` nor ``on_exit``, or only one of ``state_dict`` and
                ``load_state_dict``.
            ArgumentTypeError: for something that is no ``HookContext``, and for methods that take
                other arguments than the context, or are async or generators.
        """
        place = self._find(channel)
        if not isinstance(hook, HookContext):
            raise ArgumentTypeError(
                f"PipelineHooks.register(hook=...) must be a HookContext object, got {hook!r}. "
                "Wrap functions by HookContext.from_callable(before=..., after=...)."
            )
        check_parts(hook)
        keeps_state(hook)  # raises
        return HookHandle([(place, place.add(hook))])

    def contexts(self, channel: str) -> list[HookContext]:
        """Return the contexts of a channel, in their order.

        Raises:
            ArgumentError: for a channel that does not exist.
        """
        return [entry.hook for entry in self._find(channel).entries]

    def unregister_all(self) -> None:
        """Take all contexts out of all channels; handles of before do nothing any more (R19)."""
        for channel in self._channels.values():
            channel.clear()

    def extend(self, other: PipelineHooks) -> HookHandle:
        """Add the contexts that another set holds now, channel by channel (R20).

        Returns:
            One handle for all of them.

        Raises:
            ArgumentTypeError: for something that is no ``PipelineHooks``.
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
        """Return a new set with the contexts of both, under the id of the first (R20)."""
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
        """Give the contexts back their states; warn of any that is left over or missing."""
        left, missing = dict(state_dict), []
        for name, hook in self._with_state():
            if name in left:
                hook.load_state_dict(left.pop(name))
            else:
                missing.append(name)
        is_inference = self._context is not None and self._context.phase is not Phase.TRAINING
        if (left or missing) and not is_inference:
            _LOGGER.warning(
                "The contexts of plugin %r are not those of the checkpoint. States without a "
                "context: %s. Contexts that begin without their state: %s. Register the same ones "
                "in the same order, before the run starts.",
                self.plug_id,
                ", ".join(left) or "none",
                ", ".join(missing) or "none",
            )

    def _with_state(self) -> list[tuple[str, HookContext]]:
        found: dict[int, tuple[str, HookContext]] = {}
        for name, channel in self._channels.items():
            for entry in channel.entries:
                if keeps_state(entry.hook):
                    found.setdefault(id(entry.hook), (f"{name}.{entry.number}", entry.hook))
        return list(found.values())

    def _begin(self, channel: str, noun: str, *, is_resumed: bool = False) -> None:
        hooks = self._channels[channel].live()
        self._scopes.begin((channel, noun), self.context, hooks, is_resumed=is_resumed)

    def _end(self, channel: str, noun: str) -> None:
        self._scopes.end((channel, noun))

    def on_checkpoint_loaded(self) -> None:
        """Know that the loop was begun in another process."""
        self._scopes.is_run_resumed = True

    def on_sanity_check_start(self) -> None:
        """Begin the loop before the trial, so that its batches lie in it too (R1, R4)."""
        self._begin("on_loop", "training")

    def on_training_start(self) -> None:
        """Begin the loop, unless a trial has begun it."""
        if not self._scopes:
            self._begin("on_loop", "training", is_resumed=self._scopes.is_run_resumed)

    def on_training_resume(self, state: TrainingState) -> None:
        """Go on in an epoch: its named event is not told again (DESIGN section 7)."""
        if self.context.is_in_epoch:
            self._begin("on_epoch", "training", is_resumed=True)

    def on_training_batch_start(self, state: TrainingState) -> None:
        """Begin the batch; and a step where a window goes on that another epoch has begun."""
        if ("on_step", "training") not in self._scopes:
            self._begin("on_step", "training")
        self._begin("on_batch", "training")

    def on_validation_start(self, validation_cycle: int) -> None:
        """Begin the loop of a validation that is a run of its own."""
        if not self._scopes:
            self._begin("on_loop", "validation")

    on_validation_end = _closes("on_loop", "validation")
    on_training_end = _closes("on_loop", "training")
    on_testing_start = _opens("on_loop", "testing")
    on_testing_end = _closes("on_loop", "testing")
    on_predicting_start = _opens("on_loop", "predicting")
    on_predicting_end = _closes("on_loop", "predicting")
    on_training_epoch_start = _opens("on_epoch", "training")
    on_training_epoch_end = _closes("on_epoch", "training")
    on_training_step_start = _opens("on_step", "training")
    on_training_step_end = _closes("on_step", "training")
    on_training_batch_end = _closes("on_batch", "training")
    on_validation_batch_start = _opens("on_batch", "validation")
    on_validation_batch_end = _closes("on_batch", "validation")
    on_testing_batch_start = _opens("on_batch", "testing")
    on_testing_batch_end = _closes("on_batch", "testing")
    on_predicting_batch_start = _opens("on_batch", "predicting")
    on_predicting_batch_end = _closes("on_batch", "predicting")
    on_forward_start = _opens("on_model_forward")
    on_forward_end = _closes("on_model_forward")
    on_backward_start = _opens("on_model_backward")
    on_backward_end = _closes("on_model_backward")
    on_optimizer_step_start = _opens("on_optimizer_step")
    on_optimizer_step_end = _closes("on_optimizer_step")

    def on_exception(self, exception: BaseException) -> None:
        """Leave all that was entered; the exception goes on by itself (R14, R16)."""
        if self._scopes:
            self.context.exception = exception
            self._scopes.unwind(exception=exception)

    def on_fit_end(self) -> None:
        """Leave what an interruption has left open: the ends of its scopes are not told."""
        self._scopes.unwind()

    def teardown(self) -> None:
        """Leave what is still open, and be ready for another run."""
        self._scopes.is_run_resumed = False
        self._scopes.unwind()


def _build(table: Mapping[str, Any]) -> Any:
    arguments = dict(table)
    if "type" not in arguments:
        raise ArgumentError(
            f"PipelineHooks.from_hooks(...) must get tables with a 'type', got {arguments!r}. Name "
            "a registered class there, e.g. {'type': 'PipelineHooks'}."
        )
    return create_plugin(arguments.pop("type"), **arguments)


def _as_hooks(made: Any, source: Any) -> PipelineHooks:
    if not isinstance(made, PipelineHooks):
        raise ArgumentTypeError(
            "PipelineHooks.from_hooks(...) must get None, PipelineHooks, a table with a type, a "
            f"class or function that gives PipelineHooks, or an iterable of these, got {source!r}. "
            "Register single contexts by register(channel, hook)."
        )
    return made
