"""Wraps a module that sums its gradients over processes during backward, for manual steps.

It is PyTorch's own ``DistributedDataParallel`` with sums along the tree, so its bits equal those of
the default path, where the loops add gradients after backward.
"""

# No postponed annotations here: PyTorch compares a communication hook's annotations with classes.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helios.core.wrappers import inside
from helios.distributed.collectives import home_of
from helios.distributed.process_groups import collective, is_dist_active
from helios.errors import UsageError
from helios.replicas.replicas import Replicas
from helios.replicas.tree_reducer import TreeReducer


def wrap(
    module: nn.Module,
    device: torch.device,
    replicas: Replicas,
    *,
    sync_bn: bool = False,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a module whose backward computes the mean gradient; see ``Engine.wrap``."""
    options = options or {}
    module = module.to(device)
    if not is_dist_active() or is_wrapped(module):
        return module
    count = dist.get_world_size()
    if replicas.num_replicas not in (1, count):
        raise UsageError(
            f"Engine.wrap(...) needs one process per replica, but num_replicas is "
            f"{replicas.num_replicas} and the number of processes is {count}. Start one process "
            "per replica, or return the loss from train_step."
        )
    if sync_bn:
        if device.type == "cpu":
            raise UsageError(
                "Engine.wrap(sync_bn=True) needs GPUs: PyTorch's SyncBatchNorm does not work on "
                "the CPU. Omit it there."
            )
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    ids = None if device.type == "cpu" else [device]
    with collective("wrap"):
        wrapped = DistributedDataParallel(module, device_ids=ids, **options)
        wrapped.register_comm_hook(make_reducer(), _add_along_tree)
    return wrapped


def make_reducer() -> TreeReducer:
    """Return a reducer for one tensor of each process of the default group."""
    count, rank = dist.get_world_size(), dist.get_rank()
    return TreeReducer(count, num_processes=count, rank=rank)


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module already sums its gradients over processes."""
    layer: nn.Module | None = module
    while layer is not None:
        if isinstance(layer, DistributedDataParallel):
            return True
        layer = inside(layer)
    return False


def _add_along_tree(
    reducer: TreeReducer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Compute the mean of a bucket; the wrapper calls this hook when its gradients are ready."""
    buffer = bucket.buffer()
    with torch.no_grad(), collective("backward"):
        flat = buffer.to(home_of(buffer))
        total = reducer.all_reduce({reducer.nodes[0]: flat})
        if total.data_ptr() != buffer.data_ptr():
            buffer.copy_(total)
    buffer.div_(dist.get_world_size())
    devices = [] if buffer.device.type == "cpu" else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
