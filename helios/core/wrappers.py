"""Modules around modules: what lies inside, and names as they are without them.

``torch.compile`` and data parallelism put their own module around one, which adds a part to every
name. Names of a state have no such part, so that what one way of training saves, another loads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, overload

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from helios.protocols import Stateful

COMPILED = "_orig_mod"
"""Where ``torch.compile`` keeps the module that it wraps."""

_PARALLEL = "module"
_WRAPPERS = (DataParallel, DistributedDataParallel)


def inside(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps; ``None`` for what is no wrapper."""
    if isinstance(module, _WRAPPERS):
        return module.module  # type: ignore[no-any-return]
    children = vars(module).get("_modules", {})
    # That of a script is no dict.
    return (children if isinstance(children, dict) else _children(module)).get(COMPILED)


@overload
def unwrap(value: nn.Module) -> nn.Module: ...


@overload
def unwrap(value: object) -> object: ...


def unwrap(value: object) -> object:
    """Return the module inside all wrappers around it; anything else as it is."""
    while isinstance(value, nn.Module) and (inner := inside(value)) is not None:
        value = inner
    return value


def _children(module: nn.Module) -> dict[str, nn.Module]:
    # named_children() tells each module once only, a shared one under its first name.
    children = vars(module).get("_modules", {})
    return {name: child for name, child in children.items() if child is not None}


def _prefixes(module: nn.Module, name: str = "", bare: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name of each submodule, with a dot at its end, as it is and without wrappers."""
    yield name, bare
    is_wrapper = inside(module) is not None
    for key, child in _children(module).items():
        yield from _prefixes(child, f"{name}{key}.", bare if is_wrapper else f"{bare}{key}.")


def bare_state_dict(part: Stateful) -> dict[str, Any]:
    """Return the state of an object, that of a module under names without wrappers."""
    state = part.state_dict()
    return BareNames(part).strip(state) if isinstance(part, nn.Module) else state


class BareNames:
    """Translates the names inside a module: of submodules, parameters, buffers and of its state.

    Args:
        module: the module, with or without wrappers around it and inside.
        parts: its submodules, if they are known already.

    Example:
        >>> names = BareNames(nn.Sequential(DataParallel(nn.Linear(1, 1))))
        >>> names.of("0.module.weight")
        '0.weight'
        >>> names.of("0.module")
        '0'
    """

    def __init__(self, module: nn.Module, parts: Iterable[nn.Module] | None = None) -> None:
        parts = module.modules() if parts is None else parts
        has_wrapper = any(inside(part) is not None for part in parts)
        self._table = dict(_prefixes(module)) if has_wrapper else {}

    def of(self, name: str) -> str:
        """Return a name as it is without wrappers."""
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
        """Return a state under bare names; its kind and its versions stay as they are."""
        if not self._table:
            return state
        stripped = type(state)((self.of(name), value) for name, value in state.items())
        versions = vars(state).get("_metadata") if type(state) is not dict else None
        if versions is not None:
            vars(stripped)["_metadata"] = {self.of(key): value for key, value in versions.items()}
        return stripped


def clean_names(names: Collection[str]) -> dict[str, str]:
    """Return the bare name for each name of a stored state, whose module is not there.

    A part of data parallelism is only taken away where it is that of all names: a layer may be
    called so. Where two names would become one, all stay as they are.

    Example:
        >>> clean_names(["_orig_mod.module.layer.weight"])
        {'_orig_mod.module.layer.weight': 'layer.weight'}
    """
    bare = {name: _without(name, (COMPILED,)) for name in names}
    if all(name.startswith(f"{_PARALLEL}.") for name in bare.values()):
        bare = {name: short.removeprefix(f"{_PARALLEL}.") for name, short in bare.items()}
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}


def match_names(stored: Collection[str], present: Collection[str]) -> dict[str, str]:
    """Return the present name for each stored one that differs from it by wrappers alone.

    Args:
        stored: names of a state, written with wrappers that need not be there any more.
        present: bare names of what is there.

    Returns:
        A name for each stored one: its own where that is a present name, or where none fits.

    Example:
        >>> match_names(["module.0.weight"], ["0.weight"])
        {'module.0.weight': '0.weight'}
    """
    known = set(present)
    free = [name for name in present if name not in set(stored)]
    cores = {_without(name, (COMPILED, _PARALLEL)): name for name in free}
    foreign = [name for name in stored if name not in known]
    wanted = [_without(name, (COMPILED, _PARALLEL)) for name in foreign]
    # Names that wrappers alone tell apart fit none.
    is_clear = len(cores) == len(free) and len(set(wanted)) == len(wanted)
    found = {name: cores.get(core, name) for name, core in zip(foreign, wanted, strict=True)}
    return {name: found[name] if is_clear and name in found else name for name in stored}


def _without(name: str, parts: Collection[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)
