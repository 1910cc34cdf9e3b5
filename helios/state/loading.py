"""Loads the state of one object, and says what to do where sizes differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from helios.core.wrappers import BareNames
from helios.errors import StateError
from helios.protocols import Stateful
from helios.state.networks import Network, is_odd, pieces_of, state_of
from helios.state.optimizers import load_state

_MAX_LAYERS = 3

TRAINING_ONLY = (Optimizer, LRScheduler, GradScaler)
"""Objects that weights do without, and that an evaluation may lack."""


def check_sizes(
    path: str, network: nn.Module, state: Mapping[str, Any], forms: Mapping[str, Any]
) -> None:
    """Refuse the state of a network whose tensors have other sizes, unless user code loads it.

    Args:
        path: its path.
        network: the network.
        state: its state.
        forms: what loading gives another size first, by name.

    Raises:
        StateError: naming the first of them, and what to replace for fine-tuning.
    """
    parts = Network(network)
    if is_odd(parts):
        return
    for name, tensor in pieces_of(parts).items():
        saved = state.get(name)
        is_same = not isinstance(saved, Tensor) or saved.shape == tensor.shape
        if not is_same and f"{path}.{name}" not in forms:
            raise StateError(
                f"{path} ({type(network).__name__}) rejected its saved state: size mismatch for "
                f"{name}: {tuple(state[name].shape)} was saved, and it is {tuple(tensor.shape)} "
                "now. Build it in setup() as it was when the state was saved."
                f"{_describe_replacement(path, network, state, 'self')}"
            )


def load_into(
    path: str,
    part: Stateful,
    state: dict[str, Any],
    omitted: Mapping[str, Any] | None = None,
    *,
    holder: str = "self",
) -> None:
    """Load the state of an object.

    Args:
        path: its path.
        part: the object.
        state: its state.
        omitted: see :func:`load_state`.
        holder: what weights are loaded into, in code: the owner, or the object itself.

    Raises:
        StateError: if ``load_state_dict`` fails.
    """
    try:
        load_state(part, state, omitted)
    except Exception as error:
        raise StateError(
            f"{path} ({type(part).__name__}) rejected its saved state: {error} Build it in setup() "
            f"as it was when the state was saved.{_describe_replacement(path, part, state, holder)}"
        ) from error


def _describe_replacement(path: str, part: Stateful, state: Mapping[str, Any], holder: str) -> str:
    """Return how to replace the layers whose sizes differ, for fine-tuning; empty for others."""
    if not isinstance(part, nn.Module):
        return ""
    sizes = {name: each.shape for name, each in state_of(part).items() if isinstance(each, Tensor)}
    differing = [
        name
        for name, saved in state.items()
        if isinstance(saved, Tensor) and sizes.get(name, saved.shape) != saved.shape
    ]
    bare = BareNames(part)
    found = {bare.of(name): layer for name, layer in part.named_modules(remove_duplicate=False)}
    codes: dict[str, str] = {}
    for name in differing:
        layer = name.rpartition(".")[0]
        code = _code_of(found[layer])
        # The rest of a larger network stays.
        codes |= {layer: code} if code else {name: _code_of_tensor(part, name, sizes[name])}
    if not 0 < len(codes) <= _MAX_LAYERS:
        return ""
    attribute, *keys = path.split(".")
    names = [key if key.isdigit() else f'"{key}"' for key in keys]
    whole = f"{holder}.{attribute}" if holder == "self" else holder
    whole += "".join(f"[{name}]" for name in names)
    lines = []
    for name, code in sorted(codes.items()):
        keys = name.split(".") if name else []
        place = "".join(
            f".{key}" if key.isidentifier() else f"[{key if key.isdigit() else repr(key)}]"
            for key in keys
        )
        lines.append(f"{whole}{place} = {code}")
    return (
        " To fine-tune with other sizes, in a run with another save_name, build it as it was, load "
        f"first, and replace the layer then: helios.load_weights(path, {holder}); "
        f"{'; '.join(lines)}. Create optimizers after that."
    )


def _code_of(layer: nn.Module) -> str:
    """Return code that builds a layer like this; empty for what holds others."""
    kind = type(layer).__name__
    if [*layer.children()] or isinstance(layer, nn.ParameterList | nn.ParameterDict):
        return ""
    if getattr(nn, kind, None) is not type(layer):
        return f"{kind}(...)"
    quoted = re.sub(r"=([a-z]\w*)", r'="\1"', repr(layer))
    return f"torch.nn.{quoted}"


def _code_of_tensor(part: nn.Module, name: str, size: Size) -> str:
    zeros = f"torch.zeros{tuple(size)}"
    is_parameter = name in dict(part.named_parameters(remove_duplicate=False))
    return f"torch.nn.Parameter({zeros})" if is_parameter else zeros
