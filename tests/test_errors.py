"""The tree of errors, and what users may catch them as."""

from __future__ import annotations

import inspect
import pickle
import re

from helios import errors
from helios.errors import (
    DuplicateError,
)


def test_the_message_of_a_duplicate_is_not_put_in_quotes() -> None:
    """A KeyError shows the repr of its argument, which hides line breaks and quotes."""
    assert str(DuplicateError("the id 'a' is taken")) == "the id 'a' is taken"


def test_the_drawn_tree_is_the_tree_of_the_classes() -> None:
    """STYLE section 1: drawn on top of the file, so it must not grow stale."""
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(found[1]) // 4
            del parents[depth:]
            drawn[found[2]] = parents[-1] if parents else "Exception"
            parents.append(found[2])
    written = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and issubclass(kind, Exception)
    }
    assert drawn == written
    assert "HeliosError" in drawn


def test_an_interruption_is_no_exception_that_a_script_catches_by_the_way() -> None:
    error = pickle.loads(pickle.dumps(errors.Interrupted(75, "SIGTERM was received")))
    assert not isinstance(error, Exception)
    assert (error.code, error.reason) == (75, "SIGTERM was received")


def test_the_drawn_tree_names_the_builtins() -> None:
    drawn = dict(re.findall(r"(\w+Error) \((\w+Error)\)", errors.__doc__ or ""))
    assert drawn == {
        name: kind.__bases__[1].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and len(kind.__bases__) == 2
    }
