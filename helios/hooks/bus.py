"""Who hears what: the receivers of every event, found once, so that an unheard event costs nothing.

Three verbs: ``emit`` tells all, ``ask`` is true if any says yes, ``transform`` hands a batch
through its one owner.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.events import EVENTS, Event, Receiver, Verb, is_silent

_LOGGER = logging.getLogger(__name__)


def overridden(owner: object, event: Event) -> Callable[..., Any] | None:
    """Return the method with which an object hears an event, or ``None`` if it does not."""
    method = getattr(owner, event.name, None)
    return None if method is None or is_silent(method) else method


def _caller(owner: object, method: Callable[..., Any], event: Event) -> Callable[..., Any]:
    """Return the method as something that takes the event's arguments by position.

    Raises:
        ArgumentTypeError: if the method takes other parameters than the table says.
    """
    signature = inspect.signature(method)
    names = event.parameters
    for count in reversed(range(len(names) + 1)):
        if _accepts(signature, names[:count], names[count:]):
            break
    else:
        raise ArgumentTypeError(
            f"{type(owner).__name__}.{event.name} must take ({', '.join(names)}), but takes "
            f"{signature}. Correct the parameters of the method."
        )
    if count == len(names):
        return method
    by_name = names[count:]
    return lambda *args: method(*args[:count], **dict(zip(by_name, args[count:], strict=True)))


def _accepts(
    signature: inspect.Signature, in_place: tuple[str, ...], by_name: tuple[str, ...]
) -> bool:
    """Whether a call binds, and puts no argument where another one's name stands."""
    places = {name: place for place, name in enumerate(signature.parameters)}
    if any(places.get(name, place) != place for place, name in enumerate(in_place)):
        return False
    try:
        signature.bind(*in_place, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


class Bus:
    """The receivers of one training.

    Args:
        plugins: in order of registration.
        monitors: those of them that want the end events after the model (C14).
        data: the data module.
        model: the model.
        engine: the engine.

    Raises:
        ArgumentTypeError: for a method whose parameters are not those of the table.
        ArgumentError: if two objects own the processing of one batch (H60).
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
        self._receivers = {
            event.name: tuple(self._find(event, groups)) for event in EVENTS.values()
        }

    @staticmethod
    def _find(
        event: Event, groups: dict[Receiver, Sequence[object]]
    ) -> Iterable[Callable[..., Any]]:
        heard = []
        late = groups[Receiver.MONITOR] if Receiver.MONITOR in event.receivers else ()
        for group in event.receivers:
            for owner in groups[group]:
                if group is Receiver.PLUGIN and any(owner is monitor for monitor in late):
                    continue
                method = overridden(owner, event)
                if method is not None:
                    heard.append(_caller(owner, method, event))
        if event.verb is Verb.TRANSFORM and len(heard) > 1:
            raise ArgumentError(
                f"{event.name} must have one owner, but {len(heard)} plugins override it. "
                "Remove one of them."
            )
        return heard

    def is_heard(self, event: str) -> bool:
        """Whether anybody hears an event."""
        return bool(self._receivers[event])

    def emit(self, event: str, *args: Any) -> None:
        """Tell everybody who hears the event."""
        for receiver in self._receivers[event]:
            receiver(*args)

    def emit_to_all(self, event: str, *args: Any) -> None:
        """Tell everybody who hears the event, also when one of them raises; log what is raised.

        For the ways out: an error of one must not keep the others from being torn down.
        """
        for receiver in self._receivers[event]:
            try:
                receiver(*args)
            except Exception:
                _LOGGER.exception("%s failed in %s.", event, receiver)

    def ask(self, event: str) -> bool:
        """Ask everybody who hears the event; true if any says yes."""
        receivers = self._receivers[event]
        if not receivers:
            return False
        answers = [bool(receiver()) for receiver in receivers]
        return any(answers)

    def transform(self, event: str, batch: Any, *args: Any) -> Any:
        """Hand a batch through the owner of the event, if it has one."""
        for receiver in self._receivers[event]:
            batch = receiver(batch, *args)
        return batch
