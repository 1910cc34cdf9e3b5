"""What users' own classes, which know nothing of Helios, declare as not to be saved."""

from __future__ import annotations

from typing import Any

from helios.errors import ArgumentTypeError


def unsaved_of(part: object) -> tuple[str, ...]:
    """Return the names in the class attribute ``unsaved`` of a data set or sampler.

    What has that name and is no tuple or list of names belongs to the class for another purpose.

    Raises:
        ArgumentTypeError: for a single string, which lacks the comma of a tuple.
    """
    declared: Any = getattr(type(part), "unsaved", ())
    if isinstance(declared, str):
        raise ArgumentTypeError(
            f"{type(part).__name__}.unsaved must be a tuple of names, got the string "
            f'{declared!r}. Write unsaved = ("{declared}",) with a comma.'
        )
    is_of_names = isinstance(declared, tuple | list) and all(isinstance(n, str) for n in declared)
    return tuple(declared) if is_of_names else ()
