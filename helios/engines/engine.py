"""What a device does with a loss: backward, averaging over a window, clipping and the update.

An engine decides nothing: the optimizer loop calls it in the order of DESIGN section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.engines.device import move_to_device
from helios.engines.precision import Precision


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class Engine:
    """One process on one device.

    Args:
        device: where the training runs.
        clip_norm: largest 2-norm of the gradients of a step.
        clip_value: largest magnitude of an element of them.
        precision: the type in which the steps of the model compute.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: Precision = Precision.FP32,
    ) -> None:
        self.device = device
        self._precision = precision
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._open_micro_batches = 0

    @property
    def precision(self) -> Precision:
        """The type in which the steps of the model compute."""
        return self._precision

    @property
    def automatic_options(self) -> list[str]:
        """The arguments that only automatic steps obey, where they are set."""
        options = {"clip_norm": self._clip_norm, "clip_value": self._clip_value}
        return [f"Trainer({name}=...)" for name, value in options.items() if value is not None]

    def move(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device."""
        return move_to_device(batch, self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the steps of the model run."""
        return self._precision.autocast(self.device)

    def count_micro_batch(self) -> None:
        """Count a micro-batch of the open window; before its first backward."""
        self._open_micro_batches += 1

    def close_window(self) -> None:
        """Begin a new window; after its last update."""
        self._open_micro_batches = 0

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Add a micro-batch's gradients to those of the window.

        Args:
            loss: the loss.
            inputs: the only parameters that get gradients; ``None`` for all.
        """
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Divide the summed gradients by the micro-batches really in the window."""
        count = self._open_micro_batches
        if count > 1:
            gradients = [p.grad for p in _parameters_of(optimizer) if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, float(count))

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the gradients by norm or by value, where the options ask for it (R39)."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(_parameters_of(optimizer), self._clip_norm)
        elif self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(_parameters_of(optimizer), self._clip_value)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters; returns whether the step was committed."""
        optimizer.step()
        return True

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Set the gradients to None."""
        optimizer.zero_grad(set_to_none=True)

    def teardown(self) -> None:
        """Release what the engine holds; called on every exit path, before everything else."""
        self._open_micro_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the number of micro-batches in the open window."""
        return {"open_micro_batches": self._open_micro_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state back."""
        self._open_micro_batches = state_dict["open_micro_batches"]


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: bool, warn_only: bool) -> None:
    # Even to leave it as it is, torch's switch imports its compiler: 1.5 s of start-up.
    if (value, warn_only) != _determinism():
        torch.use_deterministic_algorithms(value, warn_only=warn_only)


@contextmanager
def numerics(
    *, is_deterministic: bool, use_cudnn_benchmark: bool, num_threads: int | None
) -> Iterator[None]:
    """Set what changes bits of arithmetic for a block, and restore what was found.

    Args:
        is_deterministic: demand deterministic algorithms, on the CPU too (H49).
        use_cudnn_benchmark: let cuDNN measure and choose algorithms.
        num_threads: intra-op threads of the process; ``None`` keeps the present number.
    """
    threads = torch.get_num_threads()
    algorithms = _determinism()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    try:
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
        if is_deterministic:
            _set_determinism(True, warn_only=False)
        torch.backends.cudnn.deterministic |= is_deterministic
        torch.backends.cudnn.benchmark = use_cudnn_benchmark
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        _set_determinism(*algorithms)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
