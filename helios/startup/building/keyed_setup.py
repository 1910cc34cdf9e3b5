"""Sets up a model without values, and initializes it piece by piece: ``Trainer(init="keyed")``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.init.keyed_init import KeyedInit
from helios.init.values_of_setup import without_values
from helios.model.model import Model
from helios.sharding.requirements import check_shardable
from helios.sharding.units import Unit, find_units, modules_of_units
from helios.state_graph.consistency import check_alike
from helios.state_graph.graph import Graph
from helios.state_graph.object_names import Rules
from helios.state_graph.owner_states import internals_of
from helios.state_graph.values import Identities
from helios.storage.checksums import bit_sum

AskForUnits: TypeAlias = Callable[[], Sequence[nn.Module | Unit] | None]

_OPTION = 'Trainer(init="keyed")'


def set_up_keyed(
    model: Model, engine: Engine, ask_for_units: AskForUnits, *, seed: int, fast_init: bool
) -> Sequence[nn.Module | Unit] | None:
    """Call ``Model.setup`` without values, then initialize the networks, and shard them if asked.

    No process holds more than its shards and one unit.

    Args:
        model: the model.
        engine: the engine of the run.
        ask_for_units: is called when ``Model.setup`` has returned; returns what ``Model.shard``
            returns.
        seed: the seed of the source ``init``.
        fast_init: as ``Model.setup`` takes it.

    Returns:
        What ``ask_for_units`` has returned.

    Raises:
        UsageError: for a value of ``setup`` that would be lost, and for what has no initializer.
    """
    model.loads_after_setup = []
    try:
        with without_values() as values:
            model.setup(fast_init=fast_init)
        discovery, replicas = model.discovery, engine.replicas
        networks, optimizers = discovery.modules(), discovery.optimizers()
        loose = discovery.moved()[0]
        _check_loose(loose)
        named, units = ask_for_units(), {}
        if replicas.is_sharded:
            check_shardable(networks, optimizers, loose)
            units = find_units(networks, named)
        init = KeyedInit(
            networks, values, seed=seed, init_unit=model.init_unit, device=engine.device
        )
        begun = _take_states(optimizers)
        # What has looked at the model refers to itself and to parameters, which would stay whole.
        gc.collect()
        marks = _initialize(init, engine, networks, optimizers, units)
        for optimizer in begun:
            _begin_again(optimizer)
        del init
        _refuse_left_over(model, values.forget())
        for name, load in model.loads_after_setup:
            load(replicas.share)
            # Shards are not compared; that all processes load is.
            marks[f"load_weights of {name}"] = 1
        replicas.compare(partial(check_alike, discovery, marks=marks))
        return named
    finally:
        model.loads_after_setup = None


def _initialize(
    init: KeyedInit,
    engine: Engine,
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    units: Mapping[str, nn.Module],
) -> dict[str, int]:
    """Initialize and shard unit by unit; returns marks that differ if values do."""
    marks: dict[str, int] = {}
    modules = modules_of_units(units)

    def mark(tensors: Mapping[str, Tensor]) -> None:
        if not engine.replicas.has_single_process:
            marks.update({name: int(bit_sum(tensor)) for name, tensor in tensors.items()})

    def prepare(name: str) -> None:
        mark(init.initialize(modules[name]))

    if engine.replicas.is_sharded_over_processes:
        engine.shard(networks, optimizers, units, prepare)
    else:
        for name in reversed([*units]):
            prepare(name)
    mark(init.initialize_rest())
    return marks


def _check_loose(loose: Mapping[str, Tensor]) -> None:
    for path, tensor in loose.items():
        if tensor.is_meta:
            raise UsageError(
                f"{_OPTION} needs parameters that are in networks, but {path} is in none. Put it "
                'in a module, or make it in "with self.device:".'
            )


def _take_states(optimizers: Mapping[str, Optimizer]) -> list[optim.Adagrad]:
    """Remove what optimizers have made of parameters without values; returns those that have.

    Raises:
        UsageError: for an optimizer of which it is not known how it does so.
    """
    found = []
    for path, optimizer in optimizers.items():
        if not optimizer.state:
            continue
        if type(optimizer) is not optim.Adagrad:
            raise UsageError(
                f"{_OPTION} needs optimizers that make their state in their first step, but "
                f"{path} ({type(optimizer).__name__}) makes it in its constructor, of parameters "
                "without values. Make it in step()."
            )
        optimizer.state.clear()
        found.append(optimizer)
    return found


def _begin_again(optimizer: optim.Adagrad) -> None:
    """Let an optimizer have the state that its constructor makes."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state.update(optim.Adagrad(groups, **optimizer.defaults).state)


def _refuse_left_over(model: Model, list_left: Callable[[], list[str]]) -> None:
    """Refuse tensors without values that are in no network."""
    graph = Graph(model, Rules(internals_of(model)), Identities())
    tensors = {name: cell.part for name, cell in graph.opaque.items()} | graph.found.leaves
    named = sorted(
        path for path, value in tensors.items() if isinstance(value, Tensor) and value.is_meta
    )
    del tensors, graph
    if named:
        what = ", ".join(named[:3])
    elif places := list_left():
        what = f"what {', '.join(places[:3])} has made"
    else:
        return
    raise UsageError(
        f"{_OPTION} builds tensors without values, and initializes those of networks, but {what} "
        'is in none. Make it in "with self.device:", which gives it values, or a buffer.'
    )
