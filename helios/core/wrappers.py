"""Removes wrapper modules (``torch.compile``, data parallelism) and their parts of names.

A wrapper adds a part such as ``module.`` to every name in a ``state_dict``. Helios saves states
under names without these parts, so that a run with another wrapper, or none, can load them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from helios.core.utils import Stateful, parameters_of

COMPILED = "_orig_mod"
"""Where ``torch.compile`` keeps the module that it wraps."""

_PARALLEL = "module"
_FSDP = "torch.distributed.fsdp"
_WRAPPERS = (DataParallel, DistributedDataParallel)


def inside(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps; ``None`` if ``module`` is not a wrapper."""
    if isinstance(module, _WRAPPERS):
        return module.module  # type: ignore[no-any-return]
    children = vars(module).get("_modules", {})
    # A ScriptModule's ``_modules`` is not a dict.
    return (children if isinstance(children, dict) else _children(module)).get(COMPILED)


def compiled_call(module: nn.Module) -> Any:
    """Return what runs in place of the forward of a module after ``module.compile()``."""
    return vars(module).get("_compiled_call_impl")


def class_of(module: nn.Module) -> type:
    """Return the class of a module as the user knows it; FSDP gives it a derived one."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith(_FSDP))


def unwrap(value: Any) -> Any:
    """Return the module inside all wrappers; anything else unchanged."""
    while isinstance(value, nn.Module) and (inner := inside(value)) is not None:
        value = inner
    return value


def _children(module: nn.Module) -> dict[str, nn.Module]:
    # named_children() yields a shared module only once, under its first name.
    children = vars(module).get("_modules", {})
    return {name: child for name, child in children.items() if child is not None}


def _prefixes(module: nn.Module, name: str = "", bare: str = "") -> Iterator[tuple[str, str]]:
    """Yield each submodule's name and its bare name, both with a trailing dot."""
    yield name, bare
    is_wrapper = inside(module) is not None
    for key, child in _children(module).items():
        yield from _prefixes(child, f"{name}{key}.", bare if is_wrapper else f"{bare}{key}.")


def bare_state_dict(part: Stateful) -> dict[str, Any]:
    """Return the state of an object; the names in that of a module have no wrappers."""
    state = part.state_dict()
    return BareNames(part).strip(state) if isinstance(part, nn.Module) else state


class BareNames:
    """Translates names of submodules, parameters, buffers and state entries to bare names.

    Args:
        module: the module; it and its submodules may be wrapped.
        parts: its submodules, if the caller has them already.

    Example:
        >>> names = BareNames(nn.Sequential(DataParallel(nn.Linear(1, 1))))
        >>> names.of("0.module.weight")
        '0.weight'
        >>> names.of("0.module")
        '0'
    """

    def __init__(self, module: nn.Module, parts: Iterable[nn.Module] | None = None) -> None:
        parts = module.modules() if parts is None else parts
        holders = (part for part in parts if vars(part).get("_modules"))
        self.has_wrappers = any(inside(part) is not None for part in holders)
        self._table = dict(_prefixes(module)) if self.has_wrappers else {}

    def of(self, name: str) -> str:
        """Return a name without the parts that wrappers add."""
        if not self._table:
            return name
        if f"{name}." in self._table:
            return self._table[f"{name}."].removesuffix(".")
        end = len(name)
        while end > 0:
            end = name.rfind(".", 0, end) + 1
            if name[:end] in self._table:
                return self._table[name[:end]] + name[end:]
            end -= 1
        return name

    def strip(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state under bare names; keeps its type and its version metadata."""
        if not self._table:
            return state
        stripped = type(state)((self.of(name), value) for name, value in state.items())
        versions = vars(state).get("_metadata") if type(state) is not dict else None
        if versions is not None:
            vars(stripped)["_metadata"] = {self.of(key): value for key, value in versions.items()}
        return stripped


def name_parameters(
    networks: dict[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[Tensor, tuple[str, str]]:
    """Return the path of the network of each parameter, and its bare name in it.

    A parameter of an optimizer that is in no network gets the optimizer's path, and its number.
    """
    names = {
        parameter: (path, str(number))
        for path, optimizer in optimizers.items()
        for number, parameter in enumerate(parameters_of(optimizer))
    }
    # The first network that holds a parameter names it.
    for path, network in reversed(networks.items()):
        bare = BareNames(network)
        names |= {part: (path, bare.of(name)) for name, part in network.named_parameters()}
    return names


def clean_names(names: Collection[str]) -> dict[str, str]:
    """Return the bare name for each name of a stored state whose module is not available.

    The prefix ``module.`` is removed only if all names have it, because a layer may be called
    ``module``. If two names would become equal, all names stay as they are.

    Example:
        >>> clean_names(["_orig_mod.module.layer.weight"])
        {'_orig_mod.module.layer.weight': 'layer.weight'}
    """
    bare = {name: ".".join(part for part in name.split(".") if part != COMPILED) for name in names}
    if all(name.startswith(f"{_PARALLEL}.") for name in bare.values()):
        bare = {name: short.removeprefix(f"{_PARALLEL}.") for name, short in bare.items()}
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}
