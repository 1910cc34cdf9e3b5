"""Values on their way to another process of the job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helios.distributed import pickling


def send(value: Any) -> Any:
    return pickling.loads(pickling.dumps(value))


def test_views_of_one_tensor_share_its_memory_again() -> None:
    base = torch.arange(12.0)
    first, second, turned = send(
        {"a": base[:8], "b": [base[4:]], "c": base.view(3, 4).t()}
    ).values()
    second = second[0]
    assert torch.equal(first, base[:8])
    assert torch.equal(second, base[4:])
    assert torch.equal(turned, base.view(3, 4).t())
    second += 100
    assert torch.equal(first[4:], base[4:8] + 100)
    assert turned[0, 1] == 104
    storages = {t.untyped_storage()._cdata for t in (first, second, turned)}
    assert len(storages) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.cfloat).conj(),
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_every_kind_of_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    found = send([tensor])[0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found.to_dense().isnan(), tensor.to_dense().isnan())
    assert torch.equal(found.to_dense().nan_to_num(), tensor.to_dense().nan_to_num())


def test_other_values_arrive_with_what_they_share() -> None:
    history = [1, 2]
    first, second, text = send((history, {"h": history}, "x"))
    assert first == [1, 2]
    assert second["h"] is first
    assert text == "x"


def test_what_was_on_an_accelerator_gets_to_that_of_the_reader() -> None:
    content = np.arange(8, dtype=np.uint8)
    here, there = (pickling._Memory(content, x) for x in (None, pickling._ACCELERATOR))
    data = pickling.dumps([here, there, there])
    near, far, again = pickling.loads(data, torch.device("meta"))
    assert (near.device.type, far.device.type) == ("cpu", "meta")
    assert far is again
    assert [storage.device.type for storage in pickling.loads(data)] == ["cpu"] * 3
    assert bytes(near.tolist()) == content.tobytes()
