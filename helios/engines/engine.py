"""What a device does with a loss, and what the processes of a run do together.

An engine is a device, a precision and the replicas of a run, each a small object of its own. It
decides nothing: the optimizer loop calls it in the order of DESIGN section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helios.core.parameters import parameters_of
from helios.engines import data_parallel
from helios.engines.clipping import Clipping
from helios.engines.components import ComponentState, Maker, build_model
from helios.engines.device import device_of_rank, select_gpus
from helios.engines.numerics import numerics as numerics
from helios.engines.precision import Precision, check_precision
from helios.engines.process_member import redefines
from helios.engines.scaler import LossScaler
from helios.errors import ArgumentError
from helios.launch.launcher import Launch
from helios.replicas.gradients import FindNetworks, divide, make_gradients
from helios.replicas.replicas import Replicas


class Engine(ComponentState):
    """A device, a precision and the replicas of a run; what is done with a loss there.

    The one class: derive from it and override a method to change what it does (E40).

    Args:
        device: where the training runs, by object or name; ``None`` for the first GPU, or the CPU
            where there is none (E3).
        clip_norm: largest 2-norm of the gradients of a step.
        clip_value: largest magnitude of an element of them.
        precision: the type in which the steps of the model compute.
        bucket_bytes: on several processes, send gradients in buckets of at least so many bytes
            while backward goes on; ``None`` for all of them behind it. The bits are the same.

    Attributes:
        device: where the training runs.
        sends_early: whether gradients are sent while backward goes on.
        clips: whether :meth:`clip_gradients` does anything.
        unsaved: names of attributes that training changes and that no checkpoint needs.

    Raises:
        ArgumentError: for a name that is no device's, and for a limit that is no positive number,
            or for both limits at once; for a ``bucket_bytes`` below 1.
        ArgumentTypeError: for something else than a device, and than a precision.
    """

    _internals: ClassVar[str] = (
        "_bucket_bytes _clipping _gradients _is_scaled _open_micro_batches _precision _replicas "
        "_scaler clips sends_early"
    )
    unsaved: ClassVar[tuple[str, ...]] = ()

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
                f"{bucket_bytes!r}. Pass 25 * 2**20, or leave it out."
            )
        self._bucket_bytes = bucket_bytes
        self._precision = precision
        self._clipping = Clipping(clip_norm, clip_value)
        self.replicas = Replicas()
        self._open_micro_batches = 0
        self._scaler: LossScaler | None = None

    @property
    def replicas(self) -> Replicas:
        """The replicas of the run; the trainer sets them."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._gradients = make_gradients(replicas)
        # Asked in every update, so they are settled here, at the start of a run.
        is_own = redefines(self, Engine, "unscale_gradients")
        self._is_scaled = self._precision.scaler is not None or is_own
        is_own = redefines(self, Engine, "clip_gradients")
        self.clips = bool(self._clipping.set_options) or self._is_scaled or is_own
        is_own = redefines(self, Engine, "collect_gradients")
        self.sends_early = not (self._bucket_bytes is None or replicas.is_whole or is_own)

    @property
    def precision(self) -> Precision:
        """The type in which the steps of the model compute."""
        return self._precision

    @property
    def automatic_options(self) -> list[str]:
        """The arguments that only automatic steps obey, where they are set."""
        return [f"Trainer({name}=...)" for name in self._clipping.set_options]

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the steps of the model run."""
        return self._precision.autocast(self.device)

    def count_micro_batch(self) -> None:
        """Count a micro-batch of the open window; before its first backward."""
        self._open_micro_batches += 1

    def close_window(self) -> None:
        """Begin a new window; after its last update. What was collected and not used is dropped.

        In fp16 the scale is adjusted here, once for all optimizers: gradients of a window must
        have the same.
        """
        self._open_micro_batches = 0
        if self._scaler is not None:
            self._scaler.close_window()
        if self._gradients.is_open:
            self._gradients.close_window()

    def backward_loss(self, loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Add a micro-batch's gradients to those of the window; scaled in fp16 (E21, E22).

        Args:
            loss: the loss.
            inputs: the only parameters that get gradients; ``None`` for all.
        """
        scaler = self._find_scaler() if self._is_scaled else None
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def collect_gradients(
        self,
        optimizer: Optimizer,
        replica: int,
        *,
        ends_window: bool,
        find_networks: FindNetworks = dict,
    ) -> None:
        """Take the gradients of one of several replicas away, so that the next one begins anew.

        Args:
            optimizer: whose parameters have them.
            replica: number of the replica, whose backward this was.
            ends_window: whether it is the last one of the window.
            find_networks: returns the networks by path, to name parameters in messages.

        Raises:
            UsageError: if the optimizer has got or lost parameters inside of the window.
        """
        self._gradients.collect(optimizer, replica, find_networks, ends_window=ends_window)

    def sending_gradients(
        self, optimizer: Optimizer, replica: int, find_networks: FindNetworks = dict
    ) -> AbstractContextManager[None]:
        """Send gradients while the last backward of a window goes on, in a ``with`` statement.

        Args:
            optimizer: whose parameters have them.
            replica: number of the replica, the last one of this process.
            find_networks: as in :meth:`collect_gradients`.
        """
        assert self._bucket_bytes is not None
        return self._gradients.sending(optimizer, replica, find_networks, self._bucket_bytes)

    def drop_old_gradients(self, optimizer: Optimizer) -> None:
        """Drop gradients that are older than the run, or than the parameters of an optimizer.

        With several replicas only, whose sum they would enter.
        """
        self._gradients.drop_old(optimizer)

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Make the mean of a window's gradients: over its micro-batches and all replicas.

        Sums are divided once, after the last addition (DESIGN R3), and unscaled after that.
        """
        if self._gradients.is_open:
            self._gradients.finish(optimizer)
        count = self._open_micro_batches * self._replicas.num_replicas
        if count > 1:
            divide(optimizer, count)
        if self._is_scaled:
            self.unscale_gradients(optimizer)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale of fp16; once in a window, however often it is called.

        Raises:
            UsageError: after the optimizer's step of the same window.
        """
        scaler = self._find_scaler()
        if scaler is not None:
            scaler.unscale(optimizer)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the unscaled gradients by norm or by value, where the options ask for it (R39, E25).

        Args:
            optimizer: whose gradients.
        """
        self.unscale_gradients(optimizer)
        self._clipping.apply(parameters_of(optimizer))

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters; returns whether the step was committed.

        In fp16 it is not where a gradient is infinite or NaN: the scale was too large (E26, R26).
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
        """Release what the engine holds; called on every exit path, before everything else."""
        self._open_micro_batches = 0
        self._gradients = make_gradients(self._replicas)
        self._scaler = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the number of micro-batches in the open window; in fp16 the scaler."""
        return {"open_micro_batches": self._open_micro_batches, **self._scaler_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state back; one without a scaler, or with one too many, fits as well (E36)."""
        self._open_micro_batches = state_dict["open_micro_batches"]
        self._scaler = None
        self._load_scaler(state_dict)

    def _find_scaler(self) -> LossScaler | None:
        """Return what scales losses; ``None`` where the precision needs nothing of the kind."""
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
        """Return a module whose backward leaves the mean gradient of all processes.

        For manual steps; where ``train_step`` returns its loss, the engine adds gradients itself.
        Outside of a process group that is the module itself, moved to the device. Inside it is
        PyTorch's ``DistributedDataParallel`` with sums along the tree, bit for bit those of the
        default path. What is wrapped already stays as it is (E18).

        Args:
            module: the module; it is moved to the device.
            sync_bn: let BatchNorm layers count over all processes; on GPUs only.
            **options: of ``DistributedDataParallel``, such as ``find_unused_parameters``.

        Raises:
            UsageError: where the processes carry several replicas each.
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
        """Build model, criterion, optimizer and scheduler, in this order (E16, E17).

        Each function may be ``None``, and each may return one object or a dict of them.

        Args:
            model_fn: returns the model, which is moved to the device and wrapped.
            criterion_fn: returns the criterion, which is moved to the device.
            optimizer_fn: is called with the model, on the device and without a wrapper.
            scheduler_fn: is called with the optimizer.
            sync_bn: as in :meth:`wrap`.

        Returns:
            All four; ``None`` for those that were left out.

        Raises:
            ArgumentError: for a model that is no module, and no dict of modules.
        """
        bare, model = build_model(model_fn, lambda module: self.wrap(module, sync_bn=sync_bn))
        criterion = None if criterion_fn is None else self.sync_device(criterion_fn())
        optimizer = None if optimizer_fn is None else optimizer_fn(bare)
        scheduler = None if scheduler_fn is None else scheduler_fn(optimizer)
        return model, criterion, optimizer, scheduler

    def deinit_components(self, *, is_failing: bool = False) -> None:
        """Release what the engine holds, and leave what it has joined; may be called twice (E19).

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
        """Return an engine for what there is: this process's own of the GPUs, or the CPU (E38).

        Args:
            use_cpu: True for the CPU, False to demand a GPU, ``None`` for what there is (H46).
            gpus: ids of the GPUs to choose from; ``None`` for all.
            precision: a precision, or its name.
            clip_norm: as in the constructor.
            clip_value: as in the constructor.

        Raises:
            ArgumentError: for arguments that contradict each other or what there is (H47).
            UsageError: if a GPU is demanded where there is none for this process.
        """
        ids = select_gpus(use_cpu, gpus, caller="Engine.auto")
        return cls(
            device_of_rank(ids, Launch.read().local_rank),
            clip_norm=clip_norm,
            clip_value=clip_value,
            precision=Precision.from_str(precision) if isinstance(precision, str) else precision,
        )
