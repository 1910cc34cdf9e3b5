"""Sets the PyTorch settings that affect the bits of arithmetic, for a block of code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from helios.errors import UsageError

_LOGGER = logging.getLogger(__name__)
_CUBLAS_VARIABLE, _CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: bool, warn_only: bool) -> None:
    # torch's switch imports its compiler (1.5 s) even if the setting does not change.
    if (value, warn_only) != _determinism():
        torch.use_deterministic_algorithms(value, warn_only=warn_only)


def choose_threads(stored: int | None, num_replicas: int) -> int | None:
    """Return the number of threads of a process, which affects the bits of sums on the CPU.

    It is that of the first start of the run. There, a run with several replicas gets one, as under
    torchrun, because it may begin on any number of processes; ``OMP_NUM_THREADS`` sets another.

    Args:
        stored: that of the first start; ``None`` at the first start.
        num_replicas: the replicas of the run.

    Returns:
        The number; ``None`` for the present one.
    """
    present, number, rule = torch.get_num_threads(), stored, "it stays that of the first start"
    if number is None and num_replicas > 1 and not os.environ.get("OMP_NUM_THREADS"):
        number = 1
        rule = "a run with several replicas begins with one, unless OMP_NUM_THREADS is set"
    if number not in (None, present):
        _LOGGER.info(
            "Threads of this process: %d (%d were set). Their number affects the results, so %s.",
            number,
            present,
            rule,
        )
    return number


@contextmanager
def numerics(
    *, is_deterministic: bool, use_cudnn_benchmark: bool, num_threads: int | None
) -> Iterator[None]:
    """Set the settings that affect the bits of arithmetic, and restore them after the block.

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


def require_deterministic_cublas() -> None:
    """Make cuBLAS deterministic by an environment variable, which CUDA reads when it starts.

    Raises:
        UsageError: if it is too late to set the variable, or if it has another value (a
            ``RuntimeError``).
    """
    present = os.environ.get(_CUBLAS_VARIABLE)
    if present in _CUBLAS_VALUES:
        return
    has_begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if present is None and not has_begun:
        os.environ[_CUBLAS_VARIABLE] = _CUBLAS_VALUES[0]
        return
    reason = (
        "CUDA was used before the trainer was created, so it is too late to set it now"
        if present is None
        else f"it is {present!r}"
    )
    raise UsageError(
        f"Trainer(enable_deterministic=True) on a GPU needs the environment variable "
        f"{_CUBLAS_VARIABLE} to be {' or '.join(_CUBLAS_VALUES)}, but {reason}. Set it before the "
        f"script starts: export {_CUBLAS_VARIABLE}={_CUBLAS_VALUES[0]}"
    )
