"""What experiments are made of: building it in one order, and packing its state into one dict.

A state has no trace of the engine in its names, so what one engine has packed, another unpacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from helios.core.wrappers import BareNames
from helios.errors import ArgumentError, StateError
from helios.protocols import Stateful
from helios.storage import codec, files

_LOGGER = logging.getLogger(__name__)

PARTS = ("model", "criterion", "optimizer", "scheduler")

Maker = Callable[..., Any] | None


def build_model(make: Maker, prepare: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any]:
    """Return a model, or a dict of models, as it was made, and prepared for training (E17).

    Raises:
        ArgumentError: if it is none of both.
    """
    if make is None:
        return None, None
    made = make()
    members = made.values() if isinstance(made, dict) else [made]
    if not all(isinstance(member, nn.Module) for member in members):
        raise ArgumentError(
            "init_components(model_fn=...) must return a module or a dict of modules, got "
            f"{made!r}. Return what is to be trained."
        )
    if isinstance(made, dict):
        return made, {name: prepare(member) for name, member in made.items()}
    return made, prepare(made)


def pack(
    parts: Mapping[str, Any], extra: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the states of parts by their keys, and what else is to be saved (E33).

    Args:
        parts: by name, objects or dicts of objects with a state; ``None`` is left out (E34).
        extra: is taken over as it is.
        own: what the engine adds.

    Raises:
        ArgumentError: for a part without a state, and for a name that is taken.
    """
    packed = {key: _state_of(key, part) for key, part in _flatten(parts)} | dict(own)
    taken = sorted(packed.keys() & extra.keys())
    if taken:
        raise ArgumentError(
            f"pack_checkpoint({taken[0]}=...) must have a name of its own, which is taken already. "
            "Rename it."
        )
    return {**packed, **extra}


def unpack(parts: Mapping[str, Any], checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Give parts the states that are there for them (E35).

    Args:
        parts: by name, objects or dicts of objects; ``None`` is left out.
        checkpoint: what :func:`pack` has returned.
        strict: whether a missing state is an error, not a warning; then nothing is loaded.

    Raises:
        StateError: for a missing state, if ``strict``.
    """
    found = list(_flatten(parts))
    missing = [key for key, _ in found if key not in checkpoint]
    if missing:
        text = f"The checkpoint holds no {', '.join(missing)} (only {', '.join(checkpoint)})."
        if strict:
            raise StateError(f"{text} Leave those parts out, or pass strict=False.")
        _LOGGER.warning("%s Those parts stay as they are.", text)
    for key, part in found:
        if key in checkpoint:
            _load_state(part, checkpoint[key])


def _flatten(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key of each state and the object that has it."""
    for name, part in parts.items():
        if isinstance(part, dict):
            yield from ((f"{name}_{key}_state_dict", member) for key, member in part.items())
        elif part is not None:
            yield f"{name}_state_dict", part


def _state_of(key: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, Stateful):
        name = key.removesuffix("_state_dict")
        raise ArgumentError(
            f"pack_checkpoint({name}=...) must have state_dict() and load_state_dict(), got "
            f"{part!r}. Leave it out."
        )
    state = part.state_dict()
    return BareNames(part).strip(state) if isinstance(part, nn.Module) else state


def _load_state(part: Any, state: dict[str, Any]) -> None:
    if not isinstance(part, nn.Module):
        part.load_state_dict(state)
        return
    names = BareNames(part)
    bare = names.strip(state)
    present = {names.of(name): name for name in part.state_dict()}
    part.load_state_dict({present.get(name, name): value for name, value in bare.items()})


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old file or the new one, whole (E37).

    Raises:
        StateError: for a value that could not be loaded again; it is named.
        OSError: what the file system raises.
    """
    tree = codec.encode(dict(checkpoint), where="checkpoint")
    files.make_folder(path.parent)
    with files.replacing(path) as partial:
        codec.write_file(partial, tree)
