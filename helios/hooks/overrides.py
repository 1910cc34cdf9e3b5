"""Checks what users override in loops and engines, before anything calls it.

A name that is almost one of ours is never called, parameters that do not fit fail in the middle of
a run, and a method whose base does something may lose that without ``super()``.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection, Sequence
from types import FunctionType

from helios.core.signatures import read_signature
from helios.hooks.bus import check_call

_LOGGER = logging.getLogger(__name__)
_OURS = ("helios", "torch")
# Called with all that they take, also with what has a default.
_CALLED_IN_FULL = frozenset({"backward", "backward_loss", "update"})


def _written(owner: object) -> dict[str, tuple[FunctionType, bool]]:
    """Return the methods that a user has written, and whether each gets its object first."""
    found: dict[str, tuple[FunctionType, bool]] = {}
    own = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in _OURS]
    for members in (vars(owner), *(vars(kind) for kind in own if kind is not object)):
        for name, member in members.items():
            if isinstance(member, FunctionType) and not name.startswith("__"):
                found.setdefault(name, (member, members is not vars(owner)))
    return found


def check_overrides(
    owner: object, base: type, *, receives: Collection[str] = (), apart: Collection[str] = ()
) -> None:
    """Check the methods of a user's class against those of the base that it derives from.

    Args:
        owner: the loop or engine.
        base: the class of Helios.
        receives: the events that it may receive.
        apart: methods whose arguments are checked elsewhere.

    Raises:
        ArgumentTypeError: for a method that does not take the arguments of the one that it
            overrides.
    """
    known = [*(name for name in dir(base) if not name.startswith("_")), *receives]
    for name in _written(owner):
        overridden = inspect.getattr_static(base, name, None)
        if name in apart:
            continue
        if isinstance(overridden, FunctionType):
            _, *parameters = read_signature(overridden).parameters.values()
            # What a base takes by *args does not say what is passed.
            if all(each.kind is not each.VAR_POSITIONAL for each in parameters):
                is_full = name in _CALLED_IN_FULL
                wanted = [
                    each.name
                    for each in parameters
                    if each.kind is not each.KEYWORD_ONLY
                    and (is_full or each.default is each.empty)
                ]
                check_arguments(owner, (name,), wanted)
        elif overridden is None and name not in receives and not name.startswith("_"):
            _warn_of_typo(f"{type(owner).__name__}.{name}", name, known)


def _warn_of_typo(place: str, name: str, known: Sequence[str]) -> None:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if close:
        _LOGGER.warning(
            "%s is never called by Helios; did you mean %s? If it is a helper of your own, begin "
            "its name with an underscore.",
            place,
            close[0],
        )


def check_arguments(owner: object, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Check that methods that a user has written take what is passed to them.

    Args:
        owner: the object.
        names: names of the methods.
        arguments: names of what they get, by position.

    Raises:
        ArgumentTypeError: if one does not.
    """
    for name, (method, is_bound) in _written(owner).items():
        if name in names:
            first = ("self",) if is_bound else ()
            place = f"{type(owner).__name__}.{name}"
            check_call(place, method, (*first, *arguments))


def find_without_super(owner: object, names: Collection[str]) -> list[str]:
    """Return the methods of a user that call that of their base nowhere, as far as code shows.

    Args:
        owner: the object.
        names: the methods to look for.
    """
    return [
        name
        for name, (method, _) in _written(owner).items()
        if name in names and {"super", name}.isdisjoint(method.__code__.co_names)
    ]
