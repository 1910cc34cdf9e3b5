"""The engine: runs backward, clipping and updates on a device, and sums over processes.

An engine is a device, a precision and the replicas of a run, each a small object of its own. It
decides nothing: the optimizer loop calls it in the order of an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.tracebacks import with_short_constructor
from helios.core.utils import parameters_of
from helios.engines import data_parallel
from helios.engines.clipping import Clipping
from helios.engines.components import Maker, build_model
from helios.engines.device import device_of_rank, select_gpus
from helios.engines.numerics import numerics as numerics
from helios.engines.precision import Precision, check_precision
from helios.engines.process_member import redefines
from helios.engines.scaler import LossScaler
from helios.engines.sharding_engine import ShardingEngine
from helios.errors import ArgumentError
from helios.launch.launcher import Launch
from helios.replicas.gradients import FindNetworks, divide, make_gradients
from helios.replicas.replicas import Replicas


@with_short_constructor
class Engine(ShardingEngine):
    """A device, a precision and the replicas of a run, and what is done with a loss there.

    This is the only engine class. Subclass it and override a method to change what it does.

    Args:
        device: the device of the training, by object or name; ``None`` for the first GPU, or the
            CPU if there is none.
        clip_norm: maximum 2-norm of the gradients of a step.
        clip_value: maximum magnitude of each element of the gradients.
        precision: the type in which the steps of the model compute.
        bucket_bytes: with several processes, send gradients in buckets of at least this many bytes
            during backward; ``None`` to send all of them after it. The bits are the same.

    Attributes:
        device: the device of the training.
        unsaved: names of attributes that training changes and that no checkpoint needs.

    Raises:
        ArgumentError: if the name of the device is unknown, a limit is not a positive number, both
            limits are set, or ``bucket_bytes`` is below 1.
        ArgumentTypeError: if ``device`` is not a device, or ``precision`` is not a precision.
    """

    _internals: ClassVar[str] = (
        "_bucket_bytes _clipping _clips _clips_by_rows _gradient_norm _gradients _is_scaled "
        "_open_micro_batches _precision _replicas _scaler _sends_early"
    )
    unsaved: ClassVar[tuple[str, ...]] = ()

    # Shared with the loops and the start of a run, and hidden from completion.
    _clips: bool
    """Whether :meth:`clip_gradients` does anything."""
    _clips_by_rows: bool
    """Whether the norm is summed by rows, as for sharded gradients."""
    _gradient_norm: Tensor | None
    """The norm before ``clip_norm`` was last applied in this iteration; ``None`` if it was not."""
    _open_micro_batches: int
    """Number of micro-batches that the open window has so far."""
    _sends_early: bool
    """Whether gradients are sent during backward."""

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: Precision = Precision.FP32,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(device)
        check_precision(precision)
        if bucket_bytes is not None and (type(bucket_bytes) is not int or bucket_bytes < 1):
            raise ArgumentError(
                "Engine(bucket_bytes=...) must be None or a positive int, got "
                f"{bucket_bytes!r}. Pass 25 * 2**20, or omit it."
            )
        self._bucket_bytes = bucket_bytes
        self._precision = precision
        self._clipping = Clipping(clip_norm, clip_value)
        self._gradient_norm = None
        self.replicas = Replicas()
        self._open_micro_batches = 0
        self._scaler: LossScaler | None = None

    @property
    def replicas(self) -> Replicas:
        """The replicas of the run, set by the trainer."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._gradients = make_gradients(replicas)
        self._clips_by_rows = replicas.is_sharded and self._clipping.clip_norm is not None
        # Every update reads these, so they are determined here, at the start of a run.
        is_own = redefines(self, Engine, "unscale_gradients")
        self._is_scaled = self._precision.scaler is not None or is_own
        is_own = redefines(self, Engine, "clip_gradients")
        self._clips = bool(self._clipping.set_options) or self._is_scaled or is_own
        is_late = (
            self._bucket_bytes is None
            or replicas.has_single_process
            or replicas.is_sharded_over_processes
        )
        self._sends_early = not is_late

    @property
    def precision(self) -> Precision:
        """The type in which the steps of the model compute."""
        return self._precision

    @property
    def _automatic_options(self) -> list[str]:
        """The arguments that are set and only affect automatic steps."""
        return [f"Trainer({name}=...)" for name in self._clipping.set_options]

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the model's steps run."""
        return self._precision.autocast(self.device)

    def _count_micro_batch(self) -> None:
        """Count a micro-batch of the open window, before its first backward."""
        self._open_micro_batches += 1

    def close_window(self) -> None:
        """Begin a new window after its last update, and drop gradients that were not used.

        In fp16 this adjusts the loss scale, once for all optimizers: all gradients of a window
        must have the same scale.
        """
        self._open_micro_batches = 0
        if self._scaler is not None:
            self._scaler.close_window()
        if self._gradients.is_open:
            self._gradients.close_window()

    def backward_loss(
        self,
        loss: Tensor,
        inputs: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Add a micro-batch's gradients to those of the window, scaled in fp16.

        Args:
            loss: the loss.
            inputs: the only parameters that receive gradients; ``None`` for all.
            retain_graph: whether another backward follows through the same graph, as for
                ``Tensor.backward``.
        """
        scaler = self._find_scaler() if self._is_scaled else None
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward(retain_graph=retain_graph or None, inputs=inputs)  # type: ignore[no-untyped-call]

    def _collect_gradients(
        self,
        optimizer: Optimizer,
        replica: int,
        *,
        ends_window: bool,
        find_networks: FindNetworks = dict,
    ) -> None:
        """Take the gradients of one of several replicas, so that the next one starts from zero.

        Args:
            optimizer: the optimizer of the parameters.
            replica: number of the replica that has run backward.
            ends_window: whether this is the replica's last micro-batch of the window.
            find_networks: returns the networks by path, to name parameters in messages.

        Raises:
            UsageError: if parameters were added to or removed from the optimizer within the window.
        """
        self._gradients.collect(optimizer, replica, find_networks, ends_window=ends_window)

    def _sending_gradients(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks = dict
    ) -> AbstractContextManager[None]:
        """Return a context manager that sends gradients during the last backward of a window.

        Args:
            optimizer: the optimizer of the parameters.
            replica: number of the last replica of this process.
            find_networks: as in :meth:`_collect_gradients`.
        """
        assert self._bucket_bytes is not None
        return self._gradients.sending(optimizer, replica, find_networks, self._bucket_bytes)

    def _drop_old_gradients(self, optimizer: Optimizer) -> None:
        """Drop gradients that are older than the run, or than the optimizer's parameters.

        Only with several replicas, whose sum would include them.
        """
        self._gradients.drop_old(optimizer)

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of a window over its micro-batches and all replicas.

        The sum is divided once, after the last addition, and then unscaled.
        """
        if self._gradients.is_open:
            self._gradients.finish(optimizer)
        count = self._open_micro_batches * self._replicas.num_replicas
        if count > 1:
            divide(optimizer, count)
        if self._is_scaled:
            self.unscale_gradients(optimizer)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale of fp16, once per window even if called again.

        Raises:
            UsageError: after the optimizer's step of the same window.
        """
        scaler = self._find_scaler()
        if scaler is not None:
            scaler.unscale(optimizer)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the unscaled gradients by norm or by value, if the options say so.

        Args:
            optimizer: the optimizer of the parameters.
        """
        self.unscale_gradients(optimizer)
        find_norm = self.find_norm if self._clips_by_rows else None
        self._gradient_norm = self._clipping.apply(parameters_of(optimizer), find_norm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters, and return whether the step was committed.

        In fp16 the update is skipped if a gradient is infinite or NaN: the loss scale was too
        large.
        """
        scaler = self._find_scaler() if self._is_scaled else None
        if scaler is not None:
            scaler.unscale(optimizer)
            if not scaler.is_finite(optimizer):
                return False
        optimizer.step()
        return True

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Set the gradients to None."""
        optimizer.zero_grad(set_to_none=True)

    def teardown(self) -> None:
        """Release what the engine holds. Called on every exit path, before any other teardown."""
        self._open_micro_batches = 0
        self._gradients = make_gradients(self._replicas)
        self._scaler = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of micro-batches in the open window, and in fp16 the scaler's state."""
        return {"open_micro_batches": self._open_micro_batches, **self._scaler_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. The scaler's part may be missing or superfluous."""
        self._open_micro_batches = state_dict["open_micro_batches"]
        self._scaler = None
        self._load_scaler(state_dict)

    def _find_scaler(self) -> LossScaler | None:
        """Return the loss scaler, or ``None`` if the precision needs none."""
        options = self._precision.scaler
        if self._scaler is None and options is not None:
            self._scaler = LossScaler(options, self.device)
        return self._scaler

    def _scaler_state(self) -> dict[str, Any]:
        scaler = self._find_scaler()
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def _load_scaler(self, state: Mapping[str, Any]) -> None:
        scaler = self._find_scaler()
        if scaler is not None and "scaler" in state:
            scaler.load_state_dict(state["scaler"])

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
            module, self.device, self.replicas, sync_bn=sync_bn, options=options
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
        bare, model = build_model(model_fn, lambda module: self.wrap(module, sync_bn=sync_bn))
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

    @classmethod
    def auto(
        cls,
        *,
        use_cpu: bool | None = None,
        gpus: list[int] | None = None,
        precision: Precision | str = Precision.FP32,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Engine:
        """Return an engine for the available devices: this process's own GPU, or the CPU.

        Args:
            use_cpu: True for the CPU; False to require a GPU; ``None`` for a GPU if there is one.
            gpus: ids of the GPUs to choose from; ``None`` for all.
            precision: a precision, or its name.
            clip_norm: as in the constructor.
            clip_value: as in the constructor.

        Raises:
            ArgumentError: if arguments contradict each other, or a GPU does not exist.
            UsageError: if ``use_cpu=False`` and there is no GPU for this process.
        """
        ids = select_gpus(use_cpu, gpus, caller="Engine.auto")
        return cls(
            device_of_rank(ids, Launch.read().local_rank),
            clip_norm=clip_norm,
            clip_value=clip_value,
            precision=Precision.from_str(precision) if isinstance(precision, str) else precision,
        )
