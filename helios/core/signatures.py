"""Signatures of callables that users write."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 14):
    import annotationlib


def read_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable, whatever its annotations name.

    Since Python 3.14, ``inspect.signature`` evaluates annotations, which fails for a name that is
    imported for type checkers only.
    """
    if sys.version_info >= (3, 14):
        form = annotationlib.Format.FORWARDREF
        return inspect.signature(function, annotation_format=form)
    return inspect.signature(function)
