"""The settings that change bits: set for a block, and put back after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.engines.numerics import numerics


def settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )


@pytest.fixture
def restored_settings() -> Iterator[None]:
    """Put back by hand what a test sets outside of the context."""
    threads, algorithms, warn_only, benchmark, deterministic = settings()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.use_deterministic_algorithms, algorithms, warn_only=warn_only)
        yield
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = deterministic


def test_numerics_are_set_inside_and_restored_outside(restored_settings: None) -> None:
    """A run with 2 threads goes on with 2 where the default is 1."""
    before = settings()
    with numerics(is_deterministic=True, use_cudnn_benchmark=False, num_threads=2):
        assert settings() == (2, True, False, False, True)
    assert settings() == before
    with numerics(is_deterministic=False, use_cudnn_benchmark=True, num_threads=1):
        assert settings() == (before[0], False, False, True, before[4])
    assert settings() == before


@pytest.mark.shows("H49")
def test_determinism_works_on_the_cpu(restored_settings: None) -> None:
    """An operation without a deterministic form is refused there too."""

    def scatter() -> Tensor:
        return torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    with (
        numerics(is_deterministic=True, use_cudnn_benchmark=False, num_threads=1),
        pytest.raises(RuntimeError, match="does not have a deterministic implementation"),
    ):
        scatter()
    assert math.isfinite(scatter().sum().item())
