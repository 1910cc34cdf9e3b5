"""Names that a package imports when they are first used (PEP 562), so that it is quick to import.

A package's ``__init__`` runs before any of its modules does. If it imported PyTorch, ``helios
--help`` would wait for PyTorch, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def defer(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names ``exports`` imports.

    The first use of any name imports ``<package>.exports`` and binds all names of ``__all__``, so
    that all later uses are plain attributes.

    Args:
        package: the name of the package.
    """

    def find(name: str) -> Any:
        names = vars(sys.modules[package])
        # Probes of other libraries for special attributes must not import PyTorch.
        if not name.startswith("__"):
            found = vars(importlib.import_module(f"{package}.exports"))
            # While that module is being imported, it has only a part of the names.
            names.update({known: found[known] for known in names["__all__"] if known in found})
            if name in names:
                return names[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        names = vars(sys.modules[package])
        return sorted({*names, *names["__all__"]})

    return find, list_names
