"""What Helios uses of PyTorch's FSDP2 without its being documented; fails where it has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from helios.core.sharded_tensors import cut_like, is_sharded, local_of, whole_of
from helios.core.wrappers import class_of
from helios.errors import UsageError
from helios.sharding.fsdp_adapter import make_mesh, require_fsdp, shard_unit
from helios.state.networks import left_out
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Recorder:
    """A reduction that notes what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def reduce(self, output: torch.Tensor, chunks: torch.Tensor, group: object) -> None:
        self.calls.append((tuple(output.shape), tuple(chunks.shape)))
        output.copy_(chunks[torch.distributed.get_rank()])


def use_everything(rank: int) -> None:
    network = nn.Linear(3, 5, bias=False)
    weight = network.weight.detach().clone()
    unit = shard_unit(network, make_mesh(CPU, 2))
    assert type(network) is not nn.Linear
    assert class_of(network) is nn.Linear
    assert [name for name, _ in left_out(network)] == ["in_features", "out_features"]
    (parameter,) = unit.parameters()
    assert is_sharded(parameter)
    assert parameter is network.weight
    # Rows are cut by ceil(5 / 2), and the last shard is padded in messages only.
    assert local_of(parameter).shape == ((3, 3), (2, 3))[rank]
    assert torch.equal(whole_of(parameter.detach()), weight)
    assert torch.equal(local_of(cut_like(weight, parameter)), local_of(parameter.detach()))
    reduction, seen, forwards = Recorder(), [], []
    unit.use(reduction)
    unit.before_forward(lambda *_: forwards.append((is_sharded(network.weight), "before")))
    unit.after_forward(lambda *_: forwards.append((is_sharded(network.weight), "after")))
    unit.watch_gradients({id(parameter): lambda whole: seen.append(tuple(whole.shape))})
    inputs = torch.ones(2, 3)
    network(inputs).sum().backward()
    assert reduction.calls == [((9,), (2, 9))]
    assert seen == [(5, 3)]
    assert forwards == [(True, "before"), (True, "after")]
    # Neither averaged nor divided.
    assert torch.equal(local_of(parameter.grad), torch.full_like(local_of(parameter.grad), 2.0))


@pytest.mark.shows("P91")
def test_units_are_cut_and_reduced_as_we_say() -> None:
    run_ranks(use_everything, 2)


@pytest.mark.shows("P91")
def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fsdp()
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UsageError, match="FSDPModule has set_custom_reduce_scatter"):
        require_fsdp()
