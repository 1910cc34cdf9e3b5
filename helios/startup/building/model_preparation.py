"""Prepares a model before and after its setup."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from helios.engines.engine import Engine
from helios.errors import ArgumentError, UsageError
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.run_state.consistency import check_alike
from helios.run_state.discovery import Discovery
from helios.sharding.requirements import check_shardable
from helios.sharding.units import find_units
from helios.startup.building.keyed_setup import set_up_keyed
from helios.startup.options.trainer_options import RunOptions


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


def build_networks(model: Model, engine: Engine, run: RunOptions, *, fast_init: bool) -> None:
    """Call ``Model.setup``, and bring the networks to where they are trained.

    Args:
        model: the model.
        engine: the engine of the run.
        run: says how networks get their initial values.
        fast_init: as ``Model.setup`` takes it.

    Raises:
        UsageError: if a network or an optimizer does not allow what the run asks for.
    """
    if run.init == "keyed":
        set_up_keyed(model, engine, seed=run.seed_of("init"), fast_init=fast_init)
        return
    model.setup(fast_init=fast_init)
    move_networks(model, engine.device)
    shard_networks(model, engine)


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


def shard_networks(model: Model, engine: Engine) -> None:
    """Shard the networks of a model over the processes, if the run is sharded.

    Raises:
        UsageError: if a network or an optimizer does not allow it.
    """
    replicas = engine.replicas
    if not replicas.is_sharded:
        return
    discovery = model.discovery
    networks, optimizers = discovery.modules(), discovery.optimizers()
    check_shardable(networks, optimizers, discovery.moved()[0])
    units = find_units(networks, model.shard())
    replicas.compare(partial(_check_weights, discovery))
    engine.shard(networks, optimizers, units)


def _check_weights(discovery: Discovery, gather: Callable[[Any], list[Any]]) -> None:
    check_alike(discovery, gather, too_slow={})
