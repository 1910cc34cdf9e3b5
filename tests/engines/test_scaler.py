"""Scaled losses: an overflow moves nothing but the scale, which is state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import helios
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Setting, SmallModel, train

CPU = torch.device("cpu")
SMALL = Precision.fp16(2.0**4, growth_interval=3)


def engine_for(**options: float) -> Engine:
    return Engine(CPU, precision=Precision.fp16(4.0, **options))


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def run_window(engine: Engine, optimizer: SGD, *factors: float) -> bool:
    """Do what loops do with a window of one parameter."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for factor in factors:
        engine._open_micro_batches += 1
        engine.backward_loss((parameter * factor).sum())
    engine.average_gradients(optimizer)
    engine.clip_gradients(optimizer)
    is_committed = engine.optimizer_step(optimizer)
    engine.zero_grad(optimizer)
    engine.close_window()
    return is_committed


def scale_of(engine: Engine) -> tuple[float, int]:
    state = engine.state_dict()["scaler"]
    return state["scale"], state["_growth_tracker"]


@pytest.mark.shows("K21", "E22", "E25")
def test_backward_scales_and_the_average_unscales() -> None:
    """Hooks and clipping see gradients as they are."""
    engine, parameter = engine_for(), weight()
    optimizer = SGD([parameter], lr=1.0)
    engine._open_micro_batches += 1
    engine.backward_loss(parameter.sum() * 3)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [12.0]
    engine.average_gradients(optimizer)
    assert parameter.grad.tolist() == [3.0]
    engine.clip_gradients(optimizer)
    engine.unscale_gradients(optimizer)
    assert engine.optimizer_step(optimizer)
    assert (parameter.tolist(), parameter.grad.tolist()) == ([-2.0], [3.0])


@pytest.mark.shows("E26")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_is_left_out_where_a_gradient_is_not_finite(bad: float) -> None:
    """The scale is halved, and the next window is stepped again."""
    engine, parameter = engine_for(), weight()
    optimizer = SGD([parameter], lr=1.0)
    assert run_window(engine, optimizer, 1.0, bad) is False
    assert (parameter.tolist(), scale_of(engine)) == ([1.0], (2.0, 0))
    assert run_window(engine, optimizer, 1.0, 3.0) is True
    assert (parameter.tolist(), scale_of(engine)) == ([-1.0], (2.0, 1))


@pytest.mark.shows("E22")
def test_the_whole_scaler_is_state() -> None:
    engine, other = engine_for(growth_interval=3), engine_for(growth_interval=3)
    optimizer = SGD([weight()], lr=0.0)
    for factor in (float("inf"), 1.0, 1.0):
        run_window(engine, optimizer, factor)
    other.load_state_dict(engine.state_dict())
    assert other.state_dict() == engine.state_dict()
    assert scale_of(other) == (2.0, 2)
    for known in (engine, other):
        run_window(known, optimizer, 1.0)
        assert scale_of(known) == (4.0, 0)


class Planted(SmallModel):
    """Some of its losses are infinite."""

    infinite: tuple[int, ...] = (3, 4, 9)
    unsaved = ("records", "setting", "rates")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.rates: dict[int, float] = {}

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        loss = super().train_step(batch, state)
        assert loss is not None
        return loss * float("inf") if state.global_iteration in self.infinite else loss.float()

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.rates[state.global_iteration] = self.scheduler.get_last_lr()[0]


class Counts(Quiet):
    """Notes what each window has moved."""

    unsaved = ("steps",)

    def __init__(self) -> None:
        super().__init__("counts")
        self.steps: list[tuple[int, int, bool]] = []

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self.steps.append((state.global_iteration, state.current_iteration, committed))


@pytest.mark.shows("R26", "E26")
def test_a_step_that_was_left_out_moves_neither_scheduler_nor_count() -> None:
    """By steps the run makes up for it."""
    setting, counts = Setting(total_steps=9), Counts()
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=9,
        random_seed=5,
        print_banner=False,
        engine=Engine(CPU, precision=SMALL),
        plugins=[counts],
    )
    model = Planted(setting)
    trainer.fit(model, IndexModule(setting))
    skipped = [step[0] for step in counts.steps if not step[2]]
    assert skipped == list(Planted.infinite)
    assert [step[1] for step in counts.steps] == [1, 2, 2, 2, 3, 4, 5, 6, 6, 7, 8, 9]
    rates = model.rates
    assert rates[2] == rates[3] == rates[4] != rates[5]
    assert rates[8] == rates[9] != rates[10]


@pytest.mark.shows("R26", "E22", "E26", "P3")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(total_steps=8),
        Setting(unit="epoch", total_steps=4, accumulation=2),
        Setting(unit="epoch", total_steps=8, accumulation=2, options={"num_replicas": 3}),
    ],
    ids=["steps", "epochs", "replicas"],
)
def test_a_run_with_planted_infinities_resumes_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    """The scale after every safe point is that of an undisturbed run."""
    monkeypatch.setattr("tests.support.runs.SmallModel", Planted)
    scales: dict[int, list[tuple[float, int]]] = {}

    class Scales(Quiet):
        def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
            found = scales.setdefault(state.global_iteration, [])
            found.append(scale_of(self.context.engine))

    setting.options["precision"] = SMALL
    resume_everywhere(lambda folder: train(folder, setting, Scales("scales")), tmp_path)
    assert all(len(set(found)) == 1 for found in scales.values()), scales
    assert len({found[0] for found in scales.values()}) >= 4
    assert max(map(len, scales.values())) > 2
