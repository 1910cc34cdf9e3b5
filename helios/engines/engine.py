"""What a device does with a loss: backward, averaging over a window, clipping and the update.

An engine decides nothing: the optimizer loop calls it in the order of DESIGN section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from helios.engines.device import move_to_device
from helios.engines.precision import Precision
from helios.errors import ArgumentError, ArgumentTypeError


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


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


def _check_precision(precision: object) -> None:
    if not isinstance(precision, Precision):
        raise ArgumentTypeError(
            f"Engine(precision=...) must be a Precision, got {precision!r}. Pass e.g. "
            'Precision.from_str("bf16").'
        )


def _check_limits(clip_norm: object, clip_value: object) -> None:
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < float(value) < math.inf):  # type: ignore[arg-type]
            raise ArgumentError(
                f"Engine({name}=...) must be None or a positive number, got {value!r}. Pass None "
                "to switch it off."
            )
    if clip_norm is not None and clip_value is not None:
        raise ArgumentError(
            f"Engine(clip_value=...) must be None where clip_norm is set, got {clip_value!r}. "
            "Clip by one of both."
        )


class Engine:
    """One process on one device.

    Args:
        device: where the training runs, by object or name; ``None`` for the first GPU, or the CPU
            where there is none (E3).
        clip_norm: largest 2-norm of the gradients of a step.
        clip_value: largest magnitude of an element of them.
        precision: the type in which the steps of the model compute.

    Raises:
        ArgumentError: for a name that is no device's, and for a limit that is no positive number,
            or for both limits at once.
        ArgumentTypeError: for something else than a device, and than a precision.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: Precision = Precision.FP32,
    ) -> None:
        _check_precision(precision)
        _check_limits(clip_norm, clip_value)
        self.device = _as_device(device)
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
