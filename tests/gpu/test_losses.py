"""Losses that stay on a GPU until somebody looks at them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helios.core.loss_means import LossMeans, Viewer
from helios.replicas.named_sums import NumberReducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def count_waits(act: Callable[[], Any]) -> int:
    """Return how often something waits for the GPU, as far as PyTorch sees it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_means_over_replicas_have_the_bits_of_the_cpu_and_wait_for_nothing(
    dtype: torch.dtype,
) -> None:
    numbers = (1000 * torch.rand(7, generator=torch.Generator().manual_seed(1))).to(dtype)
    near = [
        {"loss": each, **({"b": each * 3} if number % 2 else {})}
        for number, each in enumerate(numbers)
    ]
    far = [{name: each.cuda() for name, each in table.items()} for table in near]
    found, expected = NumberReducer(7), NumberReducer(7)
    means: dict[str, torch.Tensor] = {}
    assert count_waits(lambda: means.update(found.mean_losses(far))) == 0
    known = expected.mean_losses(near)
    assert [*means] == [*known]
    for name, mean in known.items():
        assert means[name].device.type == "cuda"
        assert torch.equal(means[name].cpu(), mean)
        assert float(found.means[name]) == expected.means[name]


def test_a_mean_is_waited_for_by_reading_it_only() -> None:
    losses = LossMeans()
    losses.serve(Viewer)
    losses.add({"loss": torch.ones(1, device="cuda")}, 1)
    means: dict[str, float] = {}
    assert count_waits(lambda: means.update(losses.pop_means(Viewer.FILES))) == 2
    assert means == {"loss": 1.0}
    assert losses.pop_means(Viewer.FILES) == {}
    assert losses.pop_means(Viewer.LINE) == {"loss": 1.0}
