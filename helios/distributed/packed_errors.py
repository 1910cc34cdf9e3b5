"""Packs an error for another process of the same job, which raises it again."""

from __future__ import annotations

import pickle
from typing import Any


class _Parts:
    """The parts of an error whose own pickling does not restore it.

    ``pickle`` calls the class with ``args``, which often differ from the constructor's parameters.

    Args:
        error: the error.
    """

    def __init__(self, error: BaseException) -> None:
        kind = type(error)
        args = error.args if _can_travel(error.args) else (str(error),)
        attributes = {name: part for name, part in vars(error).items() if _can_travel(part)}
        self._parts = (kind, args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._parts


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def _can_travel(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def pack_error(error: BaseException) -> bytes | None:
    """Pickle an error for ``pickle.loads``, part by part if its own pickling does not restore it.

    Returns:
        The bytes; None if the class cannot be pickled. Attributes that cannot be pickled are left
        out.
    """
    for make in (lambda: error, lambda: _Parts(error)):
        try:
            data = pickle.dumps(make())
            again = pickle.loads(data)
            if type(again) is type(error) and str(again) == str(error):
                return data
        except Exception:
            continue
    return None
