"""The bus: the receivers of every event, found once, so that unused events cost nothing.

``emit`` calls all receivers, ``ask`` returns True if any of them does, and ``transform`` passes a
batch through the one plugin that processes it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from helios.core.utils import read_signature
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.events import EVENTS, Event, Receiver, Verb, find_after_base, is_silent, may_ask

_LOGGER = logging.getLogger(__name__)
_WHATEVER = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}

_Form: TypeAlias = tuple[int, tuple[str, ...]] | None
"""How many arguments of an event a method takes by position, and the names of those that it takes
by name; ``None`` if it takes all of them by position."""


@runtime_checkable
class HasId(Protocol):
    """An object with an id, such as a plugin."""

    @property
    def plug_id(self) -> str:
        """The id."""
        ...


def owner_name(owner: object) -> str:
    """Return the name of a receiver for messages."""
    kind = type(owner).__name__
    return f"plugin {owner.plug_id!r} ({kind})" if isinstance(owner, HasId) else kind


def overridden(owner: object, event: Event) -> Callable[..., Any] | None:
    """Return the method with which an object receives an event, or ``None`` if it does not.

    If that method is the empty one of a base class, the next definition after it counts: that of a
    mixin, or what ``__getattr__`` of the class returns.
    """
    method: Callable[..., Any] | None = getattr(owner, event.name, None)
    if method is None or not is_silent(method):
        return method
    return find_after_base(owner, event.name) or _find_dynamically(owner, event.name)


def _find_dynamically(owner: object, name: str) -> Callable[..., Any] | None:
    find = getattr(type(owner), "__getattr__", None)
    try:
        method: Callable[..., Any] | None = None if find is None else find(owner, name)
    except AttributeError:
        return None
    return None if method is None or is_silent(method) else method


def signature_of(name: str, method: object, *, may_yield: bool = False) -> inspect.Signature:
    """Return the signature of a method, and check that a call runs its body.

    Args:
        name: name of the method in messages.
        method: the method.
        may_yield: whether it may be a generator, which another object runs.

    Raises:
        ArgumentTypeError: if it is not callable, or if a call would only create a coroutine or a
            generator.
    """
    if not callable(method):
        raise ArgumentTypeError(f"{name} must be a method, got {method!r}. Define it with def.")
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    if is_async or (inspect.isgeneratorfunction(method) and not may_yield):
        word, kind = ("async", "async") if is_async else ("yield", "a generator")
        raise ArgumentTypeError(
            f"{name} must be a plain method, but is {kind}: a call would not run its body. Write "
            f"it without {word}."
        )
    return read_signature(method)


def check_call(
    name: str, method: object, parameters: Sequence[str], *, may_yield: bool = False
) -> None:
    """Check that a method takes arguments by position, and that a call runs its body.

    Args:
        name: name of the method in messages.
        method: the method.
        parameters: names of the arguments.
        may_yield: as in :func:`signature_of`.

    Raises:
        ArgumentTypeError: if it does not.
    """
    signature = signature_of(name, method, may_yield=may_yield)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} must take ({', '.join(parameters)}), but takes {signature}. Correct the "
            "parameters of the method."
        ) from error


def _caller(owner: object, method: Callable[..., Any], event: Event) -> Callable[..., Any]:
    """Return the method as a callable that takes the event's arguments by position.

    Raises:
        ArgumentTypeError: as :func:`_find_form`.
    """
    form = _find_form(owner, method, event)
    if form is None:
        return method
    count, names = form
    if not names:
        return lambda *args: method(*args[:count])
    everything = event.parameters + event.optional
    by_name = [(name, everything.index(name)) for name in names]
    # An optional argument is not always passed.
    return lambda *args: method(
        *args[:count], **{name: args[place] for name, place in by_name if place < len(args)}
    )


def _find_form(owner: object, method: Callable[..., Any], event: Event) -> _Form:
    """Return how a method takes the arguments of an event.

    Raises:
        ArgumentTypeError: if the parameters of the method differ from those of the event, or if a
            call would not run its body.
    """
    place = f"{type(owner).__name__}.{event.name}"
    signature = signature_of(place, method, may_yield=event.name == "train_step")
    everything = event.parameters + event.optional
    for names in (event.parameters, event.required):
        in_place = _count_in_place(signature, names, everything)
        if in_place is None:
            continue
        if event.optional and _takes_by_name(signature, event.optional):
            whole = names + event.optional
            in_place_whole = _count_in_place(signature, whole, everything)
            if in_place_whole is not None:
                # By position come those that nothing left out stands before.
                most = len(whole if names == event.parameters else names)
                names, in_place = whole, min(in_place_whole, most)
        return None if in_place == len(everything) else (in_place, names[in_place:])
    raise _make_parameter_error(place, signature, event)


def _make_parameter_error(
    place: str, signature: inspect.Signature, event: Event
) -> ArgumentTypeError:
    may = [f"may leave out {', '.join(event.omittable)}"] if event.omittable else []
    may += [f"may take {', '.join(event.optional)}"] if event.optional else []
    wanted = ", ".join([f"({', '.join(event.parameters)})", *may])
    remedy = "Correct the parameters of the method."
    everything = event.parameters + event.optional
    if any(
        _count_in_place(signature, names + event.optional, everything) is not None
        for names in (event.parameters, event.required)
    ):
        defaults = ", ".join(f"{name}=0" for name in event.optional)
        remedy = f"They are not always passed; give them a default: {defaults}."
    return ArgumentTypeError(f"{place} must take {wanted}, but takes {signature}. {remedy}")


def _takes_by_name(signature: inspect.Signature, names: tuple[str, ...]) -> bool:
    """Whether a method takes arguments by their names, or any keyword arguments."""
    found = signature.parameters
    takes_all = {parameter.kind for parameter in found.values()} & _WHATEVER
    return bool(takes_all) or all(name in found for name in names)


def _count_in_place(
    signature: inspect.Signature, names: tuple[str, ...], everything: tuple[str, ...]
) -> int | None:
    """Return how many arguments to pass by position, as many as possible; ``None`` if none fit.

    Args:
        signature: that of the method.
        names: the arguments that are passed.
        everything: all arguments of the event, for none of which another one must be taken.
    """
    reserved = {*everything} & signature.parameters.keys()
    for count in reversed(range(len(names) + 1)):
        pairs = list(zip(names[:count], signature.parameters, strict=False))
        is_mixed_up = any(name != found and {name, found} & reserved for name, found in pairs)
        if not is_mixed_up and _accepts(signature, names[:count], names[count:]):
            return count
    return None


def _accepts(
    signature: inspect.Signature, in_place: tuple[str, ...], by_name: tuple[str, ...]
) -> bool:
    """Whether a call binds."""
    try:
        signature.bind(*in_place, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


class Bus:
    """The receivers of one run.

    Args:
        plugins: in order of registration.
        monitors: those of them that receive end events after the model.
        data: the data module.
        model: the model.
        engine: the engine.

    Attributes:
        active: the events that have receivers, each with its first one. Code that runs in every
            iteration looks here first, to avoid a call for an event without receivers.
        asking: the events in which a receiver may request a checkpoint, the end or a skip, or
            change the losses.
        is_logging: whether numbers are being logged, so that a receiver must not log any.

    Raises:
        ArgumentTypeError: for a method whose parameters are not those of its event, or that is
            async or a generator.
        ArgumentError: if two plugins process the same batch.
    """

    def __init__(
        self,
        *,
        plugins: Sequence[object] = (),
        monitors: Sequence[object] = (),
        data: object = None,
        model: object = None,
        engine: object = None,
    ) -> None:
        groups: dict[Receiver, Sequence[object]] = {
            Receiver.PLUGIN: plugins,
            Receiver.DATA: (data,),
            Receiver.MODEL: (model,),
            Receiver.ENGINE: (engine,),
            Receiver.MONITOR: monitors,
        }
        check_owners(plugins)
        self._owners: dict[str, tuple[object, ...]] = {}
        self._receivers: dict[str, tuple[Callable[..., Any], ...]] = {}
        asking = set()
        for event in EVENTS.values():
            owners = _find_owners(event, groups)
            if any(may_ask(method) for _, method in owners):
                asking.add(event.name)
            self._owners[event.name] = tuple(owner for owner, _ in owners)
            self._receivers[event.name] = tuple(
                _caller(owner, method, event) for owner, method in owners
            )
        self.active = {event: found[0] for event, found in self._receivers.items() if found}
        self.asking = asking
        self.is_logging = False

    def names_of_receivers(self, event: str) -> list[str]:
        """Return the names of an event's receivers, in the order of the calls."""
        return [owner_name(owner) for owner in self._owners[event]]

    def find(self, event: str) -> Callable[..., Any] | None:
        """Return what calls all receivers of an event; ``None`` if it has none."""
        has_several = len(self._receivers[event]) > 1
        return partial(self.emit, event) if has_several else self.active.get(event)

    def emit(self, event: str, *args: Any) -> None:
        """Call all receivers of an event."""
        for receiver in self._receivers[event]:
            receiver(*args)

    def emit_to_all(self, event: str, *args: Any) -> None:
        """Call all receivers of an event, even if one of them raises; log what is raised.

        Used for the teardown: an error in one receiver must not keep the others from running.
        """
        for owner, receiver in zip(self._owners[event], self._receivers[event], strict=True):
            try:
                receiver(*args)
            except Exception:
                _LOGGER.exception("%s failed in %s.", event, owner_name(owner))

    def ask(self, event: str) -> bool:
        """Ask all receivers of an event; returns True if any of them does."""
        says_yes = False
        for receiver in self._receivers[event]:
            says_yes |= bool(receiver())
        return says_yes

    def call(self, event: str, *args: Any) -> Any:
        """Call the owner of an event; returns what it returns."""
        (receiver,) = self._receivers[event]
        return receiver(*args)

    def transform(self, event: str, batch: Any, *args: Any) -> Any:
        """Pass a batch through the owner of an event, if it has one.

        Raises:
            UsageError: if it returns nothing.
        """
        for receiver in self._receivers[event]:
            mapped = receiver(batch, *args)
            if mapped is None and batch is not None:
                owner = self._owners[event][0]
                raise UsageError(
                    f"{event} of {owner_name(owner)} must return the batch, got None. Write return "
                    "batch at its end."
                )
            batch = mapped
        return batch


def check_receiver(plugin: object) -> None:
    """Check the methods of a plugin when it is registered.

    Raises:
        ArgumentTypeError: for a method whose parameters are not those of its event, or that is
            async or a generator.
    """
    for event in EVENTS.values():
        method = overridden(plugin, event)
        if Receiver.PLUGIN in event.receivers and method is not None:
            _caller(plugin, method, event)


def check_owners(plugins: Sequence[object]) -> None:
    """Check that at most one plugin processes each batch.

    Raises:
        ArgumentError: if two plugins override the same ``process_*_batch``.
    """
    for event in EVENTS.values():
        if event.verb is Verb.TRANSFORM:
            owners = [owner_name(p) for p in plugins if overridden(p, event) is not None]
            if len(owners) > 1:
                raise ArgumentError(
                    f"{event.name} must have one owner, but {' and '.join(owners)} override it. "
                    "Remove one of them, or let one call the other."
                )


def _find_owners(
    event: Event, groups: dict[Receiver, Sequence[object]]
) -> list[tuple[object, Callable[..., Any]]]:
    if event.verb is Verb.CALL and event.name in ("setup", "prepare_data"):
        return []
    found = []
    late = groups[Receiver.MONITOR] if Receiver.MONITOR in event.receivers else ()
    for group in event.receivers:
        for owner in groups[group]:
            if group is Receiver.PLUGIN and any(owner is monitor for monitor in late):
                continue
            method = overridden(owner, event)
            if method is not None:
                found.append((owner, method))
    return found
