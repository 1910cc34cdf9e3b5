"""Sets a model up: what its ``setup`` may know, its networks and their shards."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from helios.backup import Backup
from helios.checkpoint.frozen import FrozenWeights
from helios.core import rng
from helios.core.utils import version_of
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.bus import signature_of
from helios.model.model import Model
from helios.model.processor import BatchProcessor
from helios.schedule import Schedule
from helios.sharding.recomputation import recomputed
from helios.sharding.requirements import check_checkpointable, check_shardable
from helios.sharding.units import Unit, find_in_networks, find_units
from helios.start.keyed_init import KeyedInit
from helios.start.options import Options
from helios.state.discovery import Discovery
from helios.state.networks import Network, is_odd
from helios.state.owners import internals_of
from helios.state.steps import check_alike
from helios.state.values import children_of, each_in, is_dense
from helios.storage.content_hash import array_sum, tensor_sum

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
    # Optimizers and schedulers know each other, so the base of the trial keeps its memory.
    gc.collect()
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
            f"{place} must take no arguments, or fast_init=False, but takes {signature}. Fix the "
            "parameters of the method."
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
            "does, where dropout is off and running statistics do not change. To train it in that "
            'mode, start a new run with Model.train_mode = "keep".',
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
            "%s. There, dropout is off and running statistics do not change. Start a new run with "
            'Model.train_mode = "all" to put all networks into training mode, or with "keep" if '
            "this is intended.",
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
    """Return whether a class or an object of the network sets modes by itself."""
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
    _LOGGER.info("Activations of the units %s are recomputed in backward.", ", ".join(found))
    return found


# ---- what a model may know in its setup, and what it makes of weights

_Mark: TypeAlias = tuple[str, tuple[int, ...], int]
"""Type, shape and checksum of a tensor or an array; of a parameter, its version and identity."""


def _mark(value: object) -> _Mark | None:
    """Return the mark of a tensor or an array, on any device; ``None`` for anything else."""
    if isinstance(value, nn.Parameter):
        # Of these, there may be more than anybody wants to read.
        return "parameter", (version_of(value),), id(value)
    if isinstance(value, Tensor) and is_dense(value) and not value.is_meta:
        return str(value.dtype), tuple(value.shape), tensor_sum(value.detach().cpu())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, array_sum(value)
    return None


@final
class SetupContext:
    """``context`` of a model while its ``setup`` runs, before there are counters.

    Args:
        model: the model.
        schedule: the options of the run.
        open_source: opens the training data; ``None`` if there is none, or nothing is trained.
        horizon: what the start that wrote the checkpoint was told of the length of the run.
        is_loaded_next: whether the state of a checkpoint replaces what ``setup`` makes.

    Attributes:
        current: the set-up that runs in this process; ``None`` outside one.
        model: as given.
        horizon: what was asked for, by the name of the property.
        is_loaded_next: as given.
    """

    current: ClassVar[SetupContext | None] = None

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        open_source: Callable[[], Source | None],
        *,
        horizon: Mapping[str, int | None],
        is_loaded_next: bool,
    ) -> None:
        self.model, self.is_loaded_next = model, is_loaded_next
        self.horizon = dict(horizon)
        self._schedule, self._open_source = schedule, open_source
        self._device = torch.get_default_device()
        self._loaded: list[Model | nn.Module] = []
        self._known: set[_Mark] = set()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the model have it within a block."""
        vars(self.model)["_run_context"] = SetupContext.current = self
        try:
            yield
        finally:
            vars(self.model)["_run_context"] = SetupContext.current = None

    def note_load(self, module: Model | nn.Module) -> None:
        """Note that weights are loaded here, which a start from a checkpoint has from there.

        Args:
            module: what gets them.
        """
        if not self._loaded:
            members = vars(self.model)
            own = [members[name] for name in members.keys() - internals_of(self.model)]
            self._known = {*filter(None, map(_mark, each_in([own, module], children_of)))}
        self._loaded.append(module)

    @property
    def leaves_weights(self) -> bool:
        """Whether weights were not read, because the checkpoint has them."""
        return self.is_loaded_next and bool(self._loaded)

    def check_loads(self) -> None:
        """Refuse what ``setup`` has made of weights, if no checkpoint will hold it.

        Raises:
            UsageError: if the next start would make it of other weights.
        """
        # Keyed initialization loads after setup, which has made nothing of the weights then.
        if not self._loaded or self.model.loads_after_setup is not None:
            return
        names = [*self._find_dependent()]
        if names:
            raise UsageError(
                f"{type(self.model).__name__}.setup() calls load_weights, and computes "
                f"{', '.join(names)} after it or from these weights. No checkpoint holds that, and "
                "a resume does not load the weights, so it would differ. Compute it before "
                "load_weights, or pass load_weights(..., every_start=True)."
            )

    def _find_dependent(self) -> Iterator[str]:
        discovery = self.model.discovery
        if type(self.model).state_dict is not Model.state_dict:
            yield "the result of its own state_dict"
            return
        saved = discovery.saved_modules()
        loaded = {id(x) for net in self._find_loaded() for x in net.parameters()}
        for path, network in discovery.modules().items():
            tensors = [*network.parameters(), *network.buffers()]
            has_loaded = any(id(tensor) in loaded for tensor in tensors)
            if path not in saved:
                is_new = any(_mark(tensor) not in self._known for tensor in tensors)
                if has_loaded or is_new:
                    yield path
            elif has_loaded and is_odd(Network(network)):
                yield f"{path}, whose class has a state_dict of its own,"
        discovery.look_at_values()
        trained = tuple(f"{x}." for x in (*discovery.optimizers(), *discovery.schedulers()))
        for name, value in discovery.pop_values().items():
            mark = _mark(value)
            if mark and mark not in self._known and not name.startswith(trained):
                yield name

    def _find_loaded(self) -> Iterator[nn.Module]:
        for part in self._loaded:
            if isinstance(part, Model):
                yield from part.discovery.saved_modules().values()
            else:
                yield part

    @property
    def num_steps(self) -> int | None:
        """As :attr:`helios.Context.num_steps`; in an evaluation, as the checkpoint knows it."""
        return self._count("num_steps", Source.count_steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """As :attr:`helios.Context.steps_per_epoch`; in an evaluation, that of the checkpoint."""
        return self._count("steps_per_epoch", Source.count_steps_per_epoch)

    def _count(self, name: str, count: Callable[[Source, Schedule], int | None]) -> int | None:
        states = rng.read_states()
        try:
            # Inside it, keyed initialization builds without values; data has values.
            with self._device:
                source = self._open_source()
        finally:
            # What setup draws next does not depend on who asks.
            rng.load_states(states)
        if source is not None:
            self.horizon[name] = count(source, self._schedule)
        return self.horizon.get(name)
