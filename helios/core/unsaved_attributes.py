"""The attributes that users' data sets and samplers declare as not to be saved."""

from __future__ import annotations

from typing import Any

from helios.errors import ArgumentTypeError


def unsaved_of(part: object) -> tuple[str, ...]:
    """Return the names in the class attribute ``unsaved`` of a data set or sampler.

    An ``unsaved`` that is not a tuple or list of strings is ignored: the class uses the name for
    something else.

    Raises:
        ArgumentTypeError: if it is a single string, which lacks the comma of a tuple.
    """
    declared: Any = getattr(type(part), "unsaved", ())
    if isinstance(declared, str):
        raise ArgumentTypeError(
            f"{type(part).__name__}.unsaved must be a tuple of names, got the string "
            f'{declared!r}. Write unsaved = ("{declared}",) with a comma.'
        )
    is_of_names = isinstance(declared, tuple | list) and all(isinstance(n, str) for n in declared)
    return tuple(declared) if is_of_names else ()
