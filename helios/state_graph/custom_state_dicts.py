"""Saves what the ``state_dict`` of a network leaves out, if its class or a hook redefines it.

Such a ``state_dict`` may leave out a frozen backbone, or return a part under another name. A tensor
counts as saved if the state contains it under the name that loading expects; if user code loads,
anywhere in the state. Anything missing that training has changed is saved separately.

What modules return from ``get_extra_state`` is neither saved twice nor missing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.core.memory import same, storage_of
from helios.core.sharded_tensors import cut_like, is_sharded
from helios.core.wrappers import BareNames
from helios.errors import StateError
from helios.state_graph.changes import Changes
from helios.state_graph.module_state import is_loaded_by_torch, method_of, state_of
from helios.state_graph.network_parts import Network
from helios.state_graph.object_names import ObjectNames
from helios.state_graph.registered_hooks import is_known
from helios.state_graph.saved_layouts import fill
from helios.state_graph.scanning import mark_of_state
from helios.state_graph.state_dict_coverage import EXTRA, parts_of
from helios.state_graph.values import Identities

_WRITERS = ("state_dict", "_save_to_state_dict")
"""Methods of a module that write its state."""


class _Piece(NamedTuple):
    """A part of a network, as its state names it.

    Attributes:
        name: the bare name.
        module: the submodule that holds it.
        value: a parameter, a persistent buffer, or what ``get_extra_state`` returns.
        is_translated: whether user code loads it, possibly under other names.
    """

    name: str
    module: nn.Module
    value: Any
    is_translated: bool


@final
class Omissions:
    """Records what the states of networks lack after setup, and finds what has changed of it.

    Args:
        identities: numbers for values that cannot be pickled.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._before: dict[str, dict[str, bytes]] = {}

    def remember(self, found: ObjectNames) -> None:
        """Record the current values as those of setup."""
        for path, module in _odd_networks(found).items():
            lacking, _ = _lacking(module, _early_state(module))
            self._before[path] = {name: self._mark(value) for name, value in lacking.items()}

    def forget(self, state: Mapping[str, Any]) -> None:
        """Treat restored values as changed: the next checkpoint needs them too."""
        for path, saved in state.items():
            for name in saved["values"]:
                self._before.get(path, {}).pop(name, None)

    def find(self, found: ObjectNames, states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return what training has changed and the states of networks lack.

        Args:
            found: what the owner holds now.
            states: what objects returned, by path.

        Returns:
            By path of the network: ``values``, what is missing by its name; ``absent`` and
            ``unknown``, the names that torch's loading will miss and will not know.
        """
        omitted: dict[str, Any] = {}
        for path, module in _odd_networks(found).items():
            lacking, names = _lacking(module, states[path])
            before = self._before.get(path, {})
            values = {
                name: value.detach() if isinstance(value, Tensor) else value
                for name, value in lacking.items()
                # A mark of shards is that of this process, and all must save the same names.
                if name not in before or is_sharded(value) or before[name] != self._mark(value)
            }
            if values or any(names.values()):
                omitted[path] = {"values": values, **names}
        return omitted

    def _mark(self, value: Any) -> bytes:
        return mark_of_state(value, self._identities)


def restore_omitted(omitted: Mapping[str, Any], found: ObjectNames) -> None:
    """Fill networks with what their states lack, after these are loaded.

    Raises:
        StateError: if a network no longer has what was saved.
    """
    for path, module in found.all_modules().items():
        values = omitted.get(path, {"values": {}})["values"]
        pieces = {piece.name: piece for piece in _pieces_of(module)} if values else {}
        for name, saved in values.items():
            if name not in pieces:
                raise StateError(
                    f"{path}.{name} was saved separately from the state_dict of {path}, which has "
                    "no such part now. Build it in setup() as it was when the state was saved."
                )
            _put(f"{path}.{name}", pieces[name], saved)


def _put(name: str, piece: _Piece, saved: Any) -> None:
    if not isinstance(piece.value, Tensor) or not isinstance(saved, Tensor):
        piece.module.set_extra_state(copy.deepcopy(saved))
        return
    fill(name, piece.value, cut_like(saved, piece.value))


def _early_state(module: nn.Module) -> dict[str, Any]:
    try:
        return state_of(module)
    except Exception:  # user code, which may need a first step
        return {}


def _odd_networks(found: ObjectNames) -> dict[str, nn.Module]:
    """Return the networks whose state the class of a part, or a hook, redefines."""
    return {
        path: module
        for path, module in found.all_modules().items()
        if _is_odd(found.networks.of(module))
    }


def _is_odd(network: Network) -> bool:
    if not all(is_known(getattr(kind, name)) for kind in network.kinds for name in _WRITERS):
        return True
    for table in [vars(part) for _, part in network.modules]:
        own = [table[name] for name in _WRITERS if name in table]
        if not all(map(is_known, (*own, *table.get("_state_dict_hooks", {}).values()))):
            return True
    return False


def _translates(part: nn.Module) -> bool:
    hooks = vars(part).get("_load_state_dict_pre_hooks", {}).values()
    own = not is_known(method_of(part, "_load_from_state_dict"))
    return own or not all(map(is_known, hooks))


def _pieces_of(module: nn.Module) -> Iterator[_Piece]:
    """Yield the parts that torch's loading expects, a shared one under each of its names."""
    bare = BareNames(module)
    translated = [""] if not is_loaded_by_torch(module) else []
    for place, part in module.named_modules(remove_duplicate=False):
        table = vars(part)
        if not isinstance(table.get("_buffers"), dict):
            # Modules that torch.nn did not build, such as compiled scripts, may have no tables.
            continue
        prefix = f"{place}." if place else ""
        if _translates(part):
            translated.append(prefix)
        is_translated = prefix.startswith(tuple(translated))
        hidden = table["_non_persistent_buffers_set"]
        buffers = {key: kept for key, kept in table["_buffers"].items() if key not in hidden}
        for key, tensor in (*table["_parameters"].items(), *buffers.items()):
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                yield _Piece(bare.of(f"{prefix}{key}"), part, tensor, is_translated)
        if has_extra_state(part):
            state = part.get_extra_state()
            yield _Piece(bare.of(f"{prefix}{EXTRA}"), part, state, is_translated)


def _lacking(
    module: nn.Module, state: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return by name what a state lacks, and the names that loading will miss or not know."""
    pieces = list(_pieces_of(module))
    held = _Held(state)
    kept = {_key(piece) for piece in pieces if held.has(piece)}
    # A shared tensor is present if it is under one of its names.
    lacking = {piece.name: piece.value for piece in pieces if _key(piece) not in kept}
    if not is_loaded_by_torch(module):
        return lacking, {"absent": [], "unknown": []}
    absent = [
        piece.name
        for piece in pieces
        if piece.name not in state and not (piece.is_translated and held.has(piece))
    ]
    unknown = sorted(state.keys() - {piece.name for piece in pieces})
    return lacking, {"absent": absent, "unknown": unknown}


def _key(piece: _Piece) -> int | str:
    return id(piece.value) if isinstance(piece.value, Tensor) else piece.name


@final
class _Held:
    """The tensors of a state, at any depth."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._sizes: Counter[int] = Counter()
        for _, part in parts_of(state):
            if isinstance(part, Tensor):
                # A slice does not contain the whole tensor that it was taken from.
                self._sizes[storage_of(part)] += part.numel()

    def has(self, piece: _Piece) -> bool:
        """Return whether loading the state restores a part."""
        part, value = self._state.get(piece.name), piece.value
        if not isinstance(value, Tensor):
            return piece.name in self._state
        if _are_one_shard(part, value) if is_sharded(value) else same(part, value):
            return True
        if not piece.is_translated:
            return False
        return bool(storage_of(value)) and self._sizes[storage_of(value)] >= value.numel()


def _are_one_shard(part: Any, value: Any) -> bool:
    """Return whether the shards of two tensors are the same memory, as all processes answer alike.

    Equality would not be alike: a process may have an empty shard, or one that has not changed.
    """
    return is_sharded(part) and bool(part.to_local().is_set_to(value.to_local()))


def extra_marks(found: ObjectNames, identities: Identities) -> dict[str, bytes]:
    """Return marks of the current extra states of modules, by the path of their attributes."""
    marks: dict[str, bytes] = {}
    for parent, module in _modules_with_extra_state(found):
        try:
            marks[parent] = mark_of_state(module.get_extra_state(), identities)
        except Exception:  # user code, which may need a first step
            marks[parent] = b""
    return marks


def leave_to_extra_states(
    changes: Changes, found: ObjectNames, before: Mapping[str, bytes], identities: Identities
) -> None:
    """Leave values that no checkpoint can hold to a module whose extra state changed with them.

    The form in which the extra state contains them is unknown. If it did not change, it does not
    contain them.

    Args:
        changes: of plain values; those that are left to a module are removed.
        found: what the owner holds now.
        before: marks of extra states after setup.
        identities: numbers for values that cannot be pickled.
    """
    lacking = {path.rpartition(".")[0] for path in (*changes.others, *changes.large)}
    if lacking.isdisjoint(before):
        return
    now = extra_marks(found, identities)
    telling = {path for path in lacking & now.keys() if now[path] != before.get(path)}
    for table in (changes.others, changes.large):
        for path in [path for path in table if path.rpartition(".")[0] in telling]:
            del table[path], changes.missing[path]


def _modules_with_extra_state(found: ObjectNames) -> Iterator[tuple[str, nn.Module]]:
    for network in found.all_modules().values():
        for _, part in found.networks.of(network).modules:
            if has_extra_state(part):
                yield found.names[id(part)], part


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has an extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
