"""Gives networks their initial values module by module, each under a key of its path.

``Model.setup`` runs on the meta device, where tensors have shapes and no values, and what writes to
them is recorded. Then the initializers of modules run again, unit by unit, on tensors with memory.
A tensor must get its values from the initializer that wrote to it last in ``setup``, or from
``Model.init_unit``; anything else would be lost, and is an error that names the tensor.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from helios.core import rng
from helios.core.sharded_tensors import is_sharded
from helios.core.utils import memory_of, version_of
from helios.core.wrappers import BareNames
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.model.model import Model
from helios.sharding.recomputation import tensors_in
from helios.sharding.requirements import check_shardable
from helios.sharding.units import Unit, find_units, modules_of_units
from helios.state.networks import has_hooks
from helios.state.steps import check_alike
from helios.storage.content_hash import bit_sum

_INITIALIZERS = ("reset_parameters", "_reset_parameters")
_COPIES = ("clone", "__deepcopy__", "to", "half", "bfloat16", "float", "double")
_PLAIN = (Tensor, nn.Parameter)


def set_up_keyed(
    model: Model,
    engine: Engine,
    set_up: Callable[[], None],
    ask_for_units: Callable[[], Sequence[nn.Module | Unit] | None],
    *,
    seed: int,
) -> Sequence[nn.Module | Unit] | None:
    """Call ``Model.setup`` without values, then initialize the networks, and shard them if asked.

    No process holds more than its shards and one unit.

    Args:
        model: the model.
        engine: the engine of the run.
        set_up: calls ``Model.setup``.
        ask_for_units: is called when ``Model.setup`` has returned; returns what ``Model.shard``
            returns.
        seed: the seed of the source ``init``.

    Returns:
        What ``ask_for_units`` has returned.

    Raises:
        UsageError: for a value of ``setup`` that would be lost, and for what has no initializer.
    """
    model.loads_after_setup = []
    try:
        with torch.device("meta"), _Watch("meta", lambda tensor: None) as watch:
            set_up()
        discovery, replicas = model.discovery, engine.replicas
        networks, optimizers = discovery.modules(), discovery.optimizers()
        named, units = ask_for_units(), {}
        if replicas.is_sharded:
            check_shardable(networks, optimizers, discovery.moved()[0])
            units = find_units(networks, named)
        init = _KeyedInit(model, engine.device, seed, units, watch.last)
        made = {memory: write.made for memory, write in watch.last.items()}
        # What has looked at the model refers to itself and to parameters, which would stay whole.
        del watch
        gc.collect()
        if replicas.is_sharded_over_processes:
            engine._shard(networks, optimizers, units, init.initialize)
        init.initialize()
        marks = init.marks
        del init
        gc.collect()
        for memory, what in made.items():
            if not memory.expired():
                _refuse(f"what setup makes by {what}", "no network holds it, but it is used")
        for name, load in model.loads_after_setup:
            load(replicas.share)
            # Shards are not compared; that all processes load is.
            marks[f"load_weights of {name}"] = 1
        replicas.compare(partial(check_alike, discovery, marks=marks))
        return named
    finally:
        model.loads_after_setup = None


class _Write(NamedTuple):
    """What has made some memory and written to it.

    Attributes:
        made: the function that has made it.
        writers: the modules whose initializers have written, in order, and ``None`` for other code;
            nothing of memory that was only allocated.
        sources: the memory that was copied, if it was.
    """

    made: str = ""
    writers: tuple[nn.Module | None, ...] = ()
    sources: tuple[StorageWeakRef, ...] = ()

    def then(self, writer: nn.Module | None) -> _Write:
        """Return what has written by now; an initializer that writes twice in a row counts once.

        The first one must write all of it, or leaves a number that is found to be missing.
        """
        earlier = () if self.writers == (None,) else self.writers
        return self._replace(writers=earlier if earlier[-1:] == (writer,) else (*earlier, writer))


@final
class _KeyedInit:
    """Initializes networks that ``setup`` has built without values.

    Args:
        model: the model, whose ``init_unit`` comes first.
        device: where values are made.
        seed: the seed of the source ``init``.
        units: the modules that are initialized together with what is inside of them, by name.
        written: what has written to each memory last.

    Attributes:
        marks: checksums of the tensors that have values by now, by name.

    Raises:
        UsageError: for a tensor that cannot be initialized by keys.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        seed: int,
        units: Mapping[str, nn.Module],
        written: Mapping[StorageWeakRef, _Write],
    ) -> None:
        self._model, self._device, self._seed = model, device, seed
        self._units = modules_of_units(units)
        self.marks: dict[str, int] = {}
        self._paths: dict[nn.Module, str] = {}
        for path, network in model.discovery.modules().items():
            bare = BareNames(network)
            for name, module in network.named_modules():
                self._paths.setdefault(module, ".".join(filter(None, (path, bare.of(name)))))
        # What is inside of a module comes first: its initializer may write there, too.
        self._left = sorted(self._paths, key=lambda module: len([*module.modules()]))
        self._expected: defaultdict[nn.Module, dict[str, _Write]] = defaultdict(dict)
        self._ties: defaultdict[nn.Module, list[str]] = defaultdict(list)
        self._writers: set[nn.Module | None] = set()
        self._memory: set[StorageWeakRef] = set()
        self._path = ""
        self._find_homes(written)

    def _find_homes(self, written: Mapping[StorageWeakRef, _Write]) -> None:
        """Find the module that initializes each tensor: of several, the last one in ``setup``."""
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self._paths:
            for name, tensor in _own_tensors(module).items():
                places.setdefault(tensor, []).append((module, name))
        for tensor, holders in places.items():
            shown = f"{self._paths[holders[0][0]]}.{holders[0][1]}"
            has_value = isinstance(tensor, nn.Parameter) and not tensor.is_meta
            if has_value or has_hooks(tensor) or type(tensor) not in _PLAIN:
                _refuse(shown, "it has a value, a hook, a class of its own, or no shape")
            if not tensor.is_meta or not tensor.numel():
                continue
            memory = memory_of(tensor)
            if memory in self._memory or (len(holders) > 1 and type(tensor) is Tensor):
                _refuse(shown, "it shares its memory with another tensor of a network")
            self._memory.add(memory)
            write = written.get(memory, _Write())
            self._writers.update(write.writers)
            last = write.writers[-1:]
            home = next((place for place in holders if place[0] in last), holders[0])
            for module, name in holders:
                if (module, name) == home:
                    self._expected[module][name] = write
                else:
                    self._ties[module].append(name)

    def initialize(self, unit: str | None = None) -> None:
        """Give values to the parameters and buffers of a unit, or of all that have none yet.

        Raises:
            UsageError: if a value is missing afterwards, or one that ``setup`` has made is lost.
        """
        chosen = {*self._left} if unit is None else {*self._units[unit]}
        group = [module for module in self._left if module in chosen]
        self._left = [module for module in self._left if module not in chosen]
        for module in group:
            self._make_memory(module)
        watch = _Watch(self._device.type, self._check_use)
        with rng.stream(rng.key(self._seed, "init")), torch.no_grad(), self._device:
            for module in group:
                for name in self._expected[module]:
                    numbers, mark = _mark(getattr(module, name))
                    numbers.fill_(mark)
            for module in group:
                self._run(module, watch)
        for module in group:
            for name, tensor in _own_tensors(module).items():
                shown = f"{self._paths[module]}.{name}"
                self.marks[shown] = int(bit_sum(tensor))
                expected = self._expected[module].get(name)
                found = watch.last.get(memory_of(tensor), _Write())
                if expected and not self._is_repeated(expected, found.writers):
                    _refuse(shown, "reset_parameters() does not repeat all that setup writes to it")

    def _is_repeated(self, expected: _Write, writers: Sequence[nn.Module | None]) -> bool:
        """Return whether the same initializers have written as in setup, in the same order.

        Of what was copied, they run in each copy, so the module that was copied must be gone.
        """
        # Without a module, it was Model.init_unit.
        found = [type(writer) for writer in writers if writer]
        is_same = not expected.writers or [*map(type, expected.writers)] == found
        return is_same and self._memory.isdisjoint(expected.sources)

    def _make_memory(self, module: nn.Module) -> None:
        """Let the tensors of a module have memory; parameters stay the same objects."""
        own = _own_tensors(module)
        attributes = {name: dict(vars(tensor)) for name, tensor in own.items()}
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to_empty(device=self._device, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for name, old in own.items():
            if isinstance(old, nn.Parameter):
                vars(old).update(attributes[name])
            elif not old.is_meta:
                setattr(module, name, old.to(self._device))

    def _run(self, module: nn.Module, watch: _Watch) -> None:
        """Initialize a module. Memory that is not written holds numbers that nobody writes."""
        own = _own_tensors(module)
        for name in self._ties[module]:
            # Another module initializes it. What this one writes is lost.
            setattr(module, name, nn.Parameter(own[name].to("meta"), own[name].requires_grad))
        self._path = self._paths[module]
        rng.reseed(rng.key(self._seed, "init", self._path))
        initialize: Any = getattr(module, _initializer_of(module), None)
        with watch:
            is_done = self._model.init_unit(module, self._path)
            if not is_done and initialize and (module in self._writers or own):
                initialize()
        # Optimizers hold the parameter; a buffer may be another one now.
        found = {**own, **dict(module.named_buffers(recurse=False))}
        for name in self._expected[module]:
            numbers, mark = _mark(found[name])
            if numbers.sum().isnan() if mark is torch.nan else (numbers == mark).any():
                shown = f"{self._path}.{name}"
                _refuse(shown, "reset_parameters() or init_unit must write all of it")
        for name in self._ties[module]:
            setattr(module, name, own[name])
        if is_done:
            self._expected[module].clear()

    def _check_use(self, tensor: Tensor) -> None:
        """Refuse tensors of other units, which may have no values yet, or be cut by now."""
        if is_sharded(tensor) or (tensor.is_meta and memory_of(tensor) in self._memory):
            _refuse(self._path, "its initializer uses a tensor of another unit of Model.shard()")


def _refuse(what: str, why: str) -> NoReturn:
    raise UsageError(
        f'Trainer(init="keyed") cannot initialize {what}: {why}. Write values in '
        "Model.init_unit(module, name), and return True there. Make a tensor that is no parameter "
        'in "with self.device:", which gives it values at once.'
    )


def _initializer_of(module: nn.Module) -> str:
    """Return the name of the method that initializes a module, or nothing."""
    return next((name for name in _INITIALIZERS if callable(getattr(module, name, None))), "")


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module holds itself."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def _mark(tensor: Tensor) -> tuple[Tensor, float]:
    """Return a tensor as numbers, and a number that no initializer writes."""
    numbers = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    return numbers, torch.iinfo(numbers.dtype).max - 37 if is_exact else torch.nan


@final
class _Watch(TorchFunctionMode):
    """Records what makes and writes to memory of a device.

    Args:
        device: its type.
        check: is called with each tensor before it is used.
    """

    def __init__(self, device: str, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.last: dict[StorageWeakRef, _Write] = {}
        self._device, self._check = device, check

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = [*tensors_in((args, kwargs))]
        for tensor in given:
            self._check(tensor)
        before = [(tensor, version_of(tensor)) for tensor in given if self._is_plain(tensor)]
        found = func(*args, **(kwargs or {}))
        caller: Any = getattr(inspect.currentframe(), "f_back", None)
        # On the meta device, some initializers of PyTorch return before they write.
        code = caller.f_code
        is_init = code.co_filename == inspect.getfile(nn.init) and code.co_name.endswith("_")
        written = {
            memory_of(tensor)
            for tensor, version in before
            if is_init or version_of(tensor) != version
        }
        made = {*map(memory_of, filter(self._is_plain, tensors_in(found)))}
        made -= {memory_of(tensor) for tensor, _ in before}
        if not written and not made:
            return found
        writer = _find_writer(caller)
        name = getattr(func, "__name__", "")
        is_empty = name.removeprefix("new_").startswith("empty")
        new = _Write(name, () if is_empty else (writer,))
        if writer is None and name in _COPIES and before:
            source = memory_of(before[0][0])
            new = self.last.get(source, new)
            new = new._replace(sources=(*new.sources, source))
        self.last.update(dict.fromkeys(made, new))
        for memory in written:
            self.last[memory] = self.last.get(memory, _Write()).then(writer)
        return found

    def _is_plain(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        return is_plain and tensor.device.type == self._device


def _find_writer(caller: FrameType | None) -> nn.Module | None:
    """Return the module whose initializer is running.

    One counts if it is called as it will be called again, without arguments.
    """
    for frame, _ in traceback.walk_stack(caller):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_name in _INITIALIZERS and names:
            owner, *arguments = map(frame.f_locals.get, names)
            if isinstance(owner, nn.Module) and code.co_name == _initializer_of(owner):
                method = inspect.signature(getattr(owner, code.co_name))
                if repr(arguments) == repr([each.default for each in method.parameters.values()]):
                    return owner
    return None
