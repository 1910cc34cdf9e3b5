"""A warm start: the weights of a checkpoint, without its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from helios.checkpoint.store import load_checkpoint
from helios.errors import ArgumentTypeError, StateError
from helios.model.model import Model


def load_weights(path: str | Path, model: Model | nn.Module) -> None:
    """Load the weights of a checkpoint, without counters, optimizers and random number generators.

    Args:
        path: a checkpoint of Helios.
        model: a model whose networks are built (e.g. at the end of ``setup``), or one network; the
            checkpoint must then hold exactly one with the same parameter names.

    Raises:
        CheckpointError: if the file cannot be used.
        StateError: if no network of the checkpoint matches, or several do.
        ArgumentTypeError: if ``model`` is neither a model nor a network.
    """
    types = model.types_for_safe_load() if isinstance(model, Model) else []
    state = load_checkpoint(path, safe_types=types)["model"]
    if isinstance(model, Model):
        model.load_state_dict(state, fast_init=True)
    elif isinstance(model, nn.Module):
        model.load_state_dict(_find_fitting(state, model, path))
    else:
        raise ArgumentTypeError(
            f"load_weights(model=...) must be a Model or an nn.Module, got {model!r}."
        )


def _find_fitting(state: Mapping[str, Any], network: nn.Module, path: str | Path) -> Any:
    names = set(network.state_dict())
    objects: Mapping[str, Any] = state.get("objects", state)
    fitting = [
        name
        for name, saved in objects.items()
        if isinstance(saved, Mapping) and set(saved) == names
    ]
    if len(fitting) != 1:
        raise StateError(
            f"load_weights({str(path)!r}, ...) must find one network with these parameter names, "
            f"found {fitting or 'none'} among {sorted(objects)}. Pass the whole Model instead."
        )
    return objects[fitting[0]]
