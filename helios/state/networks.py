"""The content of networks, and the parts that their ``state_dict`` leaves out."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from helios.core.memory import storage_of
from helios.core.sharded_tensors import cut_like
from helios.core.wrappers import BareNames, bare_state_dict, class_of
from helios.errors import StateError
from helios.storage.plain_objects import attributes_of, by_class, table_of


class NamedTensor(NamedTuple):
    """A parameter or a buffer, and where it is registered."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor


@final
class Network:
    """The parts of a network as it is now, under their bare names."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        bare = BareNames(module, (part for _, part in named))
        self.modules = [(bare.of(name), part) for name, part in named]

    @cached_property
    def tensors(self) -> list[NamedTensor]:
        """All parameters and persistent buffers, those of each submodule once."""
        found: list[NamedTensor] = []
        for place, part in self.modules:
            prefix, held = f"{place}." if place else "", vars(part)
            # Modules that torch.nn did not build, such as compiled scripts, may have no table.
            buffers = held.get("_buffers")
            hidden = held.get("_non_persistent_buffers_set", ())
            own = [*_parameters_of(part).items()]
            if isinstance(buffers, dict):
                own += [(key, each) for key, each in buffers.items() if key not in hidden]
            found += [
                NamedTensor(f"{prefix}{key}", part, key, tensor)
                for key, tensor in own
                if isinstance(tensor, Tensor)
            ]
        return found


def _parameters_of(part: nn.Module) -> dict[str, Any]:
    """Return the table of a module's own parameters."""
    held = vars(part).get("_parameters")
    # Compiled scripts have none.
    return held if isinstance(held, dict) else dict(part.named_parameters(recurse=False))


# ---- attributes beside the state_dict

_SAMPLE = nn.Module()
_OF_SHARDED = ("_fsdp_use_orig_params", "_is_fsdp_managed_module", "__composable_api_state_key_")
"""How the names of attributes begin that ``fully_shard`` gives to modules."""


@cache
def _of_modules() -> frozenset[str]:
    """Return the attributes that torch itself makes in modules, also in recurrent ones."""
    held = {key for key, value in vars(nn.Module).items() if not callable(value)}
    held |= {key for key in vars(nn.RNN(1, 1, device="meta")) if key.startswith("_")}
    return frozenset(held | vars(_SAMPLE).keys())


@cache
def _of_others() -> dict[type, frozenset[str]]:
    """Return the attributes that torch itself makes in other objects with a state."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    return {
        Optimizer: frozenset(vars(optimizer)) - {"defaults"},
        LRScheduler: frozenset(("optimizer",)),
        GradScaler: frozenset(vars(GradScaler("cpu"))),
    }


@cache
def hook_tables_of_optimizers() -> tuple[str, ...]:
    """Return the names of the tables in which an optimizer keeps its hooks."""
    found = vars(torch.optim.SGD([torch.zeros(1)])).items()
    return tuple(key for key, table in found if isinstance(table, OrderedDict))


_WRAPPERS = ("torch._dynamo", "torch.fx", "torch.jit", "torch.nn.parallel", "torch.distributed")
_INTERNAL = (
    *("helios.trainer", "helios.start", "helios.run_parts", "helios.run_state"),
    *("helios.hooks", "helios.loops"),
    *("helios.engines", "helios.replicas", "helios.launch", "helios.plugins", "helios.checkpoint"),
    *("helios.data", "helios.state", "helios.terminal.root_logger"),
    *("helios.terminal.progress", "helios.storage.tensorboard_writer", "helios.sharding"),
)


@by_class
def is_internal_class(kind: Any) -> bool:
    """Return whether values of a class are parts of Helios that owners may refer to."""
    return any(base.__module__.startswith(_INTERNAL) for base in kind.__mro__)


def left_out(part: object) -> list[tuple[str, Any]]:
    """Return the attributes of an object with a state that its ``state_dict`` may leave out."""
    if not isinstance(part, nn.Module):
        table = attributes_of(part)
        known = (names for kind, names in _of_others().items() if isinstance(part, kind))
        return [(key, table[key]) for key in sorted(table.keys() - next(known, frozenset()))]
    table = vars(part)
    own = _own_keys(class_of(part), tuple(table), tuple(table.get("_parameters", ())))
    found = [(key, table[key]) for key in own if type(table[key]) is not RemovableHandle]
    if hidden := table.get("_non_persistent_buffers_set"):
        buffers = table["_buffers"]
        found = [*((key, buffers[key]) for key in sorted(hidden & buffers.keys())), *found]
    return found


@lru_cache(maxsize=4096)
def _own_keys(kind: type, keys: tuple[str, ...], parameters: tuple[str, ...]) -> list[str]:
    """Return which attributes of a module are the user's, of those with these keys."""
    if kind.__module__.startswith(_WRAPPERS):
        return []
    # Pruning and the older norms compute a weight from saved ones.
    computed = {name.removesuffix("_orig").removesuffix("_v") for name in parameters} - {
        *parameters
    }
    own = {*keys} - _of_modules() - computed
    return sorted(key for key in own if not key.startswith(_OF_SHARDED))


_HOOKS = tuple(key for key in vars(_SAMPLE) if "_hooks" in key)
_HOOKS_OF_TENSORS = tuple(name for name in dir(Tensor) if name.endswith("_hooks"))


def hooks_of(part: Any) -> dict[str, list[Callable[..., Any]]]:
    """Return the hooks of user code on a module, an optimizer or a tensor, by table."""
    if isinstance(part, Tensor):
        found = {name: getattr(part, name) for name in _HOOKS_OF_TENSORS}
    else:
        table = table_of(part)
        of_optimizer = hook_tables_of_optimizers() if isinstance(part, Optimizer) else ()
        names = _HOOKS if isinstance(part, nn.Module) else of_optimizer
        found = {name: table[name] for name in names if table.get(name)}
    own = {
        name: [hook for hook in hooks.values() if callable(hook) and not is_known(hook)]
        for name, hooks in found.items()
        if hooks
    }
    return {name: hooks for name, hooks in own.items() if hooks}


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks, also of torch and Helios."""
    return any(getattr(tensor, name) for name in _HOOKS_OF_TENSORS)


def is_known(hook: Callable[..., Any]) -> bool:
    """Return whether a hook or a method belongs to torch or Helios."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.startswith(("helios.", "torch."))


def method_of(part: object, name: str) -> Any:
    """Return the method that a call would use: that of the object itself, or of its class."""
    return vars(part).get(name) or getattr(type(part), name)


def is_odd_optimizer(optimizer: Optimizer) -> bool:
    """Return whether user code overrides the ``state_dict`` of an optimizer."""
    tables = (name for name in hook_tables_of_optimizers() if "_state_dict_post" in name)
    hooks = [hook for name in tables for hook in vars(optimizer).get(name, {}).values()]
    own = [hook for hook in hooks if not is_known(hook)]
    return bool(own) or not is_known(method_of(optimizer, "state_dict"))


# ---- state_dict of networks


def load_network(module: nn.Module, state: dict[str, Any]) -> None:
    """Load the state of a network under bare names; no part of it is kept."""
    bare = BareNames(module)
    names = {bare.of(name): name for name in module.state_dict()}
    saved = dict(getattr(state, "_metadata", {}))
    versions = {
        name: saved[bare.of(name)] for name, _ in module.named_modules() if bare.of(name) in saved
    }
    # What user code leaves out of the state is saved beside it.
    options = {"strict": False} if is_odd(Network(module)) else {}
    if not is_known(method_of(module, "load_state_dict")):
        options = {}
    if options and (differing := sorted(names.keys() ^ state.keys())):
        raise StateError(f"either it or the state has no parts {', '.join(differing)}.")

    def load(entries: dict[str, Any]) -> None:
        tree = OrderedDict(entries)
        if versions:
            vars(tree)["_metadata"] = OrderedDict(versions)
        module.load_state_dict(tree, **options)

    entries = {
        names.get(name, name): part if isinstance(part, Tensor) else copy.deepcopy(part)
        for name, part in state.items()
    }
    load(entries)
    if _places(module.state_dict()) & _places(entries):
        # A module that keeps tensors instead of copying them, as metrics do.
        load(copy.deepcopy(entries))


def _places(entries: Mapping[str, Any]) -> set[int]:
    return {storage_of(part) for part in entries.values() if isinstance(part, Tensor)} - {0}


def is_odd(network: Network) -> bool:
    """Return whether user code overrides the ``state_dict`` of a network."""
    names = ("state_dict", "_save_to_state_dict")
    kinds = {type(part) for _, part in network.modules}
    writers = [getattr(kind, name) for kind in kinds for name in names]
    for _, part in network.modules:
        table = vars(part)
        writers += filter(None, map(table.get, names))
        writers += table.get("_state_dict_hooks", {}).values()
    return not all(map(is_known, writers))


def pieces_of(network: Network) -> dict[str, Tensor]:
    """Return parameters and persistent buffers that have memory, by name."""
    return {name: tensor for name, _, _, tensor in network.tensors if not is_lazy(tensor)}


def size_of(tensor: Tensor) -> int:
    """Return the bytes of all elements."""
    # Sparse ones have no ``nbytes``.
    return tensor.numel() * tensor.element_size()


def fill(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Give a tensor saved elements, in place."""
    saved = cut_like(saved, tensor)
    if saved.shape != tensor.shape:
        raise StateError(
            f"{name} was saved with the shape {tuple(saved.shape)}, but has {tuple(tensor.shape)} "
            "now. Build it in setup() as it was when the state was saved."
        )
    with torch.no_grad():
        tensor.detach().copy_(saved)


# ---- flags and gradients


def _modules_in(anchors: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules, also wrappers, which have the name of what they wrap."""
    for path, module in anchors.of_kind(nn.Module, with_inner=True).items():
        for name, part in anchors.network(module).modules:
            yield f"{path}.{name}" if name else path, part


def leaves_of(anchors: Any) -> dict[str, Tensor]:
    """Return the tensors that may have a gradient and are saved without it."""
    named = {n: p for n, p in anchors.parts.items() if isinstance(p, nn.Parameter)}
    return named | {n: p for n, p in anchors.loose.items() if p.is_leaf}


def flags_of(anchors: Any) -> dict[str, bool]:
    """Return which tensors require gradients, and which modules are in training mode."""
    flags = {name: part.training for name, part in _modules_in(anchors)}
    return flags | {name: part.requires_grad for name, part in leaves_of(anchors).items()}


def load_flags(flags: Mapping[str, bool], anchors: Any) -> None:
    """Freeze and unfreeze parameters and set modes as recorded."""
    for name, part in _modules_in(anchors):
        part.training = flags.get(name, part.training)
    for name, is_trained in flags.items():
        part = anchors.find(name)
        if isinstance(part, Tensor) and part.requires_grad is not is_trained:
            part.requires_grad_(is_trained)


def grads_of(anchors: Any) -> dict[str, Tensor]:
    """Return the gradients of an open window, if there are any."""
    leaves = {**anchors.leaves, **leaves_of(anchors)}
    return {name: each.grad for name, each in leaves.items() if each.grad is not None}


def load_grads(grads: Mapping[str, Tensor], anchors: Any) -> None:
    """Set gradients as recorded; other parameters get none."""
    saved = {id(anchors.leaves.get(n, anchors.find(n))): grad for n, grad in grads.items()}
    for tensor in {**anchors.leaves, **leaves_of(anchors)}.values():
        grad = saved.get(id(tensor))
        tensor.grad = None if grad is None else grad.detach().to(tensor.device, copy=True)


def state_of(value: Any) -> dict[str, Any]:
    """Return the state of an object; of a module under bare names.

    PyTorch's ``state_dict`` of a scheduler has every attribute: only plain ones are left in it.
    """
    state = bare_state_dict(value)
    if isinstance(value, LRScheduler) and type(value).state_dict.__module__.startswith("torch."):
        table = vars(value)
        state = {k: v for k, v in state.items() if table.get(k) is not v or is_simple(v)}
    return state


def is_simple(value: Any) -> bool:
    """Return whether a value consists of tensors and of values without members."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_simple, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | str | int | float | complex | type(None))


def name_buffers(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all persistent buffers by name, those of a network under its path.

    A network may save other values than it holds: these count.
    """
    found = {}
    for path, module in networks.items():
        state = bare_state_dict(module)
        for place, part in Network(module).modules:
            prefix = f"{place}." if place else ""
            # Compiled scripts say of no buffer that it is not saved.
            hidden = vars(part).get("_non_persistent_buffers_set", ())
            for key, buffer in part.named_buffers(recurse=False):
                if key not in hidden:
                    found[f"{path}.{prefix}{key}"] = state.get(prefix + key, buffer)
    return found


def name_weights(
    networks: Mapping[str, nn.Module], loose: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all parameters by name, those of a network under its path."""
    found = dict(loose)
    for path, module in networks.items():
        # Each once, under the first of its names.
        seen: set[int] = set()
        for name, part, key, tensor in Network(module).tensors:
            if id(tensor) not in seen and key in _parameters_of(part):
                seen.add(id(tensor))
                found[f"{path}.{name}"] = tensor
    return found
