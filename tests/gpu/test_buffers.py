"""Copies from a GPU into page-locked host memory."""

from __future__ import annotations

import pytest
import torch

from helios.storage.staging import HostBuffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_tensors_of_a_gpu_are_copied_whole_before_the_call_returns() -> None:
    buffers = HostBuffers(pins=True)
    buffers.prepare([4 << 22])
    live = torch.arange(1 << 22, dtype=torch.float32, device="cuda")
    for number in range(5):
        live += number
        expected = live.cpu()
        codes = [live.detach(), live.detach()[10:20]]
        buffers.copy([codes])
        live.mul_(0.5)
        assert codes[0].device.type == "cpu"
        assert codes[0].is_pinned()
        assert torch.equal(codes[0], expected)
        assert torch.equal(codes[1], expected[10:20])
        assert buffers.num_bytes == 4 << 22
