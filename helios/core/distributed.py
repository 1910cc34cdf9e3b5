"""Published import path of the functions of :mod:`helios.distributed`."""

from helios.distributed.collectives import all_reduce_tensors as all_reduce_tensors
from helios.distributed.collectives import gather_into_tensor as gather_into_tensor
from helios.distributed.collectives import get_dist_info as get_dist_info
from helios.distributed.collectives import get_global_rank as get_global_rank
from helios.distributed.collectives import get_local_rank as get_local_rank
from helios.distributed.collectives import get_local_world_size as get_local_world_size
from helios.distributed.collectives import get_world_size as get_world_size
from helios.distributed.collectives import global_print as global_print
from helios.distributed.collectives import init_dist as init_dist
from helios.distributed.collectives import is_using_torchrun as is_using_torchrun
from helios.distributed.collectives import local_print as local_print
from helios.distributed.collectives import safe_barrier as safe_barrier
from helios.distributed.collectives import shutdown_dist as shutdown_dist
from helios.distributed.process_groups import DistributedInfo as DistributedInfo
from helios.distributed.process_groups import is_dist_active as is_dist_active
