"""The only module that uses what PyTorch's FSDP2 does not document.

``tests/sharding/test_fsdp_adapter.py`` checks each of these, so that a PyTorch that has changed one
is named there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from helios.errors import UsageError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
except ImportError:  # an older PyTorch, which require_fsdp names
    DefaultAllGather = ReduceScatter = object  # type: ignore[assignment, misc]
try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors as _find_results
except ImportError:  # FSDP of an older PyTorch looks at leaves
    _find_results = tree_leaves  # type: ignore[assignment]

_NEEDED = (
    *("set_custom_all_gather", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms"),
    *("set_gradient_divide_factor", "set_reduce_scatter_unused_params", "reshard", "unshard"),
)

Notice: TypeAlias = Callable[[Tensor], None]


class Reduction(Protocol):
    """Adds the gradients of a unit over the processes, in place of FSDP's reduce-scatter."""

    def reduce(self, output: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> None:
        """Fill the output, of this process's shard, from a row per process."""
        ...


def require_fsdp() -> None:
    """Check that this PyTorch has what sharding needs.

    Raises:
        UsageError: if it has not.
    """
    missing = sorted({*_NEEDED}.difference(dir(FSDPModule)))
    if missing:
        raise UsageError(
            f'Trainer(sharding="full") needs a PyTorch whose FSDPModule has {", ".join(missing)}; '
            f'{torch.__version__} has not. Install a newer one, or use sharding="none".'
        )


def make_mesh(device: torch.device, num_processes: int) -> DeviceMesh:
    """Return the mesh of all processes."""
    return init_device_mesh(device.type, (num_processes,))


@final
class _Comm(ReduceScatter):
    """Calls a reduction where FSDP calls its reduce-scatter."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

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
class _Gather(DefaultAllGather):
    """FSDP's own, which calls a function before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._call()
        return super().__call__(*args, **kwargs)


@final
class ShardedUnit:
    """A module whose parameters are gathered and freed together.

    Args:
        module: the module, which :func:`shard_unit` has sharded.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module

    def use(self, reduction: Reduction) -> None:
        """Add gradients by a reduction of ours: no factors, and all parameters in every call."""
        module = self.module
        module.set_custom_reduce_scatter(_Comm(reduction))
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_reduce_scatter_unused_params(True)

    def before_gather(self, call: Callable[[], None]) -> None:
        """Call a function before the parameters are gathered from several processes."""
        self.module.set_custom_all_gather(_Gather(call))

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

        Whole parameters exist from the first forward on. To gather them here, twice a unit would
        have to fit into memory: once as it is received, and once cut into parameters.

        Args:
            notices: the functions, by the identity of the sharded parameter; emptied then.
        """

        def connect(*_: Any) -> None:
            for part in self._parts() if notices else ():
                notice = notices.pop(id(part.sharded_param), None)
                if notice is not None and part.unsharded_param.requires_grad:
                    part.unsharded_param.register_post_accumulate_grad_hook(notice)

        assert isinstance(self.module, nn.Module)
        # After FSDP's own. It stays, because a hook that comes or goes in training is reported.
        self.module.register_forward_pre_hook(connect)

    def watch_values(self, refuse: Callable[[Tensor], None]) -> None:
        """Call a function with a sharded parameter that a forward has written to, whole."""
        versions: list[int] = []

        def read() -> list[int]:
            return [part.unsharded_param._version for part in self._parts()]  # noqa: SLF001

        def compare(*_: Any) -> None:
            for part, before, after in zip(self._parts(), versions, read(), strict=True):
                if before != after:
                    refuse(part.sharded_param)

        assert isinstance(self.module, nn.Module)
        # After those of FSDP, which gathers in the first one.
        self.module.register_forward_pre_hook(lambda *_: versions.__setitem__(slice(None), read()))
        self.module.register_forward_hook(compare)

    def parameters(self) -> list[DTensor]:
        """Return the sharded parameters of this unit, without those of inner units."""
        return [part.sharded_param for part in self._parts()]

    def _parts(self) -> Iterator[Any]:
        for group in self.module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
            yield from group.fsdp_params


def shard_unit(module: nn.Module, mesh: DeviceMesh) -> ShardedUnit:
    """Shard the parameters of a module that inner units do not have.

    FSDP hangs a hook on each tensor that a forward returns. One that is a view, as ``nn.Linear``
    returns for three dimensions, would lose it when it is changed in place.
    """
    module.register_forward_hook(_return_no_views)
    sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(sharded, FSDPModule)
    return ShardedUnit(sharded)


def _return_no_views(module: nn.Module, inputs: Any, result: Any) -> Any:
    return tree_map_only(Tensor, _without_base, result)


def _without_base(tensor: Tensor) -> Tensor:
    is_view = tensor.requires_grad and tensor._is_view()  # noqa: SLF001 - no public name
    same: Tensor = _Same.apply(tensor) if is_view else tensor  # type: ignore[no-untyped-call]
    return same


@final
class _Same(torch.autograd.Function):
    """Returns a tensor with the same memory that is no view."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def steps_to(result: Any) -> list[Node]:
    """Return the last steps of autograd to the tensors of a forward's result.

    FSDP gathers the unit in backward when this comes to one of them.
    """
    found = (each.grad_fn for each in _find_results(result) if isinstance(each, Tensor))
    return [step for step in found if step is not None]


def is_ahead(step: Node) -> bool:
    """Return whether the backward that is running comes to a step, or has come to it."""
    return bool(torch._C._will_engine_execute_node(step))  # noqa: SLF001


def is_in_backward() -> bool:
    """Return whether autograd is running, as when activations are computed again."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001
