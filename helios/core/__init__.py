"""Randomness, registries and the helpers that scripts import.

Nothing in this package depends on a model, a data set or a loop.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helios.core.exports import *
else:
    from helios.deferred import defer

    __getattr__, __dir__ = defer(__name__)

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
