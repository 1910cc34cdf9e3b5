"""Gives the modules of networks their initial values, each under the key of its path.

The bits of a module depend on the seed and on its path alone: neither on other modules, nor on what
is initialized together, nor on the number of processes. An initializer that leaves a value
unwritten, or reaches outside of its module, is an error, as is everything that ``setup`` has given
values to and that no initializer repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helios.core import rng
from helios.core.sharded_tensors import is_sharded
from helios.core.wrappers import BareNames
from helios.errors import UsageError
from helios.init.values_of_setup import INITIALIZERS, META, Origin, Values, memory_of

InitUnit: TypeAlias = Callable[[nn.Module, str], bool | None]
_Place: TypeAlias = tuple[int, str]
_OPTION = 'Trainer(init="keyed")'
_HELP = "in Model.init_unit"
_BYTES_OF_MARKS = (0xA5, 0x5B)


@final
class KeyedInit:
    """Initializes networks that ``setup`` has built without values.

    Args:
        networks: the networks by path.
        values: what ``setup`` has given values to.
        seed: the seed of the source ``init``.
        init_unit: ``Model.init_unit``.
        device: where values are made.

    Raises:
        UsageError: for a parameter or buffer that cannot be initialized so.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        values: Values,
        *,
        seed: int,
        init_unit: InitUnit,
        device: torch.device,
    ) -> None:
        self._seed = seed
        self._values = values
        self._init_unit = init_unit
        self._device = device
        self._paths = _paths_of(networks)
        seen: set[int] = set()
        # What is inside of a module comes first: an initializer may write there, too.
        self._order = [part for net in networks.values() for part in _inside_out(net, seen)]
        self._owners: dict[int, list[nn.Module]] = {}
        self._memory: dict[_Place, int] = {}
        self._check_tensors(networks)
        self._registered = set(self._memory.values())
        self._containers = set(self._find_containers())
        self._new_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._by_user: set[int] = set()
        self._repeated: set[int] = set()
        self._marked: dict[_Place, Tensor] = {}
        self._done: set[int] = set()

    def initialize(self, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
        """Give values to the own parameters and buffers of modules, and return them by name.

        Raises:
            UsageError: if a value is missing afterwards, or one that ``setup`` has made is lost.
        """
        group = {id(module) for module in modules} - self._done
        parts = [module for module in self._order if id(module) in group]
        homes = {id(part): self._homes_of(part) for part in parts}
        for module in filter(_own_tensors, parts):
            self._make_memory(module)
        reach = _Reach(self._paths, self._order)
        with rng.stream(rng.key(self._seed, "init")), torch.no_grad(), self._device:
            for module in parts:
                with _hidden(module, [n for n, home in homes[id(module)].items() if not home]):
                    self._run(module, reach.of(module, group))
        for module in parts:
            for name, is_home in homes[id(module)].items():
                if is_home:
                    self._check(module, name)
        self._done |= group
        return {
            f"{self._paths[id(module)]}.{name}": tensor
            for module in parts
            for name, tensor in _own_tensors(module).items()
        }

    def initialize_rest(self) -> dict[str, Tensor]:
        """Initialize all modules that are not initialized yet; returns their tensors by name."""
        return self.initialize(self._order)

    def _check_tensors(self, networks: Mapping[str, nn.Module]) -> None:
        """Check that all parameters are there without values, and record who holds what."""
        names: dict[int, str] = {}
        shared: dict[int, tuple[int, str]] = {}
        for module in (part for net in networks.values() for part in net.modules()):
            path = self._paths[id(module)]
            for name, tensor in _own_tensors(module).items():
                shown = names.setdefault(id(tensor), f"{path}.{name}")
                owners = self._owners.setdefault(id(tensor), [])
                if module not in owners:
                    owners.append(module)
                if isinstance(tensor, nn.Parameter):
                    _check_parameter(shown, tensor)
                if not tensor.is_meta:
                    continue
                memory = memory_of(tensor)
                if shared.setdefault(memory, (id(tensor), shown))[0] != id(tensor):
                    raise UsageError(
                        f"{_OPTION} cannot initialize {shown}, which shares its memory with "
                        f"{shared[memory][1]}. Assign the same parameter to both modules instead."
                    )
                if tensor.numel():
                    self._memory[id(module), name] = memory

    def _find_containers(self) -> Iterator[int]:
        """Yield the modules without own tensors whose initializers have written in ``setup``."""
        for memory in self._registered:
            writers = self._values.origin_of(memory).writers
            if not any(map(_own_tensors, writers)):
                yield from map(id, writers)

    def _homes_of(self, module: nn.Module) -> dict[str, bool]:
        """Return the names of a module's tensors, and whether it is the one that initializes each.

        Of several modules, that is the one whose initializer was the last one in ``setup``.
        """
        found = {}
        for name, tensor in _own_tensors(module).items():
            owners = self._owners[id(tensor)]
            writers = self._values.origin_of(memory_of(tensor)).writers if tensor.is_meta else ()
            home = next((part for part in owners if _is_in(part, writers)), owners[0])
            found[name] = home is module
        return found

    def _make_memory(self, module: nn.Module) -> None:
        """Let the tensors of a module have memory; parameters stay the same objects."""
        own = dict(module.named_parameters(recurse=False))
        attributes = {name: dict(vars(parameter)) for name, parameter in own.items()}
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            apply: Any = module._apply  # noqa: SLF001 - as to_empty() does
            apply(self._give_memory, recurse=False)
        except RuntimeError as error:
            raise UsageError(
                f"{_OPTION} needs parameters that nothing but modules and optimizers holds, but "
                f"one of {self._paths[id(module)]} is part of a graph, or has a weak reference: "
                f"{error.__cause__ or error} Compute with networks after setup()."
            ) from error
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for name, parameter in own.items():
            vars(parameter).update(attributes[name])

    def _give_memory(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            if not tensor.is_meta:
                return tensor
            return _fill_unwritten(torch.empty_like(tensor, device=self._device))
        if id(tensor) not in self._new_buffers:
            is_new = tensor.is_meta
            made = torch.empty_like(tensor, device=self._device) if is_new else tensor
            made = _fill_unwritten(made) if is_new else made.to(self._device)
            # The old one is kept, so that no other one gets its identity.
            self._new_buffers[id(tensor)] = (tensor, made)
        return self._new_buffers[id(tensor)][1]

    def _run(self, module: nn.Module, reach: TorchDispatchMode) -> None:
        """Run the initializer of a module; again if integers may be those from before."""
        before = dict(module.named_parameters(recurse=False))
        with reach:
            self._call_initializer(module)
        places = [name for name in _own_tensors(module) if (id(module), name) in self._memory]
        own = _own_tensors(module)
        exact = {name: own[name] for name in places if _is_exact(own[name])}
        marked = {name: _find_unwritten(part) for name, part in exact.items() if not part.is_meta}
        if any(bool(part.any()) for part in marked.values()):
            for name in marked:
                _fill_unwritten(exact[name], again=True)
                self._marked[id(module), name] = marked[name]
            with reach:
                self._call_initializer(module)
        present = dict(module.named_parameters(recurse=False))
        if [*map(id, present.values())] != [*map(id, before.values())]:
            raise UsageError(
                f"{_OPTION} needs initializers that write into parameters, but that of "
                f"{self._paths[id(module)]} ({type(module).__name__}) replaces, adds or removes "
                "one. Use functions of nn.init, or copy_()."
            )

    def _call_initializer(self, module: nn.Module) -> None:
        path = self._paths[id(module)]
        rng.reseed(rng.key(self._seed, "init", path))
        if self._init_unit(module, path):
            self._by_user.add(id(module))
            return
        method = _initializer_of(module)
        if method is not None and (_own_tensors(module) or id(module) in self._containers):
            getattr(module, method)()
            self._repeated.add(id(module))

    def _check(self, module: nn.Module, name: str) -> None:
        """Check that a tensor has values, and those that ``setup`` would have given it."""
        memory = self._memory.get((id(module), name))
        if memory is None:
            return
        tensor = _own_tensors(module)[name]
        shown, kind = f"{self._paths[id(module)]}.{name}", type(module).__name__
        if self._is_unwritten(tensor, (id(module), name)):
            is_parameter = isinstance(tensor, nn.Parameter)
            self._refuse_unwritten(module, shown, kind, is_parameter=is_parameter)
        if id(module) not in self._by_user:
            self._check_origin(memory, shown, kind)

    def _is_unwritten(self, tensor: Tensor, place: _Place) -> bool:
        if not _is_exact(tensor):
            return _has_nan(tensor)
        before = self._marked.get(place)
        if before is None:
            return bool(_find_unwritten(tensor).any())
        return bool((_find_unwritten(tensor, again=True) & before).any())

    def _refuse_unwritten(
        self, module: nn.Module, shown: str, kind: str, *, is_parameter: bool
    ) -> NoReturn:
        remedy = (
            f"initialize it {_HELP}"
            if is_parameter
            else f'fill it {_HELP}, or make it in "with self.device:", which keeps its values'
        )
        if id(module) in self._by_user:
            why = "Model.init_unit, which returns True for it, leaves values unwritten or NaN"
        elif id(module) in self._repeated:
            method = _initializer_of(module)
            why = f"{kind}.{method}() leaves values unwritten or NaN"
        else:
            why, remedy = f"{kind} has no reset_parameters()", f"Define it, or {remedy}"
        remedy = remedy[0].upper() + remedy[1:]
        raise UsageError(f"{_OPTION} must initialize {shown}, but {why}. {remedy}.")

    def _is_repeated(self, origin: Origin) -> bool:
        if origin.sources:
            # The initializer of the module from which this one was copied, which is gone.
            return any(map(_own_tensors, origin.writers))
        return any(id(writer) in self._repeated for writer in origin.writers)

    def _check_origin(self, memory: int, shown: str, kind: str) -> None:
        """Check that what has written a tensor last in ``setup`` is repeated."""
        origin = self._values.origin_of(memory)
        if not origin.has_values:
            return
        if self._registered.intersection(origin.sources):
            how = "is a copy of another one in the networks"
        elif self._is_repeated(origin):
            return
        elif origin.writers:
            writer = origin.writers[0]
            where = self._paths.get(id(writer), "a module that is gone")
            how = f"is written by {type(writer).__name__}.{_initializer_of(writer)}() of {where}"
        else:
            how = f"is written by code outside of {kind}.reset_parameters()"
        place = f" at {origin.place}" if origin.place else ""
        raise UsageError(
            f"{_OPTION} would lose what Model.setup() gives to {shown}: it {how}{place}, which is "
            f"not repeated when {kind} gets its values. Do this {_HELP}(module, name), and return "
            "True there."
        )


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module holds itself."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def _paths_of(networks: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the path of each module, without what wrappers add."""
    paths: dict[int, str] = {}
    for path, network in networks.items():
        bare = BareNames(network)
        for name, module in network.named_modules():
            paths.setdefault(id(module), ".".join(filter(None, (path, bare.of(name)))))
    return paths


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _inside_out(child, seen)
        yield module


def _is_in(module: nn.Module, modules: Sequence[nn.Module]) -> bool:
    return any(each is module for each in modules)


def _initializer_of(module: nn.Module) -> str | None:
    """Return the name of the method that initializes a module; ``None`` if it has none."""
    return next((n for n in INITIALIZERS if callable(getattr(module, n, None))), None)


def _check_parameter(shown: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        why = "is lazy and has no shape yet. Give its layer the size of its input"
    elif type(parameter) is not nn.Parameter:
        why = f"is a {type(parameter).__name__}. Use a Parameter"
    elif not parameter.is_meta:
        why = (
            "has values already. Build it in Model.setup() and name no device, with torch.empty() "
            "instead of torch.Tensor()"
        )
    elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
        why = "has a hook, which it would lose. Register it in on_training_start"
    else:
        return
    raise UsageError(f"{_OPTION} needs plain parameters without values, but {shown} {why}.")


@contextmanager
def _hidden(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Put tensors without memory in the places of some that another module initializes."""
    own = {name: tensor for name, tensor in _own_tensors(module).items() if name in names}
    for name, tensor in own.items():
        substitute = torch.empty_like(tensor, device=META)
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter:
            substitute = nn.Parameter(substitute, requires_grad=tensor.requires_grad)
        setattr(module, name, substitute)
    try:
        yield
    finally:
        for name, tensor in own.items():
            setattr(module, name, tensor)


@final
class _Reach:
    """Restricts an initializer to its module and what is inside of it, and in the same group.

    Args:
        paths: the paths of modules by identity.
        modules: all modules of the networks.
    """

    def __init__(self, paths: Mapping[int, str], modules: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        self._holders: dict[int, set[int]] = {}
        # Kept, so that nothing else gets the identity of what an initializer replaces.
        self._storages: list[Any] = []
        for module in modules:
            for name, tensor in _own_tensors(module).items():
                if not is_sharded(tensor):
                    memory = memory_of(tensor)
                    self._names.setdefault(memory, f"{paths[id(module)]}.{name}")
                    self._holders.setdefault(memory, set()).add(id(module))
                    self._storages.append(tensor.untyped_storage())
        self._paths = paths

    def of(self, module: nn.Module, group: set[int]) -> TorchDispatchMode:
        """Return the mode in which the initializer of a module runs."""
        inside = {id(part) for part in module.modules()} & group
        return _OneModule(self._paths[id(module)], self._names, self._holders, inside)


@final
class _OneModule(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self,
        path: str,
        names: Mapping[int, str],
        holders: Mapping[int, set[int]],
        inside: set[int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._names, self._holders, self._inside = path, names, holders, inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._check(each)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: Tensor) -> None:
        if is_sharded(tensor):
            self._refuse("a parameter of another unit")
        memory = memory_of(tensor) if tensor.layout is torch.strided else 0
        if memory in self._names and not self._holders[memory] & self._inside:
            self._refuse(self._names[memory])

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(
            'Trainer(init="keyed") needs initializers that use their own module only, and what is '
            f"inside of it in the same unit, but that of {self._path} uses {name}. Initialize each "
            "of them in Model.init_unit, or name units in Model.shard() that hold both."
        )


def _fill_unwritten(tensor: Tensor, *, again: bool = False) -> Tensor:
    """Mark all elements of a tensor as unwritten, and return it.

    Floating-point numbers become NaN, which also spreads to what is computed from them; integers a
    number that could be meant.

    Args:
        tensor: the tensor.
        again: whether to use another number. An integer was meant unless it is marked both times.
    """
    if not _is_exact(tensor):
        return tensor.fill_(float("nan"))
    bits, mark = _mark(tensor, _BYTES_OF_MARKS[again])
    bits.fill_(mark)
    return tensor


def _has_nan(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor if tensor.element_size() > 1 else tensor.float()
    # A minimum needs no memory for each element, and that of a NaN and anything is NaN.
    return bool(wide.amin().isnan())


def _find_unwritten(tensor: Tensor, *, again: bool = False) -> Tensor:
    """Return which integers of a tensor are what :func:`_fill_unwritten` marks them with."""
    bits, mark = _mark(tensor, _BYTES_OF_MARKS[again])
    return bits == mark


def _is_exact(tensor: Tensor) -> bool:
    """Return whether elements are integers, of which none is a mark for certain."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _mark(tensor: Tensor, byte: int) -> tuple[Tensor, int]:
    """Return a tensor as one of numbers, and the number that marks its elements."""
    bits = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    pattern = bytes([byte]) * bits.element_size()
    return bits, int.from_bytes(pattern, "little", signed=bits.dtype.is_signed)
