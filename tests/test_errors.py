"""The tree of errors, and what users may catch them as."""

from __future__ import annotations

import inspect
import pickle
import re

from helios import errors


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
