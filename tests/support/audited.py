"""Trainings with a layer whose backward may compute wrongly, for audits to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import helios
from tests.support.elastic import CLASSES, SIDE, Elastic, ElasticData, ElasticModel, make_trainer
from tests.support.runs import EventLog
from tests.support.warned import collect_warnings

PLACE = (3, 5)
"""The element of the weight whose gradient is wrong."""
NAME = f"head.weight{list(PLACE)}"

Errs = Callable[[int], bool]
"""Takes how many backwards of the layer there were in this process before; whether this one errs.
"""


class _Flip(torch.autograd.Function):
    """Hands a weight on, and flips the lowest bit of an element of its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, errs: Callable[[], bool]) -> torch.Tensor:
        ctx.errs = errs
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        if ctx.errs():
            bits = gradient.view(torch.int32)
            bits[PLACE] ^= 1
        return gradient, None


class FaultyLinear(nn.Linear):
    """A linear layer of a device that may err.

    The count is in a list that no state knows of, as the moods of hardware are.
    """

    def __init__(self, errs: Errs) -> None:
        super().__init__(4 * (SIDE - 2) ** 2, CLASSES)
        numbers = iter(range(1 << 30))

        def is_wrong() -> bool:
            return errs(next(numbers))

        self.is_wrong = is_wrong

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        weight = _Flip.apply(self.weight, self.is_wrong)
        return nn.functional.linear(features, weight, self.bias)


class FaultyModel(ElasticModel):
    """An elastic model whose head may err, as often as an iterator says that no file can hold."""

    unsaved = (*ElasticModel.unsaved, "head.is_wrong")

    def __init__(self, setting: Elastic, folder: Path, errs: Errs) -> None:
        super().__init__(setting, folder)
        self._errs = errs

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        torch.manual_seed(5)
        self.head = FaultyLinear(self._errs)
        networks = nn.ModuleList([self.body, self.head, self.branch, self.idle]).to(self.device)
        if not fast_init:
            self.optimizer = torch.optim.Adam(networks.parameters(), lr=0.02)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)


def never(number: int) -> bool:
    return False


def always(number: int) -> bool:
    return True


def on_rank_1(number: int) -> bool:
    return dist.get_rank() == 1


def fit(
    folder: Path, setting: Elastic, errs: Errs = never, *, hears: bool = True, **more: Any
) -> tuple[list[str], str, int, list[Any]]:
    """Train; returns the warnings about audits, the error, the exit code and the events."""
    folder.mkdir(parents=True, exist_ok=True)
    log = EventLog()
    trainer = make_trainer(folder, setting, *([log] if hears else []), **more)
    model = FaultyModel(setting, folder, errs)
    error = ""
    with collect_warnings() as warnings:
        try:
            trainer.fit(model, ElasticData(setting))
        except helios.AuditError as found:
            error = str(found)
    return [text for text in warnings if "udit" in text], error, trainer.exit_code, log.events


def fit_rank(rank: int, folder: Path, setting: Elastic, errs: Errs, more: dict[str, Any]) -> Any:
    """Train on one of several ranks; see :func:`fit`."""
    return fit(folder, setting, errs, **more)
