"""Sets a model up: its networks and their shards."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from helios.backup import Backup
from helios.checkpoint.frozen import FrozenWeights
from helios.core import rng
from helios.engines.engine import Engine
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.bus import signature_of
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.sharding.recomputation import recomputed
from helios.sharding.requirements import check_checkpointable, check_shardable
from helios.sharding.units import Unit, find_in_networks, find_units
from helios.start.keyed_init import KeyedInit
from helios.start.options import Options
from helios.state.discovery import Discovery
from helios.state.owners import internals_of
from helios.state.steps import check_alike

_LOGGER = logging.getLogger(__name__)


def take_own_processor(model: Model) -> None:
    """Give a model its own copy of the processor that its class sets.

    As an attribute of the instance, its state is saved. It is copied so that models of one class do
    not share state, which would be missing in the next process.
    """
    named = inspect.getattr_static(model, "batch_processor")
    if "batch_processor" not in vars(model) and isinstance(named, BatchProcessor):
        model.batch_processor = copy.deepcopy(named)


def build_networks(
    model: Model, engine: Engine, run: Options, *, is_inference: bool
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
        ArgumentTypeError: if ``Model.setup`` takes other arguments, or if ``Model.shard`` returns
            something else than units.
        UsageError: if a network or an optimizer does not allow what the run asks for.
    """
    set_up = _bind_setup(model, is_inference=is_inference)
    init = KeyedInit(model, engine, run.seed) if run.init == "keyed" else None
    if init is None:
        set_up()
        move_networks(model, engine.device)
    else:
        init.set_up(set_up)
    named = _ask_for_units(model, engine, trains=not is_inference)
    discovery, replicas, units = model.discovery, engine.replicas, {}
    if replicas.is_sharded:
        check_shardable(discovery.modules(), discovery.optimizers(), discovery.moved()[0])
        units = find_units(discovery.modules(), named)
    if init is not None:
        init.initialize(units)
    elif replicas.is_sharded:
        replicas.compare(partial(check_alike, discovery))
        engine._shard(discovery.modules(), discovery.optimizers(), units)
    return recomputed({} if is_inference else _find_checkpointed(model, named))


def try_base(model: Model, build: Callable[[], object]) -> dict[str, str]:
    """Return the digests of the frozen weights that a set-up makes, and undo it."""
    states = rng.read_states()
    with undone(model):
        build()
        digests = FrozenWeights(model).digests
    rng.load_states(states)
    return digests


@contextmanager
def undone(model: Model, *others: object) -> Iterator[None]:
    """Restore a model and other objects after a block; copies of tensors are in host memory."""
    backup = Backup([model, *others], on_host=True)
    # What the model has found of itself refers to objects by identity, and stays as it is.
    vars(model)["_discovery"] = Discovery(model, exclude=internals_of(model), unsaved=model.unsaved)
    try:
        yield
    finally:
        backup.restore()


def _bind_setup(model: Model, *, is_inference: bool) -> Callable[[], None]:
    """Return ``Model.setup`` with its argument, which it may leave out."""
    place = f"{type(model).__name__}.setup"
    signature = signature_of(place, model.setup)
    if not signature.parameters:
        return model.setup
    try:
        signature.bind(fast_init=is_inference)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{place} must take no arguments, or fast_init=False, but takes {signature}. Correct "
            "the parameters of the method."
        ) from error
    return partial(model.setup, fast_init=is_inference)


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


_NORM = re.compile(r"\w*(Batch|Layer|Group|Instance|RMS)Norm(\dd)?")
"""Classes of layers that are often kept in evaluation mode, those of other libraries too."""


def set_train_mode(model: Model, *, warns: bool) -> None:
    """Put networks into training mode that setup has left in evaluation mode; see ``train_mode``.

    Args:
        model: the model, after its setup.
        warns: whether to say so, and to warn of networks of which a part is in evaluation mode.

    Raises:
        ArgumentError: for an unknown ``train_mode``.
    """
    mode, networks = model.train_mode, model.discovery.modules()
    if mode not in (None, "all", "keep"):
        raise ArgumentError(f'Model.train_mode must be None, "all" or "keep", got {mode!r}.')
    if mode == "all":
        for network in networks.values():
            network.train()
    if mode is not None or type(model).train is not Model.train:
        return
    trained = {path: network for path, network in networks.items() if _is_trained(network, model)}
    # An attribute may be a part of another one, so all are judged before one is changed.
    resting = {
        path: network
        for path, network in trained.items()
        if _find_resting(network) and not any(part.training for part in network.modules())
    }
    for network in resting.values():
        network.train()
    usual = {path: network for path, network in trained.items() if not _has_own_train(network)}
    if warns and (named := [path for path in resting if path in usual]):
        _LOGGER.warning(
            "Put into training mode: %s. setup() left it in evaluation mode, as from_pretrained "
            "does, where dropout is off and running statistics stand still. To train it like that, "
            'start a new run with Model.train_mode = "keep".',
            ", ".join(named),
        )
    names: dict[nn.Module, str] = {}
    for path, network in usual.items():
        names = {**_find_resting(network, path), **names}
    if warns and names:
        count = len({part for network in usual.values() for part in network.modules()})
        first = [*names.values()][:3]
        _LOGGER.warning(
            "%d of %d modules are in evaluation mode after setup(), in networks that are trained: "
            "%s. There dropout is off and running statistics stand still. Start a new run with "
            'Model.train_mode = "all" to put all networks into training mode, or with "keep" if '
            "this is meant.",
            len(names),
            count,
            ", ".join([*first, "..."] if len(names) > len(first) else first),
        )


def _is_trained(network: nn.Module, model: Model) -> bool:
    groups = [each for part in model.discovery.optimizers().values() for each in part.param_groups]
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    return any(
        # A model without optimizers updates by itself what has a gradient.
        parameter.requires_grad and (id(parameter) in updated or not groups)
        for parameter in network.parameters()
    )


def _find_resting(network: nn.Module, path: str = "") -> dict[nn.Module, str]:
    """Return the parts in evaluation mode, by name, without layers that normalize."""
    norms = {
        part
        for module in network.modules()
        if any(_NORM.fullmatch(kind.__name__) for kind in type(module).__mro__)
        for part in module.modules()
    }
    return {
        part: name
        for name, part in network.named_modules(prefix=path)
        if not part.training and part not in norms
    }


def _has_own_train(network: nn.Module) -> bool:
    """Whether a class of the network, or one of its objects, decides about modes by itself."""
    usual = nn.Module.train
    return any(getattr(part.train, "__func__", None) is not usual for part in network.modules())


def _ask_for_units(
    model: Model, engine: Engine, *, trains: bool
) -> Sequence[nn.Module | Unit] | None:
    """Return what ``Model.shard`` returns, if the run is sharded or trains."""
    named: Any = model.shard() if engine.replicas.is_sharded or trains else None
    if not isinstance(named, Iterable | None):
        raise ArgumentTypeError(
            "Model.shard() must return a list of modules or None, got "
            f"{type(named).__name__}. Return e.g. list(self.net.layers)."
        )
    # An iterator is empty after its first use.
    return None if named is None else [*named]


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
