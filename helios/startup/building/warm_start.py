"""A warm start: the weights of a checkpoint, without its run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from helios.checkpoint import loading
from helios.checkpoint.loading import load_checkpoint
from helios.core.sharded_tensors import RowShare
from helios.errors import ArgumentTypeError, StateError, UsageError
from helios.model.model import Model
from helios.startup.options.object_checks import check_made
from helios.storage.local_paths import as_local_path


def load_weights(path: str | Path, model: Model | nn.Module) -> None:
    """Load the weights of a checkpoint, without counters, optimizers and random number generators.

    Args:
        path: a checkpoint of Helios.
        model: a model whose networks are built (e.g. at the end of ``setup``), or one network; the
            checkpoint must then hold exactly one with the same parameter names.

    Raises:
        ArgumentError: for a URL.
        CheckpointError: if the file cannot be used.
        UsageError: in a setup without values (``Trainer(init="keyed")``), for one network.
        StateError: if no network of the checkpoint matches, or several do; also if the model has
            no networks yet, as before ``setup``.
        ArgumentTypeError: if ``model`` is neither a model nor a network.
    """
    path = as_local_path("load_weights(path=...)", path)
    if isinstance(model, Model):
        check_made(model)
        if model.loads_after_setup is not None:
            # Setup builds without values.
            model.loads_after_setup.append((path.name, partial(_load_model, path, model)))
            return
        _load_model(path, model)
    elif isinstance(model, nn.Module):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UsageError(
                f"load_weights({str(path)!r}, ...) must get the Model in setup() with "
                f'Trainer(init="keyed"), got a {type(model).__name__} that has no values yet. Pass '
                "self, or call it in on_training_start if state.global_iteration is 0."
            )
        model.load_state_dict(_find_fitting(load_checkpoint(path)["model"], model, path))
    else:
        raise ArgumentTypeError(
            f"load_weights(model=...) must be a Model or an nn.Module, got {model!r}."
        )


def _load_model(path: Path, model: Model, share: RowShare | None = None) -> None:
    is_default = type(model).load_state_dict is Model.load_state_dict
    types, share = model.types_for_safe_load(), share if is_default else None
    state = loading.load(path, types, maps=share is not None, share=share).payload["model"]
    if is_default and "objects" in state:
        _require_networks(state, model, path)
    model.load_state_dict(state, fast_init=True)


def _require_networks(state: Mapping[str, Any], model: Model, path: Path) -> None:
    """Refuse a model to which nothing of the checkpoint would be loaded."""
    present = {*model.discovery.modules(), *model.discovery.moved()[0]}
    saved = {*state["objects"], *state.get("parameters", {})}
    if present & saved or not (present or saved):
        return
    kind = type(model).__name__
    if not present:
        raise StateError(
            f"load_weights({str(path)!r}, ...) must get a model whose networks are built, but "
            f"{kind} has none yet. Call it as the last line of setup(): "
            "helios.load_weights(path, self)."
        )
    raise StateError(
        f"load_weights({str(path)!r}, ...) must find a network of {kind}, {sorted(present)}, in "
        f"the checkpoint, but that holds {sorted(saved)}. Give the attributes the same names, or "
        "pass one network instead of the model."
    )


def _find_fitting(state: Mapping[str, Any], network: nn.Module, path: Path) -> Any:
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
