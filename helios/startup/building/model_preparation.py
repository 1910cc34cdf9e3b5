"""Prepares a model before and after its setup."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from helios.engines.engine import Engine
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.sharding.recomputation import recomputed
from helios.sharding.requirements import check_checkpointable, check_shardable
from helios.sharding.units import Unit, find_in_networks, find_units
from helios.startup.building.keyed_setup import set_up_keyed
from helios.startup.options.trainer_options import RunOptions
from helios.state_graph.consistency import check_alike

_LOGGER = logging.getLogger(__name__)


def take_own_processor(model: Model) -> None:
    """Give a model its own copy of the processor that its class sets.

    As an attribute of the instance, its state is saved. It is copied so that models of one class do
    not share state, which would be missing in the next process.

    Raises:
        ArgumentError: if it cannot be copied.
    """
    named = inspect.getattr_static(model, "batch_processor")
    if "batch_processor" in vars(model) or not isinstance(named, BatchProcessor):
        return
    try:
        model.batch_processor = copy.deepcopy(named)
    except Exception as error:
        raise ArgumentError(
            f"{type(model).__name__}.batch_processor must be copyable, because each model gets its "
            f"own, but copy.deepcopy failed: {error!r}. Assign self.batch_processor in setup() "
            "instead."
        ) from error


def build_networks(
    model: Model, engine: Engine, run: RunOptions, *, is_inference: bool
) -> AbstractContextManager[None]:
    """Call ``Model.setup``, and shard the networks if the run is sharded.

    Args:
        model: the model, whose ``shard`` names the units.
        engine: the engine of the run.
        run: says how networks get their initial values.
        is_inference: whether the run does not train.

    Returns:
        Within it, the activations of units that ask for it are computed again in backward.

    Raises:
        ArgumentTypeError: if ``Model.shard`` returns something else than units.
        UsageError: if a network or an optimizer does not allow what the run asks for.
    """
    ask_for_units = partial(_ask_for_units, model, engine, trains=not is_inference)
    if run.init == "keyed":
        seed = run.seed_of("init")
        named = set_up_keyed(model, engine, ask_for_units, seed=seed, fast_init=is_inference)
    else:
        model.setup(fast_init=is_inference)
        move_networks(model, engine.device)
        named = ask_for_units()
        if engine.replicas.is_sharded:
            _shard_networks(model, engine, named)
    return recomputed({} if is_inference else _find_checkpointed(model, named))


def move_networks(model: Model, device: torch.device) -> None:
    """Move the networks that setup has created to the device of the engine.

    Networks that are there already are not touched, and nothing is if the device is the CPU.

    Raises:
        UsageError: if moving creates new parameters, which the optimizers do not have.
    """
    if device.type == "cpu":
        return
    for path, network in model.discovery.modules().items():
        before = list(network.parameters())
        network.to(device)
        if any(old is not new for old, new in zip(before, network.parameters(), strict=True)):
            raise UsageError(
                f"The network {path!r} gets new parameters on {device}, which optimizers created "
                "before do not have. Build it there: .to(self.device) in Model.setup()."
            )


def _ask_for_units(
    model: Model, engine: Engine, *, trains: bool
) -> Sequence[nn.Module | Unit] | None:
    """Return what ``Model.shard`` returns, if the run is sharded or trains."""
    is_sharded = engine.replicas.is_sharded
    named = _call_shard(model) if is_sharded else _try_shard(model) if trains else None
    if not isinstance(named, list | None):
        raise ArgumentTypeError(
            "Model.shard() must return a list of modules or None, got "
            f"{type(named).__name__}. Return e.g. list(self.net.layers)."
        )
    return named


def _call_shard(model: Model) -> Any:
    """Return the units in a list, since an iterator is empty after its first use."""
    named: Any = model.shard()
    return [*named] if isinstance(named, Iterable) else named


def _try_shard(model: Model) -> Any:
    """Return the units of a model that is not sharded, which may be none."""
    try:
        return _call_shard(model)
    except Exception as error:
        _LOGGER.warning(
            '%s.shard() failed, so no activations are computed again: %r. With sharding="none", '
            "only Unit(..., checkpoint=True) in its result counts.",
            type(model).__name__,
            error,
        )
        return None


def _find_checkpointed(
    model: Model, named: Sequence[nn.Module | Unit] | None
) -> dict[str, nn.Module]:
    chosen = [each.module for each in named or () if isinstance(each, Unit) and each.checkpoint]
    if not chosen:
        return {}
    networks = model.discovery.modules()
    found = find_in_networks(networks, chosen)
    check_checkpointable(networks, found)
    _LOGGER.info("Activations of the units %s are computed again in backward.", ", ".join(found))
    return found


def _shard_networks(model: Model, engine: Engine, named: Sequence[nn.Module | Unit] | None) -> None:
    discovery = model.discovery
    networks, optimizers = discovery.modules(), discovery.optimizers()
    check_shardable(networks, optimizers, discovery.moved()[0])
    units = find_units(networks, named)
    engine.replicas.compare(partial(check_alike, discovery))
    engine.shard(networks, optimizers, units)
