"""In which type steps compute, and what stays in full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import helios
from helios.engines.precision import Precision, ScalerOptions
from helios.errors import ArgumentError, ArgumentTypeError
from helios.hooks.context import Context
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.resume import resume_everywhere
from tests.support.runs import Setting, train

CPU = torch.device("cpu")
LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.shows("E22")
def test_only_half_precision_has_a_scaler_and_its_options() -> None:
    assert [precision.scaler for precision in Precision.all()] == [None, None, ScalerOptions()]
    precision = Precision.fp16(2.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    assert precision.scaler == ScalerOptions(2.0, 4.0, 0.25, 3)
    assert (precision.value, precision == Precision.FP16) == ("fp16", False)
    assert Precision.fp16() == Precision.FP16 == Precision("fp16")


def test_an_engine_takes_the_name_of_a_precision() -> None:
    assert helios.Engine("cpu", precision="bf16").precision == Precision.BF16
    with pytest.raises(ArgumentError, match='must be "fp32", "bf16" or "fp16", got \'bf17\''):
        helios.Engine("cpu", precision="bf17")
    with pytest.raises(ArgumentTypeError, match=r"or its name, got 16. Pass"):
        helios.Engine("cpu", precision=16)  # type: ignore[arg-type]


@pytest.mark.shows("E23")
def test_full_precision_leaves_a_users_own_autocast_alone() -> None:
    """A null context, not one that switches autocast off."""
    with torch.autocast("cpu", dtype=LOW), Precision.FP32.autocast(CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == LOW


class Probe(helios.Model):
    """Notes the type of its activations, by step, and where autocast is on."""

    unsaved = ("dtypes",)

    def __init__(self) -> None:
        super().__init__("probe")
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = AdamW(self.net.parameters(), lr=0.1)

    def forward(self, step: str, batch: Tensor) -> Tensor:
        hidden = self.net[0](batch)
        self.dtypes.setdefault(step, set()).add(hidden.dtype)
        return self.net[2](self.net[1](hidden))

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        return self.forward("train", batch).float().square().mean()

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return {"score": (self.forward("valid", batch).float().sum(), len(batch))}

    def test_step(self, batch: Any, step: int) -> None:
        self.forward("test", batch)

    def predict_step(self, batch: Any, step: int) -> Tensor:
        return self.forward("predict", batch)


class Rows(helios.DataModule):
    def setup(self) -> None:
        rows = self._create_dataset(
            [torch.arange(3.0) + index for index in range(8)],
            helios.DataLoaderParams(batch_size=4),
        )
        self._train_dataset = self._valid_dataset = rows
        self._test_dataset = self._predict_dataset = rows


class HooksInFull(Quiet):
    """Fails where autocast reaches a hook."""

    def __init__(self) -> None:
        super().__init__("hooks-in-full")
        self.heard: set[str] = set()

    def _check(self, event: str) -> None:
        assert not torch.is_autocast_enabled("cpu"), event
        self.heard.add(event)

    def on_forward_start(self, context: Context) -> None:
        self._check("forward")

    def on_forward_end(self, context: Context) -> None:
        self._check("forward done")

    def on_backward_start(self, loss: Tensor) -> None:
        assert loss.dtype == FULL
        loss.register_hook(lambda grad: self._check("inside of backward"))
        self._check("backward")

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert {grad.dtype for grad in grads} == {FULL}
        self._check("step")


@pytest.mark.shows("L28", "K18", "E24")
def test_every_step_computes_in_bf16_and_all_state_stays_in_full_precision() -> None:
    """Activations are low; weights, gradients, moments and statistics are not."""
    hooks = HooksInFull()
    trainer = helios.Trainer(
        precision="bf16",
        total_steps=2,
        valid_frequency=1,
        plugins=[hooks],
        use_cpu=True,
        print_banner=False,
    )
    model = Probe()
    trainer.fit(model, Rows())
    trainer.test(model, Rows())
    predictions = trainer.predict(model, Rows())
    assert model.dtypes == {name: {LOW} for name in ("train", "valid", "test", "predict")}
    assert {prediction.dtype for prediction in predictions} == {LOW}
    assert len(hooks.heard) == 5
    tensors = [*model.net.parameters(), *model.net.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {FULL}


@pytest.mark.shows("E22")
def test_a_run_in_low_precision_resumes_everywhere(tmp_path: Path) -> None:
    """Bf16 needs no scaler, and so no state."""
    setting = Setting(total_steps=8, accumulation=2, options={"precision": "bf16"})
    whole = resume_everywhere(lambda folder: train(folder, setting), tmp_path)
    full = train(tmp_path / "full", Setting(total_steps=8, accumulation=2))
    assert whole.records != full.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.0}, r"fp16\(init_scale=\.\.\.\) must be a positive number, got 0.0"),
        ({"growth_factor": 1.0}, r"growth_factor=\.\.\.\) must be a number above 1, got 1.0"),
        ({"backoff_factor": 1}, "must be a number between 0 and 1, got 1. Omit it for 0.5"),
        ({"growth_interval": 0}, r"growth_interval=\.\.\.\) must be a positive int, got 0"),
    ],
)
def test_a_wrong_option_of_the_scaler_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Precision.fp16(**options)
