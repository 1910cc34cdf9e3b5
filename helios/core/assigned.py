"""``assigned``: attributes that are set after their object is made; until then, they say so."""

from __future__ import annotations

import inspect
from typing import Any

from helios.errors import UsageError


class _Unassigned:
    """Stands in the class for an attribute that the object does not have yet, and would hide it.

    A property would do the same, but every iteration reads such attributes a dozen times.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, owner: object, kind: type) -> Any:
        if owner is None:
            return self
        raise UsageError(self._text.format(kind=kind.__name__))


class _Reserved(_Unassigned):
    """Keeps users from assigning it; the trainer does so in the attributes of the object."""

    def __init__(self, text: str, refusal: str) -> None:
        super().__init__(text)
        self._refusal = refusal

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: object, kind: type) -> Any:
        found = vars(owner) if owner is not None else {}
        return found[self._name] if self._name in found else super().__get__(owner, kind)

    def __set__(self, owner: object, value: object) -> None:
        raise UsageError(self._refusal.format(kind=type(owner).__name__))


def is_assigned_later(kind: type, name: str) -> bool:
    """Whether a class has the placeholder of an attribute, and not an attribute of the user's."""
    return isinstance(inspect.getattr_static(kind, name, None), _Unassigned)


def assigned(text: str, *, refusal: str = "") -> Any:
    """Return the placeholder of an attribute, for the class that declares it.

    Args:
        text: the ``UsageError`` of reading it before it is set, with ``{kind}`` for the class.
        refusal: that of assigning it, which then only the trainer does (``vars(owner)[name] =
            ...``); by default anybody may.
    """
    return _Reserved(text, refusal) if refusal else _Unassigned(text)
