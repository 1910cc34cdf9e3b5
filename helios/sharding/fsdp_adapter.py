"""Uses PyTorch's FSDP2: when it gathers, what adds gradients, and what is watched.

``tests/sharding/test_fsdp_adapter.py`` checks undocumented behavior of FSDP, so that a PyTorch that
has changed it fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from helios.core.sharded_tensors import is_sharded
from helios.core.utils import map_container, version_of
from helios.errors import UsageError

_NEEDED = (
    *("set_custom_all_gather", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms"),
    *("set_gradient_divide_factor", "set_reduce_scatter_unused_params", "reshard", "unshard"),
)

# PyTorch has renamed it, and warns of the old name.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Notice: TypeAlias = Callable[[Tensor], None]


class Reduction(Protocol):
    """Adds the gradients of a unit over the processes, in place of FSDP's reduce-scatter."""

    def reduce(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        """Fill the output, of this process's shard, from a row per process."""
        ...


def require_fsdp() -> None:
    """Check that this PyTorch has what sharding needs.

    Raises:
        UsageError: if it does not.
    """
    missing = sorted({*_NEEDED}.difference(dir(FSDPModule)))
    if missing:
        raise UsageError(
            f'Trainer(sharding="full") needs a PyTorch whose FSDPModule has {", ".join(missing)}; '
            f'{torch.__version__} does not. Install a newer one, or use sharding="none".'
        )


def make_mesh(device: torch.device, num_processes: int) -> DeviceMesh:
    """Return the mesh of all processes."""
    return init_device_mesh(device.type, (num_processes,))


class _Comm:
    """The interface of FSDP's collectives."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _ReduceScatter(_Comm):
    """Calls a reduction where FSDP calls its reduce-scatter."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "gradients are summed, and divided once at the end"
        assert not async_op, "FSDP waits for events of the stream"
        self._reduction.reduce(output_tensor, input_tensor.view(group.size(), -1), group)


@final
class _AllGather(_Comm):
    """Gathers as FSDP does, and calls a function before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._call()
        work: dist.Work | None = _gather_into(output_tensor, input_tensor, group, async_op)
        return work


@final
class ShardedUnit:
    """A module whose parameters are gathered and freed together.

    Args:
        module: the module, which :func:`shard_unit` has sharded.
        places: the modules that hold its parameters, and their names there.
    """

    def __init__(self, module: FSDPModule, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.module = module
        self._places = places
        self._sharded = self._read()

    def _read(self) -> list[Tensor]:
        """Return the parameters as they are now: whole while they are gathered, else sharded."""
        return [getattr(module, name) for module, name in self._places]

    def use(self, reduction: Reduction) -> None:
        """Add gradients with our own reduction: no factors, and all parameters in every call."""
        module = self.module
        module.set_custom_reduce_scatter(_ReduceScatter(reduction))  # type: ignore[arg-type]
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_reduce_scatter_unused_params(True)

    def before_gather(self, call: Callable[[], None]) -> None:
        """Call a function before the parameters are gathered from several processes."""
        self.module.set_custom_all_gather(_AllGather(call))  # type: ignore[arg-type]

    def before_forward(self, call: Callable[..., None]) -> None:
        """Call a function before the parameters are gathered for a forward of the module."""
        assert isinstance(self.module, nn.Module)
        self.module.register_forward_pre_hook(call, prepend=True)

    def after_forward(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        """Call a function with module, inputs and result after each forward of the module."""
        assert isinstance(self.module, nn.Module)
        self.module.register_forward_hook(call)

    def watch_gradients(self, notices: dict[int, Notice]) -> None:
        """Call a function when a parameter has got its gradient in a backward.

        Full parameters exist from the first forward on. Gathering them here would need memory for
        two copies of a unit: one as received, and one split into parameters.

        Args:
            notices: the functions, by the identity of the sharded parameter; emptied then.
        """

        def connect(*_: Any) -> None:
            parameters: list[Any] = self._read() if notices else []
            for sharded, whole in zip(self._sharded, parameters, strict=False):
                notice = notices.pop(id(sharded), None)
                if notice is not None and whole.requires_grad:
                    whole.register_post_accumulate_grad_hook(notice)

        assert isinstance(self.module, nn.Module)
        # After FSDP's own. It stays, because a hook that comes or goes in training is reported.
        self.module.register_forward_pre_hook(connect)

    def watch_values(self, refuse: Callable[[Tensor], None]) -> None:
        """Call a function with a sharded parameter that a forward has written to, whole."""
        before: list[tuple[Tensor, int]] = []

        def read(*_: Any) -> None:
            before[:] = [(whole, version_of(whole)) for whole in self._read()]

        def compare(*_: Any) -> None:
            for sharded, (whole, version) in zip(self._sharded, before, strict=True):
                if version_of(whole) != version:
                    refuse(sharded)

        assert isinstance(self.module, nn.Module)
        # After those of FSDP, which gathers in the first one.
        self.module.register_forward_pre_hook(read)
        self.module.register_forward_hook(compare)

    def parameters(self) -> list[Tensor]:
        """Return the sharded parameters of this unit, without those of inner units."""
        return list({id(parameter): parameter for parameter in self._sharded}.values())


def shard_unit(module: nn.Module, mesh: DeviceMesh) -> ShardedUnit:
    """Shard the parameters of a module that inner units do not have.

    FSDP hangs a hook on each tensor that a forward returns. One that is a view, as ``nn.Linear``
    returns for three dimensions, would lose it when it is changed in place.
    """
    module.register_forward_hook(_return_no_views)
    places = [
        (part, name)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if not is_sharded(parameter)
    ]
    sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(sharded, FSDPModule)
    return ShardedUnit(sharded, places)


def _return_no_views(module: nn.Module, inputs: Any, result: Any) -> Any:
    return _without_base(result)


def _without_base(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return map_container(result, _without_base)
    is_computed = result.grad_fn is not None and torch.is_grad_enabled()
    return _Same.apply(result) if is_computed else result  # type: ignore[no-untyped-call]


@final
class _Same(torch.autograd.Function):
    """Returns a tensor with the same memory that is no view."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient
