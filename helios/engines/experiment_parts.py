"""Builds the parts of an experiment in one order, and packs their state into one dict.

The names in a state do not depend on the engine, so any engine can unpack it.
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
    """Return a model, or a dict of models, as it was built, and prepared for training.

    Raises:
        ArgumentError: if it is neither a module nor a dict of modules.
    """
    if make is None:
        return None, None
    made = make()
    members = made.values() if isinstance(made, dict) else [made]
    if not all(isinstance(member, nn.Module) for member in members):
        raise ArgumentError(
            "init_components(model_fn=...) must return a module or a dict of modules, got "
            f"{made!r}. Return the model to train."
        )
    if isinstance(made, dict):
        return made, {name: prepare(member) for name, member in made.items()}
    return made, prepare(made)


def pack(
    parts: Mapping[str, Any], extra: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the states of parts by their keys, with anything else to save.

    Args:
        parts: by name, objects or dicts of objects with a state; ``None`` is skipped.
        extra: is added unchanged.
        own: what the engine adds.

    Raises:
        ArgumentError: if a part has no state, or a name is taken.
    """
    packed = {key: _state_of(key, part) for key, part in _flatten(parts)} | dict(own)
    taken = sorted(packed.keys() & extra.keys())
    if taken:
        raise ArgumentError(
            f"pack_checkpoint({taken[0]}=...) must have another name, because a part already uses "
            "this one. Rename it."
        )
    return {**packed, **extra}


def unpack(parts: Mapping[str, Any], checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Load the states of parts.

    Args:
        parts: by name, objects or dicts of objects; ``None`` is skipped.
        checkpoint: what :func:`pack` has returned.
        strict: raise an error for a missing state, and then load nothing, instead of a warning.

    Raises:
        StateError: if ``strict`` and a state is missing.
    """
    found = list(_flatten(parts))
    missing = [key for key, _ in found if key not in checkpoint]
    if missing:
        text = f"The checkpoint has no {', '.join(missing)} (only {', '.join(checkpoint)})."
        if strict:
            raise StateError(f"{text} Omit those parts, or pass strict=False.")
        _LOGGER.warning("%s Those parts are not changed.", text)
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
            f"{part!r}. Omit it."
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
    """Write a checkpoint so that a crash leaves either the old file or the new one, complete.

    Raises:
        StateError: if a value could not be loaded again; the message names it.
        OSError: what the file system raises.
    """
    tree = codec.encode(dict(checkpoint), where="checkpoint")
    files.make_folder(path.parent)
    partial = files.temporary_path(path)
    try:
        with files.create(partial) as handle:
            codec.write(handle, tree)
            files.fsync(handle)
        files.replace(partial, path)
    except BaseException:
        files.unlink(partial, missing_ok=True)
        raise
    files.fsync_folder(path.parent)
