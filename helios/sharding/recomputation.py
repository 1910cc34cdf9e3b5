"""Computes the activations of modules again in backward, instead of keeping them.

PyTorch's checkpoint calls a forward a second time. Here, that call starts from the same generators,
buffers and attributes as the first one, and does not change them: a BatchNorm counts a batch once.
Parameters that have changed since then are an error; PyTorch refuses changed inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helios.backup import Backup
from helios.core import rng
from helios.core.generators import is_generator
from helios.core.sharded_tensors import is_sharded
from helios.core.utils import version_of
from helios.errors import UsageError
from helios.storage.plain_objects import comes_from

_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers", "_modules"}
"""Attributes of all modules that no forward changes."""

_NOT_OF_USERS = frozenset(("torch", "helios"))
"""Packages whose objects, such as those of FSDP, hold nothing that a forward changes."""


@contextmanager
def recomputed(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Compute the activations of modules again in backward, within a block.

    Args:
        modules: the modules by name. Names in their ``state_dict`` do not change.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            forward = _Forward(name, module)
            stack.callback(_put_back, module, forward, vars(module).get("forward"))
            vars(module)["forward"] = forward
        yield


def _put_back(module: nn.Module, ours: _Forward, own: Any) -> None:
    # What a user has put there since then stays.
    if vars(module).get("forward") is ours:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


@final
class _Forward:
    """The forward of a module whose activations are not kept.

    Inside of what FSDP does around a forward, so that parameters are gathered once for both the
    second forward and the backward.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        names, num_args = [*kwargs], len(args)
        start = _Start(self._name, self._module, (*args, *kwargs.values()))
        is_repeated = False

        def call(values: Sequence[Any]) -> Any:
            named = dict(zip(names, values[num_args:], strict=True))
            return self._forward(*values[:num_args], **named)

        def run(*values: Any) -> Any:
            nonlocal is_repeated
            if is_repeated:
                with start.put():
                    return call(values)
            is_repeated = True
            return call(values)

        # Not by keyword: those of a module may have the names of checkpoint's own.
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


@final
class _Start:
    """What a forward starts from, besides the values of input tensors and parameters.

    Args:
        name: of the module.
        module: the module.
        inputs: what its forward receives. Tensors in them are checkpoint's to keep, unchanged, or
            to compute again where this unit is inside of another one.
    """

    def __init__(self, name: str, module: nn.Module, inputs: Sequence[Any]) -> None:
        self._name = name
        self._modules = [*module.modules()]
        self._weights = self._read_weights()
        others = [value for value in inputs if not isinstance(value, Tensor)]
        self._owners = [*self._modules, others]
        self._left = set(map(id, tensors_in(others)))
        self._backup, self._states = self._back_up(), rng.read_states()

    def _back_up(self, *others: Any) -> Backup:
        """Return what modules and inputs hold, besides of what belongs to PyTorch and Helios."""
        tables = (vars(part).get(name) for part in self._modules for name in _OF_TORCH)
        left = self._left.union(map(id, tables))

        def leave(value: Any) -> bool:
            if id(value) in left:
                return True
            if isinstance(value, Tensor):
                return isinstance(value, nn.Parameter) or value.requires_grad or is_sharded(value)
            is_own = comes_from(type(value), _NOT_OF_USERS)
            return is_own and not (is_generator(value) or isinstance(value, rng.DefaultNumpyRNG))

        return Backup((*self._owners, *others), leave=leave)

    @contextmanager
    def put(self) -> Iterator[None]:
        """Run a block that starts from here, and leaves no trace.

        Raises:
            UsageError: if parameters have changed since then.
        """
        self._require_unchanged()
        backup, states = self._back_up(*self._backup.values), rng.read_states()
        self._backup.restore()
        rng.load_states(self._states)
        try:
            yield
        finally:
            backup.restore()
            rng.load_states(states)

    def _require_unchanged(self) -> None:
        if not all(map(_is_unchanged, self._weights, self._read_weights())):
            raise UsageError(
                "Unit(..., checkpoint=True) needs parameters that stay as they are from forward to "
                f"backward, but some of {self._name} were changed or replaced. Update them after "
                "backward, or use checkpoint=False."
            )

    def _read_weights(self) -> list[tuple[Tensor, int]]:
        weights = (each for part in self._modules for each in vars(part)["_parameters"].values())
        return [(each, version_of(each)) for each in weights if each is not None]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member)


def _is_unchanged(then: tuple[Tensor, int], now: tuple[Tensor, int]) -> bool:
    # Inner units are whole or sharded, and have another parameter for each.
    is_inner = is_sharded(then[0]) or is_sharded(now[0])
    return is_inner or (then[0] is now[0] and then[1] == now[1])
