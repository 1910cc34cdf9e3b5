"""Checks what can be sharded with the same bits for any number of processes.

All of this is checked in a single process, too: a run may continue on several. Updates must not
draw random numbers, which each process would draw for its shards only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from helios.core import rng
from helios.core.memory import same
from helios.core.wrappers import compiled_call, unwrap
from helios.errors import UsageError
from helios.state.networks import has_hooks

_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam),
    *(optim.Adamax, optim.Adadelta, optim.ASGD, optim.Rprop),
)


def check_shardable(
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    loose: Mapping[str, Tensor],
) -> None:
    """Check that networks and optimizers can be sharded.

    Args:
        networks: the networks by path.
        optimizers: the optimizers by path.
        loose: parameters that no network holds, by path.

    Raises:
        UsageError: for the first thing that cannot be sharded.
    """
    for path in loose:
        raise UsageError(
            f'Trainer(sharding="full") needs parameters that are in networks, but {path} is in '
            "none. Put it in a module."
        )
    for path, network in networks.items():
        _check_network(path, network)
    for path, optimizer in optimizers.items():
        _check_optimizer(path, optimizer)


def _check_network(path: str, network: nn.Module) -> None:
    for name, module in network.named_modules():
        place = ".".join(filter(None, (path, name)))
        if _is_wrapped(module):
            kind = type(module).__name__
            raise UsageError(
                'Trainer(sharding="full") needs networks that are neither compiled nor wrapped, '
                f'but {place} ({kind}) is. Assign the module itself, or use sharding="none".'
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                'Trainer(sharding="full") cannot train SyncBatchNorm, which sums in its own order, '
                f"but {place} is one. Use BatchNorm."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(place, module)
    for name, parameter in network.named_parameters():
        _check_parameter(f"{path}.{name}", parameter)
    check_hooks({f"{path}.{name}": each for name, each in network.named_parameters()})


def _check_embedding(place: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    for option in ("max_norm", "sparse"):
        if getattr(module, option):
            raise UsageError(
                'Trainer(sharding="full") needs embeddings with dense gradients whose forward does '
                f"not write to them, but {place} has {option}={getattr(module, option)}. Build it "
                "without."
            )


def _check_parameter(place: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise UsageError(
            f'Trainer(sharding="full") needs parameters with a shape, but {place} is lazy. Build '
            "the layer with all sizes, or run a batch through it in Model.setup()."
        )
    is_plain = type(parameter) is nn.Parameter and parameter.dtype.is_floating_point
    if not is_plain or parameter.dim() == 0 or parameter.numel() == 0:
        raise UsageError(
            'Trainer(sharding="full") needs dense floating-point parameters with dimensions and '
            f"elements, but {place} is a {type(parameter).__name__} of {parameter.dtype} and shape "
            f"{tuple(parameter.shape)}. Make it a buffer, or use a shape of (1,)."
        )
    if not parameter.is_contiguous():
        raise UsageError(
            f'Trainer(sharding="full") needs contiguous parameters, but {place} has the shape '
            f"{tuple(parameter.shape)} and the strides {parameter.stride()}. Call .contiguous() "
            "on the tensor that it is made of; convolutions must not be in channels_last."
        )


def check_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Check that no parameter has a hook, which shards would not call, or for a part of a sum.

    Args:
        parameters: the parameters by name.

    Raises:
        UsageError: if one has.
    """
    for name, each in parameters.items():
        if has_hooks(each):
            raise UsageError(
                f'Trainer(sharding="full") needs parameters without hooks, but {name} has one. '
                "Change gradients in on_optimizer_step_start, or use a hook of the module."
            )


def check_checkpointable(networks: Mapping[str, nn.Module], units: Mapping[str, nn.Module]) -> None:
    """Check that the activations of units can be computed again.

    Args:
        networks: the networks by path.
        units: the units by name.

    Raises:
        UsageError: for the first one that cannot be.
    """
    ids = {id(unit) for unit in units.values()}
    for path, network in networks.items():
        parts = dict(network.named_modules(prefix=path))
        if ids.isdisjoint(map(id, parts.values())):
            continue
        for place, module in parts.items():
            # What is compiled is not compiled again in backward, so both would not be equal.
            if _is_wrapped(module) or isinstance(module, torch.jit.ScriptModule):
                raise UsageError(
                    "Unit(..., checkpoint=True) needs networks that are neither compiled nor "
                    f"wrapped, but {place} ({type(module).__name__}) is. Assign the module itself, "
                    "or use checkpoint=False."
                )
    for name, unit in units.items():
        if any(map(is_lazy, unit.parameters())):
            raise UsageError(
                f"Unit(..., checkpoint=True) needs parameters with a shape, but {name} has lazy "
                "ones. Call it once in setup(), or use checkpoint=False."
            )


def _is_wrapped(module: nn.Module) -> bool:
    return unwrap(module) is not module or compiled_call(module) is not None


def _check_optimizer(path: str, optimizer: Optimizer) -> None:
    # One of the user says of itself that it works element by element.
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and getattr(kind, "is_elementwise", False) is not True:
        raise UsageError(
            f'Trainer(sharding="full") needs an optimizer that works element by element, but '
            f"{path} is {kind.__name__}. Use e.g. AdamW; if yours does, set is_elementwise = True "
            "in its class."
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            f'Trainer(sharding="full") needs optimizers without fused kernels, whose bits depend '
            f"on where a shard ends, but {path} has fused=True. Pass foreach=True instead."
        )


@final
class StepDraws:
    """Detects random numbers in the updates of a run."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @contextmanager
    def refused(self, optimizer: Optimizer, name: str) -> Iterator[None]:
        """Refuse random numbers in a step of an optimizer, in a ``with`` statement.

        In the first step of a start, and in those whose number is a power of two, each operation is
        checked. In all steps, the default generators are compared.

        Args:
            optimizer: the optimizer.
            name: what is called, for the error.

        Raises:
            UsageError: if some were drawn.
        """
        number = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        before = [*rng.read_states().values()]
        with nullcontext() if number & (number - 1) else _DrawWatch(name):
            yield
        if not all(map(_is_same_state, before, rng.read_states().values())):
            raise _make_draw_error(name)


@final
class _DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that draw random numbers, from whichever generator."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let what is compiled stay compiled: its bits would be others for this step only."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _make_draw_error(self._name)
        return func(*args, **(kwargs or {}))


def _is_same_state(before: Any, after: Any) -> bool:
    # The state of random is a tuple of 625 numbers.
    return bool(before == after) if isinstance(before, tuple) else same(before, after)


def _make_draw_error(name: str) -> UsageError:
    return UsageError(
        f"{name} must not draw random numbers with "
        'Trainer(sharding="full"), but it does: each process draws for its shards only, so the '
        "weights would depend on the number of processes. Nothing of this update is saved. Use an "
        'optimizer and an engine that draw none, or sharding="none".'
    )
