"""Selects the attributes of an object that count as state beside its ``state_dict``, by type.

The samples of a data set are not read; any other large member of it, or of a collate function, is a
cache or an open file.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, final

import numpy as np
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.generators import is_generator
from helios.core.utils import unsaved_of
from helios.core.wrappers import class_of
from helios.state_graph.scanning import is_dense
from helios.state_graph.values import ATOMS, attributes_of, each_in, elements_of
from helios.text import size_text

OF_MODULES = frozenset(vars(nn.Module())) | {
    *("_compiled_call_impl", "_flat_weights", "_flat_weight_refs"),
    *("_load_hook", "_initialize_hook"),
    *("_fsdp_use_orig_params", "_is_fsdp_managed_module"),
}
"""Attributes of modules that torch handles itself: of all, recurrent, lazy and sharded modules."""

_OF_FSDP = "__composable_api_state_key_"
"""How the names of further ones begin, of sharded modules."""

_OF_OTHERS: dict[type, frozenset[str]] = {
    Optimizer: frozenset(
        (
            *("param_groups", "state", "_opt_called"),
            *("_optimizer_load_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"),
            *("_optimizer_state_dict_post_hooks", "_optimizer_state_dict_pre_hooks"),
            *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
            *("_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"),
            *("_params", "_numel_cache"),
        )
    ),
    LRScheduler: frozenset(("optimizer", "_schedulers")),
    GradScaler: frozenset(
        (
            *("_backoff_factor", "_device", "_enabled", "_growth_factor", "_growth_interval"),
            *("_growth_tracker", "_init_growth_tracker", "_init_scale", "_per_optimizer_states"),
            "_scale",
        )
    ),
}
"""The same for optimizers (LBFGS has two more), schedulers and scalers."""

_WRAPPERS = ("torch._dynamo", "torch.fx", "torch.jit", "torch.nn.parallel", "torch.distributed")
"""Modules of torch that wrap modules, and whose own attributes are not state."""


def may_hold_more(module: nn.Module) -> bool:
    """Return whether a module may hold state beside its ``state_dict``."""
    return not class_of(module).__module__.startswith(_WRAPPERS)


def left_out(part: object) -> list[tuple[str, Any]]:
    """Return the attributes of an object with a state that its ``state_dict`` may leave out."""
    if isinstance(part, nn.Module):
        return _left_out_of_module(part)
    table = attributes_of(part)
    known = next((keys for kind, keys in _OF_OTHERS.items() if isinstance(part, kind)), frozenset())
    return [(key, table[key]) for key in sorted(table.keys() - known)]


def _left_out_of_module(module: nn.Module) -> list[tuple[str, Any]]:
    table = vars(module)
    parameters, buffers = table["_parameters"], table["_buffers"]
    hidden = table["_non_persistent_buffers_set"]
    own = [key for key in sorted(table.keys() - OF_MODULES) if not key.startswith(_OF_FSDP)]
    if any(name.endswith(("_orig", "_v")) for name in parameters):
        # Pruning and the older norms compute this weight from saved ones.
        own = [key for key in own if not {f"{key}_orig", f"{key}_v"} & parameters.keys()]
    values = [(key, table[key]) for key in own]
    return [*((key, buffers[key]) for key in sorted(hidden & buffers.keys())), *values]


_HOUSE = (
    *("helios.trainer", "helios.startup", "helios.session", "helios.hooks", "helios.loops"),
    *("helios.engines", "helios.replicas", "helios.launch", "helios.plugins", "helios.checkpoint"),
    *(
        "helios.data",
        "helios.state_graph",
        "helios.terminal.root_logger",
        "helios.terminal.progress",
    ),
    *("helios.storage.tensorboard_writer", "helios.sharding"),
)


def is_of_the_house(value: object) -> bool:
    """Return whether a value is part of Helios, such as the trainer that an owner refers to."""
    return any(base.__module__.startswith(_HOUSE) for base in type(value).__mro__)


_SMALL = 1 << 16
"""Maximum bytes of a member that is compared."""

_GROWN = (
    f"an attribute of a data set that has changed and grown beyond {size_text(_SMALL)}: keep it in "
    "the data module, or declare it in the class of the data set: unsaved = (...,)"
)

PLAIN = (*ATOMS, list, tuple, dict, set, frozenset, deque, np.ndarray, np.generic, Tensor)


def large_members(part: object) -> frozenset[str]:
    """Return the attributes that hold data."""
    return frozenset(name for name, value in attributes_of(part).items() if is_large(value))


def is_large(value: Any) -> bool:
    """Return whether a value takes more than 64 KiB, without reading all of it, or is sparse."""
    left = _SMALL
    for part in each_in(value, elements_of):
        if isinstance(part, Tensor) and not is_dense(part):
            return True
        left -= part.nbytes if isinstance(part, Tensor | np.ndarray) else sys.getsizeof(part, 0)
        if left < 0:
            return True
    return False


def generators_in(part: object) -> list[str]:
    """Return the attributes of an object that hold a generator and are not declared unsaved."""
    return sorted(
        name
        for name, value in attributes_of(part).items()
        if type(value) not in ATOMS and is_generator(value) and name not in unsaved_of(part)
    )


@final
class OversizedMembers:
    """Records which members checkpoints have held, and reports those that have grown too large."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, paths: Iterable[str]) -> None:
        """Record that training has changed the members that contain these paths."""
        self._known |= {path.partition(".")[0] for path in paths}

    def losses(self, large: Iterable[str]) -> dict[str, str]:
        """Return what checkpoints no longer hold, with the reason."""
        return dict.fromkeys(sorted(self._known.intersection(large)), _GROWN)
