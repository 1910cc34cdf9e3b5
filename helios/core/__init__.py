"""Randomness, registries and the helpers that scripts import.

Nothing in this package depends on a model, a data set or a loop.
"""

from helios.core import cuda, distributed, logging, rng
from helios.core.moved import install_moved_modules
from helios.core.registry import Registry, update_all_registries
from helios.core.utils import (
    AverageTimer,
    ChdirContext,
    convert_to_list,
    get_env_info_str,
    get_from_optional,
    safe_torch_load,
)

install_moved_modules()

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
