"""An optimizer of a sharded model that draws random numbers is an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import helios
from helios.core.rng import get_default_numpy_rng
from helios.core.sharded_tensors import local_of
from helios.state import TrainingState
from tests.support.ranks import run_ranks
from tests.support.sharded import IS_ABLE

pytestmark = pytest.mark.skipif(not IS_ABLE, reason="needs FSDP that reduces as Helios says")


class _Noisy(torch.optim.SGD):
    """Adds noise to the gradients, or to the weights after the update."""

    is_elementwise = True

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1)
        self.kind = kind
        self.own = torch.Generator().manual_seed(1)
        if kind == "in a hook":
            self.register_step_pre_hook(lambda *_: self.add_noise())

    def draw(self, like: Tensor) -> Tensor | float:
        return {
            "randn_like": lambda: torch.randn_like(like),
            "generator": lambda: torch.rand(like.shape, generator=self.own),
            "new generator": lambda: torch.rand(
                3, generator=torch.Generator().manual_seed(5)
            ).sum(),
            "numpy": lambda: float(np.random.normal()),
            "numpy of helios": lambda: float(get_default_numpy_rng().generator.normal()),
            "random": random.random,
        }.get(self.kind, lambda: torch.randn_like(like))()

    @torch.no_grad()
    def add_noise(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local_of(parameter).add_(self.draw(local_of(parameter.grad)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.kind not in ("in a hook", "afterwards"):
            self.add_noise()
        super().step(closure)
        if self.kind == "afterwards":
            self.add_noise()


class _Model(helios.Model):
    def __init__(self, kind: str) -> None:
        super().__init__("noisy")
        self.kind = kind

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(1)
        self.net = nn.Linear(5, 3)
        self.optimizer = _Noisy(self.net.parameters(), self.kind)

    def train_step(self, batch: Tensor, state: TrainingState) -> Tensor:
        return self.net(batch).square().mean()


class _Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=2)
        self._train_dataset = self._create_dataset(torch.rand(12, 5), params)


def _fit(rank: int, folder: Path, kind: str) -> str:
    """Return the error."""
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=6,
        num_replicas=2,
        sharding="full",
        chkpt_root=folder,
        chkpt_frequency=1,
        use_cpu=True,
        print_banner=False,
    )
    text = ""
    try:
        trainer.fit(_Model(kind), _Data())
    except helios.UsageError as error:
        text = str(error)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return text


_KINDS = (
    *("randn_like", "generator", "new generator", "in a hook", "afterwards"),
    *("numpy", "numpy of helios", "random"),
)


@pytest.mark.parametrize("kind", _KINDS)
def test_an_update_that_draws_is_an_error_and_not_saved(kind: str, tmp_path: Path) -> None:
    (text,) = run_ranks(_fit, 1, tmp_path, kind)
    assert "_Noisy.step() must not draw random numbers" in text
    assert 'sharding="none"' in text
    assert not list(tmp_path.glob("noisy/*.pth"))
