"""An engine without a trainer: joins processes, exchanges values, builds and saves components.

Sums run along the tree over processes, so their bits are the same on every backend. Tensors are
moved to the device that the backend needs, and the results back to the original device. The names
in the state of components do not depend on the engine, so any engine can unpack it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helios.core.wrappers import BareNames, bare_state_dict
from helios.distributed.collectives import get_dist_info, home_of, safe_barrier
from helios.distributed.process_groups import (
    DistributedInfo,
    collective,
    has_failed,
    is_dist_active,
    join_group,
    leave_group,
    own_membership,
)
from helios.engines import data_parallel
from helios.engines.data_parallel import make_reducer
from helios.engines.device import sync_to_device
from helios.errors import ArgumentError, ArgumentTypeError, RankError, StateError, UsageError
from helios.launch.launcher import Launch, LaunchKind
from helios.launch.spawning import spawn
from helios.replicas.named_sums import NumberReducer
from helios.replicas.replicas import Replicas
from helios.storage import codec, files
from helios.storage.files import as_local_path

_LOGGER = logging.getLogger(__name__)

_MODES = ("sum", "mean", "all")
_PARTS = ("model", "criterion", "optimizer", "scheduler")

Maker = Callable[..., Any] | None


def _as_device(device: object) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device, torch.device):
        return device
    rule = "Engine(device=...) must be a torch.device, the name of one or None"
    if not isinstance(device, str):
        raise ArgumentTypeError(f'{rule}, got {device!r}. Pass e.g. "cuda:1".')
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f'{rule}, got {device!r}. Pass e.g. "cuda:1". ({error})') from error


class StandaloneEngine:
    """A process on a device, without a trainer; the base of ``Engine``.

    All of it also works outside of a process group, as the only process of a run.

    Args:
        device: the device of this process, by object or name; ``None`` for the first GPU, or the
            CPU if there is none.

    Attributes:
        device: as given.

    Raises:
        ArgumentError: if the name of the device is unknown.
        ArgumentTypeError: if it is not a device.
    """

    _internals: ClassVar[str] = "_has_joined device"

    device: torch.device

    _replicas: Replicas

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = _as_device(device)
        self._has_joined = False

    def sync_device(self, value: Any) -> Any:
        """Return a value with its tensors, arrays and modules on the device.

        Copies dicts, lists, tuples, named tuples and dataclasses, moves tensors and modules, and
        converts NumPy arrays to tensors. Other values are returned unchanged.
        """
        return sync_to_device(value, self.device)

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0; -1 outside of a process group."""
        return get_dist_info().rank if self.is_ddp else -1

    @property
    def global_rank(self) -> int:
        """Number of this process among all, from 0; 0 outside of a process group too."""
        return max(self.rank, 0)

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0; -1 outside of a process group."""
        return get_dist_info().local_rank if self.is_ddp else -1

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return get_dist_info().world_size

    @property
    def backend(self) -> str | None:
        """Name of the process group's backend; ``None`` outside of a process group."""
        return str(dist.get_backend()) if self.is_ddp else None

    @property
    def is_ddp(self) -> bool:
        """Whether this process is in a process group."""
        return is_dist_active()

    @property
    def is_master_process(self) -> bool:
        """Whether this process is the first or the only one."""
        return self.rank <= 0

    @property
    def is_worker_process(self) -> bool:
        """Whether this process is not the first one."""
        return self.rank > 0

    def sync_tensor(self, tensor: Tensor, mode: str | None = None) -> Any:
        """Return a tensor's sum, mean or values over all processes; a collective call.

        Sums run along the tree over processes, so they do not depend on the backend.

        Args:
            tensor: the tensor of this process, which is not changed. No gradient flows back.
            mode: ``"sum"``; ``"mean"``, floating point also for integers; or ``"all"``, the list of
                the tensors in the order of ranks, whose shapes and types may differ. May be omitted
                in a single process, which gets the same tensor back in every mode.

        Raises:
            ArgumentError: if the mode is unknown, or missing with several processes.
            UsageError: if shapes or types differ in a sum or mean.
        """
        if mode not in (*_MODES, None):
            raise ArgumentError(
                f'sync_tensor(mode=...) must be "sum", "mean" or "all", got {mode!r}. Use one of '
                "them."
            )
        if not is_dist_active():
            return tensor
        if mode is None:
            raise ArgumentError(
                'sync_tensor(mode=...) must be "sum", "mean" or "all" with several processes, got '
                "None. Pass one of them."
            )
        if mode == "all":
            found = _gather_objects("sync_tensor", tensor.detach().cpu())
            return [each.to(tensor.device) for each in found]
        kinds = _gather_objects("sync_tensor", (tensor.dtype, tuple(tensor.shape)))
        if len(set(kinds)) > 1:
            raise UsageError(
                f'sync_tensor(mode="{mode}") must get tensors of one type and shape on all '
                f'processes, got {kinds}. Use mode="all" for shapes that differ.'
            )
        total = _add_over_processes(tensor)
        return total if mode == "sum" else total / len(kinds)

    def sync_metrics(self, metrics: Mapping[str, Any], weight: float = 1) -> Mapping[str, Any]:
        """Return the weighted mean of each metric over all processes; a collective call.

        Args:
            metrics: numbers by name; a process may lack one.
            weight: the weight of this process's metrics, such as its number of samples.

        Raises:
            ArgumentError: if the weight is negative or not finite.
            UsageError: if all weights of a metric are zero.
        """
        if not (isinstance(weight, int | float) and 0 <= weight < math.inf):
            raise ArgumentError(
                "Engine.sync_metrics(weight=...) must be a number of at least 0, got "
                f"{weight!r}. Pass the number of samples, or omit it."
            )
        if not self.is_ddp:
            return metrics
        return _average(metrics, weight)

    def barrier(self) -> None:
        """Wait until all processes have reached this call. Returns at once outside of a group."""
        safe_barrier()

    @contextmanager
    def ddp_sync_run(self) -> Iterator[None]:
        """Return a context whose block runs on rank 0 first, then on all others.

        Use it for downloads on rank 0 that other ranks read. If the block fails on one process,
        that process raises its error and all others a ``RankError`` that names it.
        """
        if not is_dist_active():
            yield
            return
        name, is_first = "ddp_sync_run", dist.get_rank() == 0
        if not is_first:
            _expect_success(name, _gather_objects(name, ""))
        try:
            yield
        except BaseException as error:
            if not has_failed():
                _gather_objects(name, f"{type(error).__name__}: {error}")
            raise
        if is_first:
            _gather_objects(name, "")
        _expect_success(name, _gather_objects(name, ""))

    def spawn(self, function: Callable[..., Any], *args: Any, num_processes: int = 1) -> list[Any]:
        """Run ``function(rank, *args)`` in processes that form a group, and return the results.

        Args:
            function: the function to run, defined at the top level of a module.
            *args: its arguments after the rank.
            num_processes: number of processes. One is a plain call in this process, without a
                group. On GPUs each process gets its own, starting with the first.
        """
        if num_processes == 1:
            return [function(max(self.rank, 0), *args)]
        devices = range(num_processes) if self.device.type == "cuda" else None
        return spawn(function, num_processes, args, devices=devices)

    def setup_process(
        self, rank: int | None = None, world_size: int | None = None, *, meeting: str = ""
    ) -> None:
        """Join the other processes, if there are any; not needed with a trainer.

        Afterwards a device without a number is this process's own.

        Args:
            rank: number of this process, from 0; omit it with a launcher (torchrun, srun).
            world_size: number of all processes; omit it with a launcher.
            meeting: where they connect, such as ``"file:///path"`` of a new file, or
                ``"tcp://host:port"``; omit it with a launcher.

        Raises:
            ArgumentError: if only one of ``rank`` and ``world_size`` is given.
            UsageError: if there is neither ``meeting`` nor a launcher.
        """
        launch = Launch.read()
        info = _find_place(launch, rank, world_size)
        is_alone = is_dist_active() or (rank is None and info.world_size == 1)
        meeting = meeting or launch.meeting
        if not is_alone and info.world_size > 1 and not meeting:
            raise UsageError(
                f"Engine.setup_process(world_size={info.world_size}) must know where the processes "
                'meet. Pass e.g. meeting="file:///tmp/run-17" of a file that does not exist yet, '
                "start the script with torchrun, or let Engine.spawn start the processes."
            )
        gpu = None
        if self.device.type == "cuda":
            gpu = self.device = _choose_gpu(self.device, launch, info)
            torch.cuda.set_device(gpu)
        if not is_alone:
            backend = "gloo" if gpu is None else "nccl"
            join_group(info, backend=backend, meeting=meeting, device=gpu)
            self._has_joined = True

    def cleanup_process(self, *, is_failing: bool = False) -> None:
        """Leave the group that :meth:`setup_process` has joined, if any.

        Args:
            is_failing: whether an error is being raised; then it does not wait for other processes.
        """
        if self._has_joined:
            self._has_joined = False
            leave_group(is_failing=is_failing)

    def wrap(self, module: nn.Module, *, sync_bn: bool = False, **options: Any) -> nn.Module:
        """Return a module whose backward computes the mean gradient of all processes.

        Use it for manual steps. If ``train_step`` returns its loss, the engine sums the gradients
        itself. Outside of a process group the result is the module itself, moved to the device.
        In a process group it is PyTorch's ``DistributedDataParallel`` with sums along the tree, bit
        for bit those of the default path. A module that is wrapped already is returned unchanged.

        Args:
            module: the module, which is moved to the device.
            sync_bn: synchronize BatchNorm statistics over all processes; on GPUs only.
            **options: of ``DistributedDataParallel``, such as ``find_unused_parameters``.

        Raises:
            UsageError: if a process runs several replicas.
        """
        return data_parallel.wrap(
            module, self.device, self._replicas, sync_bn=sync_bn, options=options
        )

    def init_components(
        self,
        model_fn: Maker = None,
        criterion_fn: Maker = None,
        optimizer_fn: Maker = None,
        scheduler_fn: Maker = None,
        *,
        sync_bn: bool = False,
    ) -> tuple[Any, Any, Any, Any]:
        """Build model, criterion, optimizer and scheduler, in this order.

        Each function may be ``None``, and each may return one object or a dict of them.

        Args:
            model_fn: returns the model, which is moved to the device and wrapped.
            criterion_fn: returns the criterion, which is moved to the device.
            optimizer_fn: is called with the model, on the device and not wrapped.
            scheduler_fn: is called with the optimizer.
            sync_bn: as in :meth:`wrap`.

        Returns:
            All four, with ``None`` for those that were omitted.

        Raises:
            ArgumentError: if the model is neither a module nor a dict of modules.
        """
        bare: Any = None if model_fn is None else model_fn()
        model = bare
        if isinstance(bare, dict):
            model = {name: self.wrap(part, sync_bn=sync_bn) for name, part in bare.items()}
        elif model_fn is not None:
            model = self.wrap(bare, sync_bn=sync_bn)
        criterion = None if criterion_fn is None else self.sync_device(criterion_fn())
        optimizer = None if optimizer_fn is None else optimizer_fn(bare)
        scheduler = None if scheduler_fn is None else scheduler_fn(optimizer)
        return model, criterion, optimizer, scheduler

    def deinit_components(self, *, is_failing: bool = False) -> None:
        """Release what the engine holds, and leave the group it has joined; may be called twice.

        Args:
            is_failing: as in :meth:`cleanup_process`.
        """
        self.teardown()
        self.cleanup_process(is_failing=is_failing)

    def teardown(self) -> None:
        """Release what the engine holds. Called on every exit path, before any other teardown."""

    def _scaler_state(self) -> dict[str, Any]:
        """Return the scaler's state, if the precision has a scaler."""
        return {}

    def _load_scaler(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler's state, if there is one."""

    def pack_checkpoint(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Return the states of parts as one dict, whose names do not depend on the engine.

        A part gives ``"<part>_state_dict"``, a dict of parts ``"<part>_<key>_state_dict"``, and
        the scaler of fp16 ``"scaler"``. ``None`` is skipped.

        Args:
            model: an object with a state, or a dict of such; the same for the next three.
            criterion: as ``model``.
            optimizer: as ``model``.
            scheduler: as ``model``.
            **extra: is added unchanged.

        Raises:
            ArgumentError: if a name is taken.
        """
        parts = (model, criterion, optimizer, scheduler)
        table = _flatten(dict(zip(_PARTS, parts, strict=True)))
        packed = {key: bare_state_dict(part) for key, part in table} | self._scaler_state()
        taken = sorted(packed.keys() & extra.keys())
        if taken:
            raise ArgumentError(
                f"pack_checkpoint({taken[0]}=...) must have another name, because a part already "
                "uses this one. Rename it."
            )
        return {**packed, **extra}

    def unpack_checkpoint(
        self,
        checkpoint: Mapping[str, Any],
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        strict: bool = False,
    ) -> None:
        """Load the states of parts, from any engine.

        Args:
            checkpoint: what :meth:`pack_checkpoint` has returned.
            model: an object, or a dict of such; the same for the next three.
            criterion: as ``model``.
            optimizer: as ``model``.
            scheduler: as ``model``.
            strict: raise an error instead of a warning if a part has no state in the checkpoint.

        Raises:
            StateError: if ``strict`` and the state of a part is missing.
        """
        parts = (model, criterion, optimizer, scheduler)
        found = list(_flatten(dict(zip(_PARTS, parts, strict=True))))
        missing = [key for key, _ in found if key not in checkpoint]
        if missing:
            text = f"The checkpoint has no {', '.join(missing)} (only {', '.join(checkpoint)})."
            if strict:
                raise StateError(f"{text} Omit those parts, or pass strict=False.")
            _LOGGER.warning("%s Those parts are not changed.", text)
        for key, part in found:
            if key in checkpoint:
                _load_state(part, checkpoint[key])
        self._load_scaler(checkpoint)

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Path | str) -> None:
        """Write a checkpoint atomically, on the master process only.

        Other processes return at once: call :meth:`barrier` before they read it.

        Raises:
            StateError: if a value could not be loaded again; the message names it.
            OSError: what the file system raises.
        """
        if not self.is_master_process:
            return
        target = as_local_path("save_checkpoint(path=...)", path)
        tree = codec.encode(dict(checkpoint), where="checkpoint")
        files.make_folder(target.parent)
        with files.replacing(target) as partial:
            codec.write_file(partial, tree)

    def load_checkpoint(self, path: Path | str) -> Any:
        """Return the checkpoint in a file, with tensors on the CPU, without executing its code."""
        return codec.read(as_local_path("load_checkpoint(path=...)", path))


def _find_place(launch: Launch, rank: int | None, world_size: int | None) -> DistributedInfo:
    if rank is None and world_size is None:
        return launch.info
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ArgumentError(
            "Engine.setup_process(rank=..., world_size=...) must get both, with 0 <= rank < "
            f"world_size, or neither, got rank={rank}, world_size={world_size}. Omit both "
            "if torchrun, srun or Engine.spawn has started the processes."
        )
    known = launch.info
    if (known.rank, known.world_size) == (rank, world_size):
        return known
    if known.world_size > 1:
        raise UsageError(
            f"Engine.setup_process(rank={rank}, world_size={world_size}) must agree with the "
            f"launcher: rank {known.rank} of {known.world_size}. Omit both."
        )
    return DistributedInfo(rank, rank, world_size, world_size)


def _choose_gpu(device: torch.device, launch: Launch, info: DistributedInfo) -> torch.device:
    """Return the GPU of a process: the one given by number, or else its own on its machine."""
    if device.index is not None:
        return device
    is_chosen = launch.kind is LaunchKind.SPAWN
    return torch.device("cuda", torch.cuda.current_device() if is_chosen else info.local_rank)


def _flatten(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key of each state and the object that has it."""
    for name, part in parts.items():
        if isinstance(part, dict):
            yield from ((f"{name}_{key}_state_dict", member) for key, member in part.items())
        elif part is not None:
            yield f"{name}_state_dict", part


def _load_state(part: Any, state: dict[str, Any]) -> None:
    if not isinstance(part, nn.Module):
        part.load_state_dict(state)
        return
    names = BareNames(part)
    bare = names.strip(state)
    present = {names.of(name): name for name in part.state_dict()}
    part.load_state_dict({present.get(name, name): value for name, value in bare.items()})


def _add_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum over all processes along the tree; for bool tensors the count of True."""
    with torch.no_grad():
        whole = tensor.detach().long() if tensor.dtype is torch.bool else tensor.detach()
        flat = whole.to(home_of(tensor), copy=True).contiguous().reshape(-1)
        reducer = make_reducer()
        with collective("sync_tensor"):
            total = reducer.all_reduce({reducer.nodes[0]: flat})
        return total.view(tensor.shape).to(tensor.device)


def _gather_objects(name: str, value: Any) -> list[Any]:
    """Return a small value of every process, in the order of ranks.

    Args:
        name: the caller, for messages.
        value: the value of this process, which is pickled.
    """
    found: list[Any] = [None] * dist.get_world_size()
    known = own_membership()
    with collective(name):
        dist.all_gather_object(found, value, group=None if known is None else known.control)
    return found


def _expect_success(name: str, texts: list[str]) -> None:
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise RankError(
            f"{name}() was aborted because its block failed on {'; '.join(failed)}. Fix the error "
            "there; this process has no error of its own."
        )


def _average(metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
    """Return weighted means over the processes that have a metric; see ``Engine.sync_metrics``."""
    count, home = dist.get_world_size(), home_of(torch.empty(0))
    reducer = NumberReducer(count, num_processes=count, rank=dist.get_rank(), device=home)
    with collective("sync_metrics"):
        sums = reducer.sum_scores(
            [{key: (float(metrics[key]) * weight, weight) for key in metrics}]
        )
    empty = [name for name, (_, total) in sums.items() if total == 0]
    if empty:
        raise UsageError(
            f"sync_metrics(weight=...) must be positive on at least one process for {empty}, "
            "got 0 on all. Omit metrics without samples."
        )
    return {name: total / weights for name, (total, weights) in sums.items()}
