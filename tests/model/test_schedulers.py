"""When learning-rate schedulers move, and what is refused."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from helios.errors import ArgumentError, UsageError
from helios.model.schedulers import Schedulers, find_epoch_like

Scheduler = TypeVar("Scheduler", bound=LRScheduler)


def make_optimizer() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def ready(scheduler: Scheduler) -> Scheduler:
    """Step the optimizer once, as training does: torch warns of a scheduler that comes first."""
    scheduler.optimizer.step()
    return scheduler


def halving() -> StepLR:
    return ready(StepLR(make_optimizer(), step_size=1, gamma=0.5))


def plateau() -> ReduceLROnPlateau:
    return ReduceLROnPlateau(make_optimizer(), patience=0, factor=0.5)


def rate(scheduler: LRScheduler) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


@pytest.mark.shows("L18")
def test_each_scheduler_moves_at_its_own_interval() -> None:
    parts = {"step": halving(), "epoch": halving(), "nested.0": plateau()}
    schedulers = Schedulers(parts, {"epoch": "epoch", "nested.0": "validation:score"})
    schedulers.after_step()
    assert [rate(part) for part in parts.values()] == [0.5, 1.0, 1.0]
    schedulers.after_epoch()
    assert [rate(part) for part in parts.values()] == [0.5, 0.5, 1.0]
    for score, plateau_rate in ((1.0, 1.0), (2.0, 0.5), (0.5, 0.5)):
        schedulers.after_validation({"score": score, "other": 0.0})
        assert [rate(part) for part in parts.values()] == [0.5, 0.5, plateau_rate]


def test_a_metric_that_is_missing_is_an_error_that_shows_what_is_there() -> None:
    schedulers = Schedulers({"scheduler": plateau()}, {"scheduler": "validation:score"})
    with pytest.raises(UsageError) as caught:
        schedulers.after_validation({"loss": 1.0})
    message = str(caught.value)
    for part in (
        "scheduler_interval['scheduler']",
        "'score'",
        "['loss']",
        "self.log",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("intervals", "words"),
    [
        ({"scheduler": "batch"}, r"scheduler_interval\['scheduler'\] must be.*got 'batch'"),
        ({"scheduler": "validation:"}, r"scheduler_interval\['scheduler'\] must be.*got 'valid"),
        ("epoch", r"got 'epoch'. Set it to {'scheduler': 'epoch'}"),
        ({"sheduler": "epoch"}, r"must name schedulers.*(?=.*\['scheduler'\]).*\['sheduler'\]"),
    ],
)
def test_a_wrong_interval_is_an_error_that_shows_it(intervals: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Schedulers({"scheduler": halving()}, intervals)


@pytest.mark.parametrize("intervals", [{}, {"scheduler": "epoch"}])
def test_a_plateau_without_a_metric_is_an_error_in_automatic_mode(
    intervals: dict[str, str],
) -> None:
    """It could not be moved, and would stay silent."""

    def run() -> None:
        schedulers = Schedulers({"scheduler": plateau()}, intervals)
        schedulers.after_step()

    with pytest.raises(ArgumentError, match="must name a metric for a ReduceLROnPlateau") as caught:
        run()
    assert '"validation:<metric>"' in str(caught.value)


class Follower(StepLR):
    """A scheduler of the user's own that takes a metric."""

    def step(self, score: float | None = None) -> None:  # type: ignore[override]
        self.scores = [*getattr(self, "scores", []), score]


def test_a_scheduler_of_the_users_own_may_take_a_metric() -> None:
    follower = Follower(make_optimizer(), 1)
    schedulers = Schedulers({"own": follower}, {"own": "validation:score"})
    schedulers.after_validation({"score": 0.25})
    assert follower.scores[-1] == 0.25


# PyTorch 2.6 warns of what its own SequentialLR does at a milestone.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_schedulers_inside_of_another_one_are_left_to_it() -> None:
    """As attributes of their own they would move twice."""
    optimizer = make_optimizer()
    warmup = ConstantLR(optimizer, factor=0.5, total_iters=2)
    decay = ExponentialLR(optimizer, gamma=0.5)
    outer = ready(SequentialLR(optimizer, [warmup, decay], milestones=[2]))
    schedulers = Schedulers({"decay": decay, "outer": outer, "warmup": warmup}, {})
    rates = []
    for _ in range(4):
        schedulers.after_step()
        rates.append(rate(outer))
    assert rates == [0.5, 1.0, 0.5, 0.25]
    with pytest.raises(ArgumentError, match="must name schedulers of the model"):
        Schedulers({"decay": decay, "outer": outer}, {"decay": "epoch"})


@pytest.mark.parametrize("interval", ["step", "epoch", "validation:score"])
def test_a_scheduler_that_was_moved_outside_is_an_error(interval: str) -> None:
    """In automatic mode it would move twice."""
    scheduler = plateau() if interval.startswith("validation") else halving()
    schedulers = Schedulers({"scheduler": scheduler}, {"scheduler": interval})
    move = {
        "step": schedulers.after_step,
        "epoch": schedulers.after_epoch,
        "validation:score": lambda: schedulers.after_validation({"score": 1.0}),
    }[interval]
    move()
    move()
    scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    with pytest.raises(UsageError, match=r"model\.scheduler was stepped outside") as caught:
        move()
    assert "its count was 2, now 3" in str(caught.value)
    assert "remove your call of step()" in str(caught.value)


@pytest.mark.shows("P81")
@pytest.mark.parametrize(
    ("build", "num_epochs", "is_found"),
    [
        (lambda optimizer: StepLR(optimizer, step_size=30), 30, True),
        (lambda optimizer: StepLR(optimizer, step_size=30), 29, False),
        (lambda optimizer: MultiStepLR(optimizer, milestones=[30, 60]), 90, True),
        (lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 10), 10, True),
        (lambda optimizer: ExponentialLR(optimizer, 0.9), 90, False),
    ],
)
def test_a_period_that_fits_into_the_epochs_looks_like_one_of_epochs(
    build: Any, num_epochs: float, is_found: bool
) -> None:
    schedulers = {"scheduler": ready(build(make_optimizer()))}
    assert find_epoch_like(schedulers, {}, num_epochs) == ["scheduler"] * is_found
    assert find_epoch_like(schedulers, {"scheduler": "step"}, num_epochs) == []
