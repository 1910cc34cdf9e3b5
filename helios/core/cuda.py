"""What only CUDA has: asking for it, and switching cuDNN's benchmark mode off for a while."""

from __future__ import annotations

import torch

from helios.errors import UsageError


def requires_cuda_support() -> None:
    """Do nothing where CUDA can be used.

    Raises:
        UsageError: where it cannot (a ``RuntimeError``).
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "CUDA must be available, and torch.cuda.is_available() is False; run on a machine with "
            "a CUDA device and a PyTorch built for it, or train with use_cpu=True."
        )


class DisableCuDNNBenchmarkContext:
    """Switch cuDNN's benchmark mode off inside a block, and restore it after, also on an error.

    Evaluation batches of odd sizes would make cuDNN search for kernels over and over
    (H50, DESIGN C4). Without CUDA nothing reads the mode, so nothing changes there.

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
