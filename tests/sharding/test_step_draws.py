"""An optimizer of a sharded model that draws random numbers is an error before its update."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout

import helios
from helios.core.rng import get_default_numpy_rng
from helios.core.sharded_tensors import local_of
from helios.engines.engine import Engine
from helios.state import TrainingState
from tests.support.ranks import run_ranks
from tests.support.sharded import IS_ABLE
from tests.support.sums import bits

pytestmark = pytest.mark.skipif(not IS_ABLE, reason="needs FSDP that reduces as Helios says")
_SHARED = np.random.default_rng(3)


class _Noisy(torch.optim.SGD):
    """Adds noise to the gradients, or to the weights after the update."""

    is_elementwise = True

    def __init__(self, params: Any, kind: str, first: int) -> None:
        super().__init__(params, lr=0.1)
        self.kind, self.first, self.num_steps = kind, first, 0
        self.own = torch.Generator().manual_seed(1)
        self.source = random.Random(2)
        if kind == "in a hook":
            self.register_step_pre_hook(lambda *_: self.add_noise())

    def draw(self, like: Tensor) -> Tensor | float:
        return {
            "randn_like": lambda: torch.randn_like(like),
            "generator": lambda: torch.rand(like.shape, generator=self.own),
            "new generator": lambda: torch.rand(
                3, generator=torch.Generator().manual_seed(5)
            ).sum(),
            "dropout": lambda: dropout(like, 0.5),
            "numpy": lambda: float(np.random.normal()),
            "numpy of helios": lambda: float(get_default_numpy_rng().generator.normal()),
            "numpy of the module": lambda: float(_SHARED.normal()),
            "random": random.random,
            "random of its own": self.source.random,
            "seed": lambda: float(torch.manual_seed(7).initial_seed()),
        }.get(self.kind, lambda: torch.randn_like(like))()

    @torch.no_grad()
    def add_noise(self) -> None:
        if self.num_steps >= self.first:
            for group in self.param_groups:
                for parameter in group["params"]:
                    local_of(parameter).add_(self.draw(local_of(parameter.grad)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.kind not in ("in a hook", "afterwards"):
            self.add_noise()
        self.num_steps += 1
        super().step(closure)
        if self.kind == "afterwards":
            self.add_noise()


class _NoisyEngine(Engine):
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        for parameter in optimizer.param_groups[0]["params"]:
            local_of(parameter.grad).normal_(generator=torch.Generator().manual_seed(1))
        return super().optimizer_step(optimizer)


class _Model(helios.Model):
    def __init__(self, kind: str, first: int) -> None:
        super().__init__("noisy")
        self.kind, self.first = kind, first

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(1)
        self.net = nn.Linear(5, 3)
        self.optimizer = _Noisy(self.net.parameters(), self.kind, self.first)

    def train_step(self, batch: Tensor, state: TrainingState) -> Tensor:
        return self.net(batch).square().mean()


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(torch.rand(12, 5), params)


def _fit(
    rank: int, folder: Path, kind: str, first: int = 0, sharding: str = "full"
) -> tuple[str, bool, bytes]:
    """Return the error, whether the weights are as before, and their bits."""
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=6,
        num_replicas=2,
        sharding=sharding,
        chkpt_root=folder,
        chkpt_frequency=1,
        engine=_NoisyEngine("cpu") if kind == "engine" else Engine("cpu"),
        print_banner=False,
    )
    model, before = _Model(kind, first), {}
    model.on_optimizer_step_start = lambda optimizer: before.update(  # type: ignore[method-assign]
        (name, bits(local_of(each.detach()))) for name, each in model.net.named_parameters()
    )
    text = ""
    try:
        trainer.fit(model, _Data())
    except helios.UsageError as error:
        text = str(error)
    found = {name: bits(local_of(each.detach())) for name, each in model.net.named_parameters()}
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return text, found == before, b"".join(found.values())


_KINDS = (
    *("randn_like", "generator", "new generator", "dropout", "in a hook", "afterwards", "seed"),
    *("numpy", "numpy of helios", "numpy of the module", "random", "random of its own"),
)


@pytest.mark.parametrize("kind", _KINDS)
def test_an_update_that_draws_is_refused_before_it_is_made(kind: str, tmp_path: Path) -> None:
    ((text, is_unchanged, _),) = run_ranks(_fit, 1, tmp_path, kind)
    assert "_Noisy.step() must not draw random numbers" in text
    assert 'sharding="none"' in text
    assert is_unchanged
    assert not list(tmp_path.glob("noisy/*.pth"))
