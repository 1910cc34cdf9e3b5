"""Asking for CUDA, and cuDNN's benchmark mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helios.core import cuda


@pytest.fixture
def benchmark_mode() -> Iterator[None]:
    found = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = found


@pytest.mark.shows("H50", "C4")
@pytest.mark.usefixtures("benchmark_mode")
def test_benchmark_mode_is_off_inside_and_restored_after_an_error_too() -> None:
    with cuda.DisableCuDNNBenchmarkContext():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark
    with pytest.raises(ZeroDivisionError), cuda.DisableCuDNNBenchmarkContext():
        _ = 1 / 0
    assert torch.backends.cudnn.benchmark


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_is_told_so() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.cuda\.is_available\(\) is False"):
        cuda.requires_cuda_support()
