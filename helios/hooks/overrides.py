"""Checks what users override in loops and engines, before anything calls it.

A name that is almost one of ours is never called, and parameters that do not fit fail in the middle
of a run.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection, Sequence
from types import FunctionType

from helios.core.utils import read_signature
from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.bus import check_call

_LOGGER = logging.getLogger(__name__)
_OURS = ("helios", "torch")
# Called with all that they take, also with what has a default.
_CALLED_IN_FULL = "backward_loss"


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
        receives: the events that it may receive.

    Raises:
        ArgumentError: for a method that is not to be overridden, and for one of ``state_dict`` and
            ``load_state_dict`` without the other.
        ArgumentTypeError: for a method that does not take the arguments of the one that it
            overrides, or that must be a property.
    """
    known = [*(name for name in dir(base) if not name.startswith("_")), *receives]
    for name in _written(owner):
        overridden = inspect.getattr_static(base, name, None)
        if overridden is not None:
            _check_kind(f"{type(owner).__name__}.{name}", name, overridden)
        if isinstance(overridden, FunctionType):
            _, *parameters = read_signature(overridden).parameters.values()
            # What a base takes by *args does not say what is passed.
            if all(each.kind is not each.VAR_POSITIONAL for each in parameters):
                is_full = name == _CALLED_IN_FULL
                wanted = [
                    each.name
                    for each in parameters
                    if each.kind is not each.KEYWORD_ONLY
                    and (is_full or each.default is each.empty)
                ]
                may_yield = inspect.isgeneratorfunction(overridden)
                check_arguments(owner, (name,), wanted, may_yield=may_yield)
        elif overridden is None and name not in receives and not name.startswith("_"):
            _warn_of_typo(f"{type(owner).__name__}.{name}", name, known)


def _check_kind(place: str, name: str, overridden: object) -> None:
    """Refuse methods of the user's in the place of what is none, or of what only Helios calls.

    Raises:
        ArgumentError: for a method that is not to be overridden.
        ArgumentTypeError: for one that must be a property.
    """
    if isinstance(overridden, property):
        raise ArgumentTypeError(
            f"{place} must be a property, got a method, which always counts as true. Write "
            "@property above it."
        )
    if not callable(overridden) and not isinstance(overridden, classmethod | staticmethod):
        raise ArgumentTypeError(
            f"{place} must be an attribute, got a method. Assign a value, or rename the method."
        )
    if name.startswith("_") or inspect.getattr_static(overridden, "__final__", False):
        raise ArgumentError(
            f"{place} must have another name: Helios has a method of this name that it calls by "
            "itself, and that is not to be overridden. Rename it."
        )


def check_state_methods(
    owner: object, base: type, *, remedy: str = "Add the other one.", may_show: bool = False
) -> bool:
    """Return whether a class of the user's saves state by methods of its own.

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


def _warn_of_typo(place: str, name: str, known: Sequence[str]) -> None:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if close:
        _LOGGER.warning(
            "%s is never called by Helios; did you mean %s? If it is a helper of your own, begin "
            "its name with an underscore.",
            place,
            close[0],
        )


def check_arguments(
    owner: object, names: Sequence[str], arguments: Sequence[str], *, may_yield: bool = False
) -> None:
    """Check that methods that a user has written take what is passed to them.

    Args:
        owner: the object.
        names: names of the methods.
        arguments: names of what they get, by position.
        may_yield: whether they may be generators.

    Raises:
        ArgumentTypeError: if one does not.
    """
    for name, (method, is_bound) in _written(owner).items():
        if name in names:
            first = ("self",) if is_bound else ()
            place = f"{type(owner).__name__}.{name}"
            check_call(place, method, (*first, *arguments), may_yield=may_yield)
