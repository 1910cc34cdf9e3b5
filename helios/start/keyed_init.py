"""Gives networks their initial values module by module, each under a key of its path.

``Model.setup`` runs on the meta device, where tensors have shapes and no values, and what writes to
them is recorded. Then the initializers of modules run again, unit by unit, on tensors with memory.
A tensor must get its values from the initializers that wrote to it in ``setup``, or from
``Model.init_unit``; anything else would be lost, and is an error that names the tensor.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
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
from helios.state.networks import has_hooks
from helios.state.steps import check_alike
from helios.storage.content_hash import bit_sum

_COPIES = ("clone", "__deepcopy__", "to", "half", "bfloat16", "float", "double")


class _Write(NamedTuple):
    """What has written to some memory.

    Attributes:
        writers: the modules whose initializers have written, in order, and ``None`` for other code;
            nothing of memory that was only allocated.
        sources: the memory that was copied, if it was.
    """

    writers: tuple[nn.Module | None, ...] = ()
    sources: tuple[StorageWeakRef, ...] = ()

    def then(self, writer: nn.Module | None) -> _Write:
        """Return what has written by now; an initializer that writes twice in a row counts once.

        The first one must write all of it, or leaves a number that is found to be missing.
        """
        earlier = () if self.writers == (None,) else self.writers
        return self._replace(writers=earlier if earlier[-1:] == (writer,) else (*earlier, writer))


@final
class KeyedInit:
    """Runs ``setup`` without values, and then initializes the networks.

    No process holds more than its shards and one unit.

    Args:
        model: the model, whose ``init_unit`` comes first.
        engine: the engine of the run.
        seed: the seed of the source ``init``.
    """

    def __init__(self, model: Model, engine: Engine, seed: int) -> None:
        self._model, self._engine, self._seed = model, engine, seed
        self._loads: list[tuple[str, Callable[..., None]]] = []
        self._setup = _Watch("meta")
        self._paths: dict[nn.Module, str] = {}
        # For each module that is not initialized yet, what must write to each of its tensors, or
        # None for a tied one that another module initializes.
        self._expected: dict[nn.Module, dict[str, _Write | None]] = {}
        self._memory: set[StorageWeakRef] = set()
        # Checksums of the tensors that have values by now, by name.
        self._marks: dict[str, int] = {}

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Call ``Model.setup`` on the meta device."""
        self._model.loads_after_setup = self._loads
        try:
            with torch.device("meta"), self._setup:
                set_up()
        finally:
            self._model.loads_after_setup = None

    def initialize(self, units: Mapping[str, nn.Module]) -> None:
        """Initialize the networks, and shard them if the run is sharded over processes.

        Args:
            units: the modules that are initialized together with what is inside of them, by name.

        Raises:
            UsageError: for a value of ``setup`` that would be lost, and for what has no
                initializer.
        """
        discovery, replicas = self._model.discovery, self._engine.replicas
        self._find_homes()
        # What has looked at the model refers to itself and to parameters, which would stay whole.
        gc.collect()
        self._engine._shard(discovery.modules(), discovery.optimizers(), units, self._fill)
        self._fill([*self._expected])
        gc.collect()
        for memory, what in self._setup.made.items():
            if not memory.expired():  # type: ignore[no-untyped-call]
                _refuse(f"what setup makes by {what}", "no network holds it, but it is used")
        for name, load in self._loads:
            load(replicas.share)
            # Shards are not compared; that all processes load is.
            self._marks[f"load_weights of {name}"] = 1
        replicas.compare(lambda gather: check_alike(discovery, gather, marks=self._marks))

    def _find_homes(self) -> None:
        """Find the module that initializes each tensor: of several, the last one in ``setup``."""
        for path, network in self._model.discovery.modules().items():
            bare = BareNames(network)
            for name, module in network.named_modules():
                self._paths.setdefault(module, ".".join(filter(None, (path, bare.of(name)))))
        # What is inside of a module comes first: its initializer may write there, too.
        order = sorted(self._paths, key=lambda module: len([*module.modules()]))
        self._expected = {module: {} for module in order}
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self._paths:
            for name, tensor in _own_tensors(module).items():
                places.setdefault(tensor, []).append((module, name))
        for tensor, holders in places.items():
            kind = type(tensor)
            if kind is Tensor and not tensor.is_meta:
                continue
            shown = f"{self._paths[holders[0][0]]}.{holders[0][1]}"
            if kind not in (Tensor, nn.Parameter) or not tensor.is_meta or has_hooks(tensor):
                _refuse(shown, "it has a value, a hook, its own class, or no shape")
            memory = memory_of(tensor)
            if memory in self._memory or (kind is Tensor and len(holders) > 1):
                _refuse(shown, "it shares its memory with another tensor of a network")
            self._memory.add(memory)
            write = self._setup.last.get(memory, _Write())
            home = next((each for each in holders if each[0] in write.writers[-1:]), holders[0])
            for module, name in holders:
                self._expected[module][name] = write if (module, name) == home else None
        # What setup has only copied from is freed.
        self._setup.last.clear()

    def _fill(self, modules: Sequence[nn.Module]) -> None:
        """Give values to the parameters and buffers of modules that have none yet."""
        group = [module for module in self._expected if module in modules]
        watch = _Watch(self._engine.device.type, self._memory)
        with rng.stream(rng.key(self._seed, "init")), torch.no_grad(), self._engine.device:
            for module in group:
                self._make_memory(module)
            for module in group:
                self._run(module, watch)
        for module in group:
            for name, write in self._expected.pop(module).items():
                tensor, shown = getattr(module, name), f"{self._paths[module]}.{name}"
                self._marks[shown] = int(bit_sum(tensor))
                found = watch.last.get(memory_of(tensor), _Write())
                if write and not self._is_repeated(write, found.writers):
                    _refuse(shown, "reset_parameters() does not repeat the writes of setup")

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
        attributes = {name: {**vars(tensor)} for name, tensor in own.items()}
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to_empty(device=self._engine.device, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for name, old in own.items():
            vars(old).update(attributes[name])
            if type(old) is Tensor and not old.is_meta:
                setattr(module, name, old.to(self._engine.device))
        for name in self._expected[module]:
            numbers, mark = _mark(getattr(module, name))
            numbers.fill_(mark)

    def _run(self, module: nn.Module, watch: _Watch) -> None:
        """Initialize a module. Memory that is not written holds numbers that nobody writes."""
        own, expected = _own_tensors(module), self._expected[module]
        tied = [name for name, write in expected.items() if write is None]
        for name in tied:
            # Another module initializes it. What this one writes is lost.
            setattr(module, name, nn.Parameter(own[name].to("meta"), own[name].requires_grad))
        watch.path = self._paths[module]
        rng.reseed(rng.key(self._seed, "init", watch.path))
        with watch:
            is_done = self._model.init_unit(module, watch.path)
            if not is_done and (initialize := _initializer_of(module)):
                initialize()
        for name in tied:
            setattr(module, name, own[name])
        # Optimizers hold the parameter; a buffer may be another one now.
        found = {**own, **dict(module.named_buffers(recurse=False))}
        for name in expected.keys() - tied:
            numbers, mark = _mark(found[name])
            if numbers.sum().isnan() if mark is torch.nan else (numbers == mark).any():
                _refuse(f"{watch.path}.{name}", "reset_parameters() or init_unit must fill it")
        if is_done:
            expected.update(dict.fromkeys(expected))


def _refuse(what: str, why: str) -> NoReturn:
    raise UsageError(
        f'Trainer(init="keyed") cannot initialize {what}: {why}. Write values in Model.init_unit, '
        'and return True there. Create other tensors in "with self.device:".'
    )


def _initializer_of(module: nn.Module) -> Any:
    """Return the method that initializes a module, if it has one."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


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
        rest: memory of the networks without values, which must not be used.

    Attributes:
        last: what has written to each memory.
        made: the function that has made it.
        path: of the module whose initializer runs.
    """

    def __init__(self, device: str, rest: Collection[StorageWeakRef] = ()) -> None:
        super().__init__()
        self.last: dict[StorageWeakRef, _Write] = {}
        self.made: dict[StorageWeakRef, str] = {}
        self.path = ""
        self._device, self._rest = device, rest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*tensors_in((args, kwargs))]
        # Tensors of other units may have no values yet, or be cut by now.
        if self._rest and any(is_sharded(each) or memory_of(each) in self._rest for each in given):
            _refuse(self.path, "its initializer uses a tensor of another unit of Model.shard()")
        before = [(tensor, version_of(tensor)) for tensor in given if self._is_plain(tensor)]
        found = func(*args, **(kwargs or {}))
        caller: Any = getattr(inspect.currentframe(), "f_back", None)
        # On the meta device, some initializers of PyTorch return before they write.
        is_init = caller.f_globals is vars(nn.init)
        written = {memory_of(each) for each, seen in before if is_init or version_of(each) != seen}
        made = {*map(memory_of, filter(self._is_plain, tensors_in(found)))}
        made -= {memory_of(tensor) for tensor, _ in before}
        writer = _find_writer(caller) if written or made else None
        name = getattr(func, "__name__", "")
        new = _Write(() if name.removeprefix("new_").startswith("empty") else (writer,))
        if writer is None and name in _COPIES and before:
            source = memory_of(before[0][0])
            new = self.last.get(source, new)
            new = new._replace(sources=(*new.sources, source))
        self.made.update(dict.fromkeys(made, name))
        self.last.update(dict.fromkeys(made, new))
        for memory in written:
            self.last[memory] = self.last.get(memory, _Write()).then(writer)
        return found

    def _is_plain(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        return is_plain and tensor.device.type == self._device


def _find_writer(caller: Any) -> nn.Module | None:
    """Return the module whose initializer is running.

    One counts if it is called as it will be called again, without arguments.
    """
    for frame, _ in traceback.walk_stack(caller):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        owner, *arguments = map(frame.f_locals.get, names) if names else (None,)
        method = _initializer_of(owner) if isinstance(owner, nn.Module) else None
        if method and method.__name__ == code.co_name:
            defaults = [each.default for each in inspect.signature(method).parameters.values()]
            if repr(arguments) == repr(defaults):
                return owner
    return None
