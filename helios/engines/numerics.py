"""Sets the PyTorch settings that affect the bits of arithmetic, for a block of code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from helios.errors import UsageError

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


def choose_threads(stored: int | None, num_replicas: int) -> int:
    """Return the number of threads of a process, which affects the bits of sums on the CPU.

    It is that of the first start of the run. A run with several replicas may begin on any number of
    processes, however they are started: it gets one thread, as under torchrun, or as many as
    ``OMP_NUM_THREADS`` says. A run with one replica keeps those of its process.

    Args:
        stored: the number at the first start; ``None`` at that start.
        num_replicas: the replicas of the run.
    """
    if stored is not None:
        return stored
    if num_replicas == 1:
        return torch.get_num_threads()
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) else 1


@contextmanager
def numerics(
    *, is_deterministic: bool, use_cudnn_benchmark: bool, num_threads: int
) -> Iterator[None]:
    """Set the settings that affect the bits of arithmetic, and restore them after the block.

    Args:
        is_deterministic: require deterministic algorithms, on the CPU too.
        use_cudnn_benchmark: let cuDNN measure and choose algorithms.
        num_threads: intra-op threads of the process.
    """
    threads = torch.get_num_threads()
    algorithms = _determinism()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    try:
        if num_threads != threads:
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
