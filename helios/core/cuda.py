"""CUDA helpers: checks that CUDA is available, and disables cuDNN's benchmark mode for a block."""

from __future__ import annotations

import torch

from helios.errors import UsageError


def requires_cuda_support() -> None:
    """Check that CUDA is available.

    Raises:
        UsageError: if it is not (a ``RuntimeError``).
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "CUDA must be available, but torch.cuda.is_available() is False. Run on a machine with "
            "a CUDA device and a PyTorch built for it, or train with use_cpu=True."
        )


class DisableCuDNNBenchmarkContext:
    """Disable cuDNN's benchmark mode for a block, and restore it afterwards, also after an error.

    Evaluation batches of varying sizes would make cuDNN search for kernels repeatedly.
    Without CUDA, the mode has no effect.

    Example:
        >>> with DisableCuDNNBenchmarkContext():
        ...     torch.backends.cudnn.benchmark
        False
    """

    def __enter__(self) -> None:
        self._found = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = False

    def __exit__(self, *error: object) -> None:
        torch.backends.cudnn.benchmark = self._found
