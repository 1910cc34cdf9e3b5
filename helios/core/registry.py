"""Registries: names for classes and functions, so that text can choose what is built.

A registry maps the name of an object to the object itself; importing the module that registers
it is what fills the map, and :func:`update_all_registries` imports a whole package for that.
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
    """Objects by name (API section 15).

    Args:
        name: what the registry holds; stands in its messages, and is its ``str()``.

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
        """Add an object under its ``__name__``; works as a decorator.

        Args:
            obj: a class or a function.
            suffix: when given, the name becomes ``<name>_<suffix>``.

        Returns:
            The object itself.

        Raises:
            AssertionError: when the name is taken.
        """
        key = _make_key(obj.__name__, suffix)
        if key in self._objects:
            raise AssertionError(
                f"Registry {self._name!r} must hold each name once, and {key!r} is taken by "
                f"{self._objects[key]!r}; rename the object or pass a suffix."
            )
        self._objects[key] = obj
        return obj

    def get(self, name: str, suffix: str | None = None) -> Any:
        """Return the object of this name.

        Args:
            name: the name that it was registered under.
            suffix: where ``name`` itself is not known, ``<name>_<suffix>`` is looked up.

        Raises:
            KeyError: when there is none; the message lists the known names.
        """
        for key in (name, _make_key(name, suffix)):
            if key in self._objects:
                return self._objects[key]
        known = ", ".join(sorted(self._objects)) or "nothing"
        raise KeyError(
            f"Registry {self._name!r} must hold what is asked for, and holds no {key!r} but "
            f"{known}; import the module that registers it."
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
    """Import each module of a package that registers something, so that its registries are full.

    A module counts when one of its lines starts with ``@<name>.register``. The folder that holds
    the package must be on ``sys.path``. Modules are imported in the order of their names.

    Args:
        root: folder of the package.
        recurse: look into its sub-packages too (folders with an ``__init__.py``).
        import_prefix: dotted name of the package that ``root`` lies in; empty when ``root`` is
            imported by its own name.

    Raises:
        UsageError: when ``root`` is no folder, or no package (a ``RuntimeError``).
    """
    package = root.resolve()
    if not _is_package(package):
        rule = "hold an __init__.py" if package.is_dir() else "be a folder"
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
