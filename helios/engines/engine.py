"""The engine: runs backward, clipping and updates on a device, and sums over processes.

An engine combines a device, a precision and the replicas of a run. It decides nothing: the
optimizer loop calls it in the order of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from helios.core.sharded_tensors import local_of
from helios.core.utils import foreach, parameters_of
from helios.engines.device import device_of_rank, select_gpus
from helios.engines.precision import LossScaler, Precision, as_precision
from helios.engines.standalone import StandaloneEngine
from helios.errors import ArgumentError, UsageError
from helios.launch.launcher import Launch
from helios.replicas.gradients import Gradients, WindowWeights, divide, make_gradients, norm_by_rows
from helios.replicas.replicas import Replicas


def redefines(owner: object, base: type, name: str) -> bool:
    """Return whether a user has redefined a method, in a subclass or on an object."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


class Engine(StandaloneEngine):
    """A device, a precision and the replicas of a run; runs backward and the optimizer step.

    This is the only engine class. Subclass it and override a method to change its behavior.

    Args:
        device: the device of the run, by object or name; ``None`` for the first GPU, or the CPU if
            there is none.
        clip_norm: maximum 2-norm of the gradients of a step, over all optimizers that are updated
            from one backward.
        clip_value: maximum magnitude of each element of the gradients.
        precision: the dtype in which the steps of the model compute, or its name.
        bucket_bytes: with several processes, send gradients in buckets of at least this many bytes
            during backward; ``None`` to send all of them after it. The bits are the same.

    Attributes:
        device: the device of the run.
        unsaved: names of attributes that training changes and that need not be saved.

    Raises:
        ArgumentError: if the name of the device is unknown, a limit is not a positive number, both
            limits are set, or ``bucket_bytes`` is below 1.
        ArgumentTypeError: if ``device`` is not a device, or ``precision`` is not a precision.
    """

    _internals: ClassVar[str] = (
        "_bucket_bytes _clips _clips_by_rows _gradient_norm _gradients _group _group_parameters "
        "_is_scaled _limits _open_micro_batches _precision _replicas _scaler _weight "
        "_weights"
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
    _gradients: Gradients
    """The gradients of the run, which the loops call as ``session.gradients``."""
    _group: Sequence[Optimizer]
    """The optimizers whose gradients are from one backward, and are clipped together."""
    _group_parameters: Sequence[Tensor]
    """Their parameters, if there are several, in the order of the networks."""
    _weights: WindowWeights
    """The weights of the losses in the open window."""
    _weight: float | None
    """Their sum, by which the gradients are divided in the update that follows; else ``None``."""

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: Precision | str = Precision.FP32,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(device)
        if bucket_bytes is not None and (type(bucket_bytes) is not int or bucket_bytes < 1):
            raise ArgumentError(
                "Engine(bucket_bytes=...) must be None or a positive int, got "
                f"{bucket_bytes!r}. Pass 25 * 2**20, or omit it."
            )
        self._bucket_bytes = bucket_bytes
        self._precision = as_precision(precision)
        self._limits = {"clip_norm": clip_norm, "clip_value": clip_value}
        for name, value in self._limits.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ArgumentError(
                    f"Engine({name}=...) must be None or a positive number, got {value!r}. Pass "
                    "None to disable it."
                )
        if clip_norm is not None and clip_value is not None:
            raise ArgumentError(
                f"Engine(clip_value=...) must be None if clip_norm is set, got {clip_value!r}. "
                "Pass only one of them."
            )
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
        self._gradients = make_gradients(replicas, self._bucket_bytes)
        self._weights, self._weight = WindowWeights(replicas), None
        self._group = self._group_parameters = ()
        self._clips_by_rows = replicas.is_sharded and self._limits["clip_norm"] is not None
        # Every update reads these, so they are determined here, at the start of a run.
        is_own = redefines(self, Engine, "unscale_gradients")
        self._is_scaled = self._precision.scaler is not None or is_own
        is_own = redefines(self, Engine, "clip_gradients")
        self._clips = any(self._limits.values()) or self._is_scaled or is_own

    @property
    def precision(self) -> Precision:
        """The dtype in which the steps of the model compute."""
        return self._precision

    @property
    def _automatic_options(self) -> list[str]:
        """The arguments that are set and only affect automatic steps."""
        return [f"Trainer({name}=...)" for name, limit in self._limits.items() if limit]

    def _shard(
        self,
        networks: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        units: Mapping[str, nn.Module],
        prepare: Callable[[Sequence[nn.Module]], None] | None = None,
    ) -> None:
        """Shard networks over the processes, if the run is sharded and there are several.

        Args:
            networks: the networks by path, the same in all processes.
            optimizers: the optimizers by path, which get the sharded parameters.
            units: modules whose parameters are gathered together, by name.
            prepare: is called with the modules of a unit before it is sharded, and makes them
                whole; ``None`` if all are.

        Raises:
            UsageError: if this PyTorch cannot do it.
        """
        if self._replicas.is_sharded_over_processes:
            # Imported here because it takes long, and only such runs need it.
            from helios.sharding.networks import shard_networks

            self._gradients = shard_networks(networks, optimizers, units, self._replicas, prepare)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the model's steps run."""
        return self._precision.autocast(self.device)

    def close_window(self) -> None:
        """Begin a new window after its last update, and drop gradients that were not used.

        In fp16 this adjusts the loss scale, once for all optimizers: all gradients of a window
        must have the same scale.
        """
        self._open_micro_batches = 0
        if self._weights.is_open:
            self._weights.drop_unused()
        if self._scaler is not None:
            self._scaler.adjust()
        if self._gradients.is_open:
            self._gradients.drop_unused()

    def backward_loss(
        self, loss: Tensor, inputs: Sequence[Tensor] | None = None, *, retain_graph: bool = False
    ) -> None:
        """Add a micro-batch's gradients to those of the window, scaled in fp16.

        Args:
            loss: the loss.
            inputs: the only parameters that receive gradients; ``None`` for all.
            retain_graph: whether another backward follows through the same graph, as for
                ``Tensor.backward``.

        Raises:
            UsageError: if the graph of the loss has been through backward before.
        """
        scaler = self._find_scaler() if self._is_scaled else None
        scaled = loss if scaler is None else scaler.scale(loss)
        self._gradients.is_in_backward = True
        try:
            scaled.backward(retain_graph=retain_graph or None, inputs=inputs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise UsageError(
                "The graph of the loss that train_step returned has been through backward before. "
                "Helios calls backward and steps the optimizer: remove loss.backward() and "
                "optimizer.step() from train_step, or return None and do both there. If a graph is "
                "kept from an earlier step, detach what crosses steps."
            ) from error
        finally:
            self._gradients.is_in_backward = False

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of a window over its micro-batches and all replicas.

        The sum is divided once, after the last addition, by their number, or by the sum of the
        weights of a ``WeightedLoss``, and then unscaled.
        """
        if self._gradients.is_open:
            self._gradients.finish(optimizer)
        count: float = self._open_micro_batches * self._replicas.num_replicas
        if self._weight is not None:
            count = self._weight
        if count not in (0, 1):
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
        """Clip the unscaled gradients by norm or by value, as the options say.

        The norm is that of all gradients of one backward: if it is for several optimizers, they are
        clipped together, in the call for the first one.

        Args:
            optimizer: the optimizer of the parameters.
        """
        for each in self._group or (optimizer,):
            self.unscale_gradients(each)
        parameters: Sequence[Tensor] = parameters_of(optimizer)
        norm, value = self._limits["clip_norm"], self._limits["clip_value"]
        if norm is not None and len(self._group) > 1:
            if optimizer is not self._group[0]:
                return
            parameters = self._group_parameters
        self._gradient_norm = None
        if norm is not None and self._clips_by_rows:
            self._gradient_norm = self._clip_by_rows(parameters, norm)
        elif norm is not None:
            self._gradient_norm = clip_grad_norm_(parameters, norm)
        elif value is not None:
            clip_grad_value_(parameters, value)

    def _clip_by_rows(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not gradients:
            return torch.zeros(())
        total = self.find_norm(gradients)
        # As PyTorch's function does, also where nothing is clipped.
        factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        foreach("mul", [local_of(gradient) for gradient in gradients], factor)
        return total

    def find_norm(self, gradients: Sequence[Tensor] | Tensor, norm_type: float = 2.0) -> Tensor:
        """Return a norm of gradients; with sharded models, all processes must call this together.

        Args:
            gradients: one, or several in a list.
            norm_type: the ``p`` of the norm; 2 or ``inf`` with sharded models.

        Raises:
            UsageError: for another norm of sharded models, whose bits depend on the number of
                processes.
        """
        replicas = self._replicas
        if replicas.is_sharded:
            several = [gradients] if isinstance(gradients, Tensor) else gradients
            return norm_by_rows(several, replicas.num_processes, norm_type=norm_type)
        if isinstance(gradients, Tensor):
            found: Tensor = torch.linalg.vector_norm(gradients, norm_type)
            return found
        return get_total_norm(gradients, norm_type)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters, and return whether the step was committed.

        In fp16 the update is skipped if a gradient is infinite or NaN: the loss scale was too
        large.
        """
        scaler = self._find_scaler() if self._is_scaled else None
        if scaler is not None:
            scaler.unscale(optimizer)
            if not scaler.is_finite(optimizer, self._group):
                return False
        optimizer.step()
        return True

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Set the gradients to None."""
        optimizer.zero_grad(set_to_none=True)

    def teardown(self) -> None:
        """Release what the engine holds. Called on every exit path, before any other teardown."""
        self._open_micro_batches = 0
        self._gradients = make_gradients(self._replicas, self._bucket_bytes)
        self._weights, self._weight = WindowWeights(self._replicas), None
        self._group = self._group_parameters = ()
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
            device_of_rank(ids, Launch.read().info.local_rank),
            clip_norm=clip_norm,
            clip_value=clip_value,
            precision=precision,
        )
