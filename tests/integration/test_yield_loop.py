"""A small GAN whose step yields two losses, against a loop by hand and through every resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import helios
from helios.core import rng
from helios.engines.precision import Precision
from helios.loops import YieldLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.loops.recorded import record
from tests.support.resume import resume_everywhere
from tests.support.runs import WIDTH, IndexData, Outcome, digest, noisy_collate

_SEED = 7
_NOISE = 3


class Gan(helios.Model):
    """Two networks with dropout, two Adam optimizers, a scheduler each, label noise."""

    unsaved = ("records", "ids")

    def __init__(self) -> None:
        super().__init__("gan")
        self.records: dict[int, tuple[list[int], str]] = {}
        self.ids: list[int] = []

    def setup(self, fast_init: bool = False) -> None:
        self.generator = nn.Sequential(
            nn.Linear(_NOISE, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, WIDTH)
        )
        self.critic = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        if not fast_init:
            self.critic_optimizer = Adam(self.critic.parameters(), lr=0.02, betas=(0.5, 0.9))
            self.generator_optimizer = Adam(self.generator.parameters(), lr=0.01)
            self.critic_scheduler = StepLR(self.critic_optimizer, 2, gamma=0.7)
            self.generator_scheduler = CosineAnnealingLR(self.generator_optimizer, T_max=20)

    def critic_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        targets = 1 - 0.1 * torch.rand(len(real), 1)
        true = binary_cross_entropy_with_logits(self.critic(real), targets)
        return true + softplus(self.critic(fake.detach())).mean()

    def generator_loss(self, fake: Tensor) -> Tensor:
        return softplus(-self.critic(fake)).mean()

    def train_step(self, batch: Any, state: TrainingState) -> Iterator[Tensor]:
        ids, real = batch
        self.ids = ids.tolist()
        fake = self.generator(torch.randn(len(real), _NOISE))
        loss = self.critic_loss(real, fake)
        self._loss_items["critic"] = loss.detach()
        yield loss
        loss = self.generator_loss(fake)
        self._loss_items["generator"] = loss.detach()
        yield loss

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        losses = [self._loss_items[name].item() for name in ("critic", "generator")]
        self.records[state.global_iteration] = (self.ids, repr(losses))


class Samples(helios.DataModule):
    """Samples that know their index; augmented and shuffled, but for the loop by hand."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=not self.is_plain)
        if not self.is_plain:
            params.collate_fn = noisy_collate
        data = _plain_data() if self.is_plain else IndexData()
        self._train_dataset = self._create_dataset(data, params)


def _plain_data() -> list[tuple[int, Tensor]]:
    return [(index, torch.sin(torch.arange(WIDTH) * (index + 1.0))) for index in range(22)]


def _connect(trainer: helios.Trainer) -> None:
    trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())


def _train(
    folder: Path | None,
    *plugins: Plugin,
    is_plain: bool = False,
    **options: Any,
) -> Outcome:
    options = {"total_steps": 7, "random_seed": _SEED} | options
    data = Samples(is_plain=is_plain)
    return record(folder, Gan(), data, *plugins, prepare=_connect, **options)


@pytest.mark.shows("L27", "P3")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("unit", "accumulation", "precision"),
    [
        ("iteration", 1, Precision.FP32),
        ("epoch", 2, Precision.FP32),
        ("iteration", 2, Precision.BF16),
    ],
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_a_gan_resumes_everywhere(
    unit: str, accumulation: int, precision: Precision, tmp_path: Path
) -> None:

    def make_run(folder: Path) -> Outcome:
        return _train(
            folder,
            precision=precision,
            train_unit=unit,
            total_steps=3 if unit == "epoch" else 7,
            accumulation_steps=accumulation,
        )

    resume_everywhere(make_run, tmp_path)


_SCALE = 2.0**8
_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.fp16(_SCALE))


def _train_by_hand(accumulation: int, precision: Precision) -> tuple[Gan, list[list[float]]]:
    """Train one epoch as a script without a trainer would."""
    rng.seed_rngs(_SEED)
    gan = Gan()
    gan.setup()
    data, cpu, losses = _plain_data(), torch.device("cpu"), []
    is_scaled = precision.scaler is not None
    scaler = torch.amp.GradScaler("cpu", _SCALE, enabled=is_scaled)
    for iteration in range(1, 7):
        chosen = data[4 * (iteration - 1) : 4 * iteration]
        real = torch.stack([features for _, features in chosen])
        rng.reseed(rng.key(_SEED, "train", iteration, 0))
        count = iteration % accumulation or accumulation
        is_last = count == accumulation or iteration == 6
        with precision.autocast(cpu):
            fake = gan.generator(torch.randn(len(real), _NOISE))
            critic_loss = gan.critic_loss(real, fake)
        scaler.scale(critic_loss).backward()
        if is_last:
            _step(scaler, gan.critic, gan.critic_optimizer, gan.critic_scheduler, count)
        found = [parameter.grad for parameter in gan.critic.parameters()]
        kept = [None if grad is None else grad.clone() for grad in found]
        with precision.autocast(cpu):
            generator_loss = gan.generator_loss(fake)
        scaler.scale(generator_loss).backward()
        for parameter, grad in zip(gan.critic.parameters(), kept, strict=True):
            parameter.grad = grad
        if is_last:
            _step(scaler, gan.generator, gan.generator_optimizer, gan.generator_scheduler, count)
            scaler.update()
        losses.append([critic_loss.item(), generator_loss.item()])
    return gan, losses


def _step(scaler: Any, network: nn.Module, optimizer: Any, scheduler: Any, count: int) -> None:
    for parameter in network.parameters():
        parameter.grad /= count  # type: ignore[operator]
    scaler.step(optimizer)
    scheduler.step()
    optimizer.zero_grad()


@pytest.mark.shows("L27", "C7")
@pytest.mark.parametrize(
    ("precision", "accumulation"),
    [*zip(_PRECISIONS, (4, 1, 2), strict=True)],
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_a_gan_has_the_bits_of_a_loop_by_hand(accumulation: int, precision: Precision) -> None:
    outcome = _train(
        None,
        precision=precision,
        is_plain=True,
        train_unit="epoch",
        total_steps=1,
        accumulation_steps=accumulation,
    )
    gan, losses = _train_by_hand(accumulation, precision)
    assert [bits for _, bits in outcome.records.values()] == [repr(pair) for pair in losses]
    for name in ("generator", "critic"):
        assert digest(outcome.model["objects"][name]) == digest(getattr(gan, name).state_dict())
    for name in ("generator", "critic"):
        optimizer = getattr(gan, f"{name}_optimizer")
        assert digest(outcome.model["objects"][f"{name}_optimizer"]) == digest(
            optimizer.state_dict()
        )
