"""Finds the values that refer to others by name, to link them again once those were replaced.

A ``load_state_dict`` may replace a tensor, a list or a dict that somebody else holds as well. What
``setup`` made of references is therefore made again after everything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from helios.state.walk import PARTS
from helios.storage.codes import TAG

Links: TypeAlias = Mapping[str, Mapping[Any, Any]]
"""Links of values, by holder and key."""


def links_in(codes: Links) -> dict[str, dict[Any, Any]]:
    """Return the codes with references to what has another name."""
    found: dict[str, dict[Any, Any]] = {}
    for name, table in codes.items():
        for key, code in table.items():
            if key != PARTS and type(code) in (dict, list, tuple) and any(_references(code)):
                found.setdefault(name, {})[key] = code
    return found


def severed(links: Links, codes: Links, saved: Links) -> dict[str, dict[Any, Any]]:
    """Return the links that are no longer as they were.

    Args:
        links: as they were, from :func:`links_in`.
        codes: of everything now.
        saved: of what is restored in any case.
    """
    found: dict[str, dict[Any, Any]] = {}
    for name, table in links.items():
        now = codes.get(name, {})
        for key, code in table.items():
            if key not in now or key in saved.get(name, {}):
                continue
            if not {*_references(code)} <= {*_references(now[key])}:
                found.setdefault(name, {})[key] = code
    return found


def names_in(code: Any) -> set[str]:
    """Return the names to which a code refers."""
    return {name for _, name in _references(code)}


def _references(code: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the references in a code, each with its place."""
    if type(code) in (list, tuple):
        for number, each in enumerate(code):
            yield from _references(each, (*place, number))
    elif type(code) is dict:
        if code.get(TAG) == "ref":
            yield place, code["name"]
        elif TAG in code and isinstance(code.get("of"), str):
            yield place, code["of"]
        else:
            for key, each in code.items():
                yield from _references(each, (*place, key))
