"""Calls user code: the bus, with the receivers of every event, and overrides.

The receivers are found once, so that unused events cost nothing: ``emit`` calls all of them,
``ask`` returns True if any of them does, and ``transform`` passes a batch through the one plugin
that processes it. Methods that users override in loops and engines are checked before a call,
because wrong parameters would fail in the middle of a run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from helios.core.utils import read_signature
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.events import EVENTS, Event, Receiver, Verb, is_silent, may_ask

_LOGGER = logging.getLogger(__name__)
_OURS = ("helios", "torch")
# Called with all that they take, also with what has a default.
_CALLED_IN_FULL = "backward_loss"


def owner_name(owner: object) -> str:
    """Return the name of a receiver for messages."""
    kind, plug_id = type(owner).__name__, getattr(owner, "plug_id", None)
    return kind if plug_id is None else f"plugin {plug_id!r} ({kind})"


def overridden(owner: object, event: Event) -> Callable[..., Any] | None:
    """Return the method with which an object receives an event, or ``None`` if it does not."""
    method: Callable[..., Any] | None = getattr(owner, event.name, None)
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
            f"{name} must take ({', '.join(parameters)}), but takes {signature}. Fix the "
            "parameters of the method."
        ) from error


def _caller(owner: object, method: Callable[..., Any], event: Event) -> Callable[..., Any]:
    """Return the method as a callable that takes the event's arguments by position.

    Raises:
        ArgumentTypeError: if the parameters of the method differ from those of the event, or if a
            call would not run its body.
    """
    place = f"{type(owner).__name__}.{event.name}"
    signature = signature_of(place, method, may_yield=event.name == "train_step")
    everything = event.parameters + event.optional
    for names in (everything, event.parameters, event.required + event.optional, event.required):
        places = [everything.index(name) for name in names]
        if _takes_in_place(signature, names, event):
            if names == everything:
                return method
            return lambda *args: method(*(args[n] for n in places if n < len(args)))
        if _accepts(signature, (), names, event):
            return lambda *args: method(**{everything[n]: args[n] for n in places if n < len(args)})
    may = [f"may leave out {', '.join(event.omittable)}"] if event.omittable else []
    may += [f"may take {name}=0" for name in event.optional]
    wanted = ", ".join([f"({', '.join(event.parameters)})", *may])
    raise ArgumentTypeError(
        f"{place} must take {wanted}, but takes {signature}. Fix the parameters of the method."
    )


def _takes_in_place(signature: inspect.Signature, names: tuple[str, ...], event: Event) -> bool:
    """Return whether a method takes its arguments by position, in the right order."""
    everything = event.parameters + event.optional
    for name, parameter in zip(names, signature.parameters.values(), strict=False):
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        is_other = parameter.name in everything or name in signature.parameters
        # As other trainers call it, and users would compute with it.
        is_other |= parameter.name == "batch_idx" and name == "state"
        if parameter.name != name and (is_other or name in event.optional):
            return False
    return _accepts(signature, names, (), event)


def _accepts(
    signature: inspect.Signature, in_place: tuple[str, ...], by_name: tuple[str, ...], event: Event
) -> bool:
    """Return whether a call binds, with and without the arguments that are not always passed."""
    try:
        for left_out in ((), event.optional):
            signature.bind(
                *(name for name in in_place if name not in left_out),
                **{name: None for name in by_name if name not in left_out},
            )
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
        is_logging: whether numbers are being logged, so that receivers must not log.

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
        self.asking: set[str] = set()
        for event in EVENTS.values():
            owners = _find_owners(event, groups)
            if any(may_ask(method) for _, method in owners):
                self.asking.add(event.name)
            self._owners[event.name] = tuple(owner for owner, _ in owners)
            self._receivers[event.name] = tuple(
                _caller(owner, method, event) for owner, method in owners
            )
        self.active = {event: found[0] for event, found in self._receivers.items() if found}
        self.is_logging = False

    def names_of_receivers(self, event: str) -> list[str]:
        """Return the names of an event's receivers, in the order of the calls."""
        return [owner_name(owner) for owner in self._owners[event]]

    def find(self, event: str) -> Callable[..., Any] | None:
        """Return a function that calls all receivers of an event; ``None`` if it has none."""
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


def _written(owner: object) -> dict[str, tuple[FunctionType, bool]]:
    """Return the methods that a user has written, and whether each gets its object first."""
    found: dict[str, tuple[FunctionType, bool]] = {}
    own = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in _OURS]
    for members in (vars(owner), *(vars(kind) for kind in own if kind is not object)):
        for name, member in members.items():
            if isinstance(member, FunctionType) and not name.startswith("__"):
                found.setdefault(name, (member, members is not vars(owner)))
    return found


def check_overrides(owner: object, base: type, *, receives: Collection[str] = ()) -> None:
    """Check the methods of a user's class against those of the base that it derives from.

    Args:
        owner: the loop or engine.
        base: the class of Helios.
        receives: the events that it may receive, whose arguments the bus checks.

    Raises:
        ArgumentTypeError: for a method that does not take the arguments of the one that it
            overrides, or that must be a property.
    """
    for name, (method, is_bound) in _written(owner).items():
        overridden = inspect.getattr_static(base, name, None)
        if isinstance(overridden, property):
            raise ArgumentTypeError(
                f"{type(owner).__name__}.{name} must be a property, got a method, which always "
                "counts as true. Write @property above it."
            )
        if not isinstance(overridden, FunctionType) or name in receives:
            continue
        _, *parameters = read_signature(overridden).parameters.values()
        # What a base takes by *args does not say what is passed.
        if all(each.kind is not each.VAR_POSITIONAL for each in parameters):
            wanted = [
                each.name
                for each in parameters
                if each.kind is not each.KEYWORD_ONLY
                and (name == _CALLED_IN_FULL or each.default is each.empty)
            ]
            check_call(
                f"{type(owner).__name__}.{name}",
                method,
                ["self", *wanted] if is_bound else wanted,
                may_yield=inspect.isgeneratorfunction(overridden),
            )


def check_state_methods(
    owner: object, base: type, *, remedy: str = "Add the other one.", may_show: bool = False
) -> bool:
    """Return whether a user's class saves state by its own methods.

    Args:
        owner: the object.
        base: the class of Helios whose methods it may override.
        remedy: what to do.
        may_show: whether it may have ``state_dict`` alone, for readers of the checkpoint.

    Raises:
        ArgumentError: if it overrides only one of the two methods.
    """
    kind = type(owner)
    names = ("state_dict", "load_state_dict")
    saves, loads = (getattr(kind, name) is not getattr(base, name) for name in names)
    if saves is not loads and not (saves and may_show):
        raise ArgumentError(
            f"{kind.__name__} must override both state_dict and load_state_dict or neither, "
            f"got {names[loads]} only. {remedy}"
        )
    return saves
