"""What cannot be sharded with the same bits is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from helios.errors import UsageError
from helios.sharding import requirements
from helios.sharding.requirements import check_shardable

OPTIMIZERS = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
ROWS, COLUMNS, STEPS = 7, 5, 4


def build(kind: type[optim.Optimizer], parameters: list[nn.Parameter]) -> optim.Optimizer:
    make: Any = kind
    return make(parameters, lr=0.01)


def run_cut(kind: type[optim.Optimizer], cuts: list[tuple[int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(ROWS, COLUMNS, generator=generator)
    gradients = torch.randn(STEPS, ROWS, COLUMNS, generator=generator)
    parts = [nn.Parameter(start[begin:end].clone()) for begin, end in cuts]
    optimizer = build(kind, parts)
    for gradient in gradients:
        for part, (begin, end) in zip(parts, cuts, strict=True):
            part.grad = gradient[begin:end].clone()
        optimizer.step()
    state = [
        torch.cat([optimizer.state[part][name] for part in parts]).flatten()
        for name, value in optimizer.state[parts[0]].items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    whole = torch.cat([part.detach() for part in parts]).flatten()
    return torch.cat([whole, *state])


@pytest.mark.shows("P88")
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_has_equal_bits_on_shards_or_is_refused(
    kind: type[optim.Optimizer],
) -> None:
    if kind not in requirements._ELEMENTWISE:
        # As it is built does not matter: Muon takes no bias.
        optimizer = build(kind, [nn.Parameter(torch.ones(3, 3))])
        with pytest.raises(UsageError, match=f"opt is {kind.__name__}"):
            check_shardable({}, {"opt": optimizer}, {})
        return
    whole = run_cut(kind, [(0, ROWS)])
    for cuts in ([(0, 4), (4, 7)], [(0, 3), (3, 6), (6, 7)], [(0, 2), (2, 4), (4, 6), (6, 7)]):
        assert torch.equal(run_cut(kind, cuts).view(torch.int32), whole.view(torch.int32))


def refuse(match: str, network: nn.Module, **optimizers: optim.Optimizer) -> None:
    with pytest.raises(UsageError, match=match):
        check_shardable({"net": network}, optimizers, {})


@pytest.mark.shows("P88")
def test_networks_that_cannot_be_sharded_are_refused() -> None:
    refuse("neither compiled nor wrapped", nn.DataParallel(nn.Linear(2, 2)))
    refuse("SyncBatchNorm", nn.Sequential(nn.SyncBatchNorm(3)))
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refuse(r"net\.scale is a Parameter of torch\.float32 and shape \(\)", scalar)
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    refuse("neither compiled nor wrapped", compiled)
    with pytest.raises(UsageError, match="loose is in none"):
        check_shardable({}, {}, {"loose": torch.ones(1)})


@pytest.mark.shows("P88")
def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    refuse(r"net\.weight is lazy", nn.LazyLinear(2))
    with pytest.warns(UserWarning, match="zero-element"):
        refuse(r"and elements, but net\.weight .* \(2, 0\)", nn.Linear(0, 2))
    network = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    refuse(r"contiguous parameters, but net\.weight", network)
    refuse(r"net\.0 has max_norm=1\.0", nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))
    refuse("net has sparse=True", nn.EmbeddingBag(3, 2, sparse=True))
    hooked = nn.Linear(2, 2)
    handle = hooked.bias.register_hook(torch.neg)
    refuse(r"without hooks, but net\.bias has one", hooked)
    handle.remove()
    check_shardable({"net": hooked}, {}, {})
    hooked.weight.register_post_accumulate_grad_hook(lambda _: None)
    refuse(r"without hooks, but net\.weight has one", hooked)
