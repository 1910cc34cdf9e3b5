"""Reads codes: finds the values that refer to others by name, and those of users' classes.

A ``load_state_dict`` may replace a tensor, a list or a dict that somebody else holds as well. What
``setup`` made of references is therefore made again after everything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeAlias

from helios.state.values import parts_of
from helios.state.walk import PARTS
from helios.storage.codes import TAG

Links: TypeAlias = Mapping[str, Mapping[Any, Any]]
"""Links of values, by holder and key."""

_NESTED = frozenset((dict, list, tuple))


def links_in(codes: Links) -> dict[str, dict[Any, Any]]:
    """Return the codes with references to what has another name."""
    found: dict[str, dict[Any, Any]] = {}
    for name, table in codes.items():
        for key, code in table.items():
            if key != PARTS and names_in(code):
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
            if not names_in(code) <= names_in(now[key]):
                found.setdefault(name, {})[key] = code
    return found


def names_in(code: Any) -> set[str]:
    """Return the names to which a code refers, without a call for each of its members."""
    names: set[str] = set()
    level = [code]
    while level:
        tables = [each for each in level if type(each) is dict]
        names.update(name for table in tables if (name := _name_in(table)) is not None)
        lists = [each for each in level if type(each) in (list, tuple)]
        held = [*lists, *(table.values() for table in tables)]
        # Most long ones are flat.
        is_flat = _NESTED.isdisjoint(map(type, chain.from_iterable(held)))
        level = [] if is_flat else [x for x in chain.from_iterable(held) if type(x) in _NESTED]
    return names


def types_in(code: Any) -> set[str]:
    """Return the names of the classes in a code."""
    tables = (each for each in parts_of(code) if type(each) is dict)
    return {each["type"] for each in tables if each.get(TAG) in ("object", "enum", "flag", "tuple")}


def _name_in(code: dict[Any, Any]) -> str | None:
    """Return the name to which a reference, or a view of memory, refers."""
    if TAG not in code:
        return None
    name = code["name"] if code[TAG] == "ref" else code.get("of")
    return name if isinstance(name, str) else None
