"""Lets mkdocstrings read the docstrings of Helios: its roles, and several names in one entry."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?([^`]+)`")
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)$", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return a docstring without roles, and with an entry for each name."""

    def split(match: re.Match[str]) -> str:
        indent, names, description = match.groups()
        return "\n".join(f"{indent}{name}: {description}" for name in names.split(", "))

    return _SEVERAL.sub(split, _ROLE.sub(r"`\1`", text))


class Docstrings(Extension):
    """Rewrites each docstring when its object was read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
