"""Registries, which map names to classes and functions.

Importing a module registers its objects; :func:`update_all_registries` imports all modules of a
package that register something.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, KeysView
from pathlib import Path
from typing import Any, TypeVar

from helios.errors import UsageError

_Registered = TypeVar("_Registered", bound=Callable[..., Any])
_REGISTER_LINE = re.compile(r"^@.+\.register\b", re.MULTILINE)


class Registry:
    """Classes and functions by name.

    Args:
        name: what the registry contains; used in error messages and as its ``str()``.

    Example:
        >>> NETWORKS = Registry("network")
        >>> @NETWORKS.register
        ... class Tiny: ...
        >>> NETWORKS.get("Tiny") is Tiny
        True
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[str, Any] = {}

    def register(self, obj: _Registered, suffix: str | None = None) -> _Registered:
        """Add an object under its ``__name__``; usable as a decorator.

        Args:
            obj: a class or a function.
            suffix: if given, the name becomes ``<name>_<suffix>``.

        Returns:
            The object itself.

        Raises:
            AssertionError: if the name is already registered.
        """
        key = _make_key(obj.__name__, suffix)
        if key in self._objects:
            raise AssertionError(
                f"Registry {self._name!r} already contains {key!r}: {self._objects[key]!r}. Rename "
                "the object or pass a suffix."
            )
        self._objects[key] = obj
        return obj

    def get(self, name: str, suffix: str | None = None) -> Any:
        """Return the object that was registered under a name.

        Args:
            name: the name.
            suffix: if ``name`` itself is not registered, ``<name>_<suffix>`` is looked up.

        Raises:
            KeyError: if neither is registered; the message lists the known names.
        """
        for key in (name, _make_key(name, suffix)):
            if key in self._objects:
                return self._objects[key]
        known = ", ".join(sorted(self._objects)) or "nothing"
        raise KeyError(
            f"Registry {self._name!r} does not contain {key!r}, only {known}. Import the module "
            "that registers it."
        )

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._objects.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())

    def __str__(self) -> str:
        return self._name


def _make_key(name: str, suffix: str | None) -> str:
    return name if suffix is None else f"{name}_{suffix}"


def update_all_registries(root: Path, recurse: bool = True, import_prefix: str = "") -> None:
    """Import each module of a package that registers something.

    These are the modules with a line that starts with ``@<name>.register``. The folder that
    contains the package must be on ``sys.path``. Modules are imported in alphabetical order.

    Args:
        root: folder of the package.
        recurse: also search its sub-packages (folders with an ``__init__.py``).
        import_prefix: dotted name of the parent package of ``root``; empty if ``root`` is a
            top-level package.

    Raises:
        UsageError: if ``root`` is not a folder, or not a package (a ``RuntimeError``).
    """
    package = root.resolve()
    if not _is_package(package):
        rule = "contain an __init__.py" if package.is_dir() else "be a folder"
        raise UsageError(
            f"update_all_registries(root=...) must {rule}, got {root}; pass the folder of the "
            "package whose modules register classes."
        )
    dotted = f"{import_prefix}.{package.name}" if import_prefix else package.name
    for path in sorted(package.iterdir()):
        if recurse and _is_package(path):
            update_all_registries(path, recurse, dotted)
        elif path.suffix == ".py" and _REGISTER_LINE.search(path.read_text(encoding="utf-8")):
            is_init = path.stem == "__init__"
            importlib.import_module(dotted if is_init else f"{dotted}.{path.stem}")


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").is_file()
