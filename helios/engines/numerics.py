"""Sets, for a block of code, the settings of PyTorch that change the bits of arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: bool, warn_only: bool) -> None:
    # torch's switch imports its compiler (1.5 s) even if the setting does not change.
    if (value, warn_only) != _determinism():
        torch.use_deterministic_algorithms(value, warn_only=warn_only)


@contextmanager
def numerics(
    *, is_deterministic: bool, use_cudnn_benchmark: bool, num_threads: int | None
) -> Iterator[None]:
    """Set what changes the bits of arithmetic for a block, and restore the settings afterwards.

    Args:
        is_deterministic: require deterministic algorithms, on the CPU too.
        use_cudnn_benchmark: let cuDNN measure and choose algorithms.
        num_threads: intra-op threads of the process; ``None`` keeps the current number.
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
