"""Host memory for copies of tensors, kept from one copy to the next."""

from __future__ import annotations

import pytest
import torch

from helios.storage.staging import HostBuffers


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.shows("S1")
def test_every_type_is_copied_on_bytes() -> None:
    kinds = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int8)
    lives = [torch.tensor([0.0, 1.0, 3.0]).to(kind) for kind in kinds]
    codes = [live.detach() for live in lives]
    HostBuffers().copy([[code] for code in codes])
    for live, code in zip(lives, codes, strict=True):
        assert code.dtype == live.dtype
        assert torch.equal(code, live)


@pytest.mark.shows("S3")
def test_the_memory_is_used_again_and_what_is_no_longer_needed_returned() -> None:
    buffers = HostBuffers()
    first = [torch.ones(100), torch.ones(100), torch.ones(7)]
    buffers.copy([[tensor] for tensor in first])
    places = {_address(tensor) for tensor in first}
    assert buffers.num_bytes == 828
    second = [torch.zeros(100), torch.zeros(7)]
    buffers.copy([[tensor] for tensor in second])
    assert {_address(tensor) for tensor in second} < places
    assert buffers.num_bytes == 428
    buffers.release()
    assert buffers.num_bytes == 0
