"""Randomness, registries and the helpers that scripts import.

Nothing in this package depends on a model, a data set or a loop.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from helios.core import cuda, rng
from helios.core.environment import get_env_info_str
from helios.core.registry import Registry, update_all_registries
from helios.core.utils import (
    AverageTimer,
    ChdirContext,
    convert_to_list,
    get_from_optional,
    safe_torch_load,
)

if TYPE_CHECKING:
    from helios.core import distributed, logging
else:

    def __getattr__(name: str) -> ModuleType:
        """Import the published paths of modules that import this package themselves."""
        if name in ("distributed", "logging"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AverageTimer",
    "ChdirContext",
    "Registry",
    "convert_to_list",
    "cuda",
    "distributed",
    "get_env_info_str",
    "get_from_optional",
    "logging",
    "rng",
    "safe_torch_load",
    "update_all_registries",
]
