"""Published import path of the functions of :mod:`helios.distributed`."""

from helios.distributed.collectives import (
    all_reduce_tensors,
    gather_into_tensor,
    get_dist_info,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_world_size,
    global_print,
    init_dist,
    is_using_torchrun,
    local_print,
    safe_barrier,
    shutdown_dist,
)
from helios.distributed.process_groups import (
    DistributedInfo,
    is_dist_active,
)

__all__ = [
    "DistributedInfo",
    "all_reduce_tensors",
    "gather_into_tensor",
    "get_dist_info",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_world_size",
    "global_print",
    "init_dist",
    "is_dist_active",
    "is_using_torchrun",
    "local_print",
    "safe_barrier",
    "shutdown_dist",
]
