"""Repeats a step without lasting effects, if a process has no replica and others have one.

Sharding needs all processes in each step; the gradients of such a repetition are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from helios.backup import Backup
from helios.core import rng
from helios.core.generators import Generator, is_generator, load_generator, state_of_generator
from helios.core.sharded_tensors import is_sharded
from helios.core.step_log import StepLog
from helios.terminal import root_logger as log

if TYPE_CHECKING:
    from helios.model.model import Model
    from helios.run_parts import RunParts


def _read_generators(model: Model, device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, of this process's device only."""
    state = rng.read_states()
    state["global"] = [state_of_generator(each) for each in _find_global(model)]
    if "cuda" in state:
        state["cuda"] = state["cuda"][device.index or 0]
    return state


def _set_generators(model: Model, state: Mapping[str, Any]) -> None:
    """Set all generators, as :func:`_read_generators` has found them."""
    state = dict(state)
    for generator, each in zip(_find_global(model), state.pop("global"), strict=False):
        load_generator(generator, each)
    if "cuda" in state:
        state["cuda"] = [state["cuda"]] * torch.cuda.device_count()
    rng.load_states(state)


def _find_global(model: Model) -> list[Generator]:
    """Return the generators among the globals of the modules that define model and networks."""
    parts = [
        model,
        *(part for each in model.discovery.modules().values() for part in each.modules()),
    ]
    names = {kind.__module__ for part in parts for kind in type(part).__mro__}
    own = sorted(name for name in names if name.partition(".")[0] not in ("builtins", "torch"))
    modules = [vars(sys.modules[name]) for name in own if name in sys.modules]
    found = [each[name] for each in modules for name in sorted(each) if is_generator(each[name])]
    return list({id(each): each for each in found}.values())


@contextmanager
def without_trace(parts: RunParts) -> Iterator[None]:
    """Run a step in a block without lasting effects.

    Generators, buffers, the state of model and plugins, losses and requests are restored
    afterwards, and no scalars are logged meanwhile. Only sharded parameters and their gradients are
    not restored, because other processes need what the step adds to them.
    """
    run, runner = parts.run, parts.runner
    replica, batch = runner.replica, run.batch
    generators = _read_generators(parts.model, parts.engine.device)
    backup = Backup([parts.model, *parts.plugins.values()], leave=is_sharded)
    requests = parts.agreement.remember()
    run.is_repeating = True
    parts.model._step_log = StepLog(lambda: 1)
    try:
        with log.muted_tensorboard():
            yield
    finally:
        run.is_repeating, parts.model._step_log = False, None
        parts.agreement.take_back(requests)
        backup.restore()
        runner.replica, run.batch = replica, batch
        _set_generators(parts.model, generators)
