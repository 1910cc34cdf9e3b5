"""What surrounds a model: plugins, loops, engines, logs, ways to keep checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.checkpoint.retention import CheckpointStore
from helios.core.rng import get_default_numpy_rng
from helios.engines.engine import Engine
from helios.loops import BatchLoop, YieldLoop
from helios.plugins import (
    EMA,
    SWA,
    CSVLogger,
    EarlyStopping,
    GradientNormMonitor,
    JSONLLogger,
    LearningRateMonitor,
    Metrics,
    NaNGuard,
    Plugin,
    TimeLimit,
)
from helios.state import TrainingState
from tests.ordinary.harness import WIDTH, Case, Regression, assert_ordinary


def error_metric() -> Plugin:
    """Return a plugin that measures by torchmetrics."""
    from torchmetrics.regression import MeanAbsoluteError

    return Metrics(
        {"error": MeanAbsoluteError()},
        inputs=lambda context: (context.model.net(context.batch[0]), context.batch[1]),
    )


PLUGINS: dict[str, Callable[[Path], Plugin]] = {
    "EMA": lambda _: EMA(decay=0.9, network="net"),
    "SWA": lambda _: SWA(start=5, network="net"),
    "EarlyStopping": lambda _: EarlyStopping("loss", mode="min", patience=50),
    "GradientNormMonitor": lambda _: GradientNormMonitor(per_network=True),
    "LearningRateMonitor": lambda _: LearningRateMonitor(momentum=True),
    "NaNGuard": lambda _: NaNGuard(),
    "Metrics": lambda _: error_metric(),
    "CSVLogger": lambda folder: CSVLogger(folder / "rows.csv"),
    "JSONLLogger": lambda folder: JSONLLogger(folder / "rows.jsonl"),
    "TimeLimit": lambda _: TimeLimit("10:00:00"),
}


@pytest.mark.shows("S43")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_of_the_package_resumes_without_a_warning(name: str, tmp_path: Path) -> None:
    def options(folder: Path) -> dict[str, Any]:
        return {"valid_frequency": 4, "print_frequency": 2, "plugins": [PLUGINS[name](folder)]}

    assert_ordinary(Case(Regression, options=options), tmp_path)


class Counting(Plugin):
    """Counts, and keeps a history."""

    def __init__(self) -> None:
        super().__init__("counting")

    def setup(self) -> None:
        self.steps = 0
        self.history: list[int] = []

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.steps += 1
        self.history.append(state.global_iteration)


class Looking(Plugin):
    """Holds what belongs to the model, and a state that it saves itself."""

    def __init__(self) -> None:
        super().__init__("looking")
        self.total = 0.0

    def setup(self) -> None:
        self.norms: list[float] = []

    def on_fit_start(self) -> None:
        self.network = self.context.model.net
        self.parameters = dict(self.network.named_parameters())

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.norms.append(float(self.parameters["0.weight"].detach().norm()))
        self.total += self.norms[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "norms": self.norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total, self.norms = state_dict["total"], list(state_dict["norms"])


@pytest.mark.shows("S43")
@pytest.mark.parametrize("kind", [Counting, Looking])
def test_a_plugin_of_the_user_resumes_without_a_warning(
    kind: Callable[[], Plugin], tmp_path: Path
) -> None:
    assert_ordinary(Case(Regression, options=lambda _: {"plugins": [kind()]}), tmp_path)


class Gan(helios.Model):
    """Gives one loss for each optimizer."""

    def __init__(self) -> None:
        super().__init__("gan")

    def setup(self, fast_init: bool = False) -> None:
        self.generator = nn.Linear(2, WIDTH)
        self.critic = nn.Linear(WIDTH, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        fake = self.generator(torch.randn(len(batch[0]), 2))
        yield (self.critic(fake.detach()) - self.critic(batch[0])).mean()
        yield -self.critic(fake).mean()


def test_a_yield_loop_resumes_without_a_warning(tmp_path: Path) -> None:
    def connect(trainer: helios.Trainer) -> None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())

    assert_ordinary(Case(Gan, connect=connect), tmp_path)


class Noisy(BatchLoop):
    """Adds noise to each batch, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def prepare(self, batch: Any) -> Any:
        self.batches += 1
        inputs, targets = super().prepare(batch)
        return inputs + self.batches * 0.01 + torch.rand(1), targets


@pytest.mark.shows("S43")
def test_a_loop_of_the_user_resumes_without_a_warning(tmp_path: Path) -> None:
    def connect(trainer: helios.Trainer) -> None:
        trainer.fit_loop.epoch_loop.connect(batch_loop=Noisy())

    assert_ordinary(Case(Regression, connect=connect), tmp_path)


class Sharpening(Engine):
    """Scales losses by a factor that grows."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.factor = 1.0

    def backward_loss(self, loss: Tensor, inputs: Any = None) -> None:
        self.factor *= 1.0 + 0.01 * get_default_numpy_rng().generator.random()
        super().backward_loss(loss * self.factor, inputs)


@pytest.mark.shows("S43")
def test_an_engine_of_the_user_resumes_without_a_warning(tmp_path: Path) -> None:
    case = Case(Regression, options=lambda _: {"use_cpu": None, "engine": Sharpening()})
    assert_ordinary(case, tmp_path)


class Reading(helios.DataModule):
    """Finds out its sizes, and counts the epochs that it was asked for."""

    def prepare_data(self) -> None:
        """Nothing to fetch."""

    def setup(self) -> None:
        inputs = torch.sin(torch.arange(10.0 * WIDTH)).reshape(10, WIDTH)
        self.mean, self.deviation = inputs.mean(0), inputs.std(0)
        self.files = [f"file-{number}" for number in range(10)]
        self.loaders = 0
        scaled = (inputs - self.mean) / self.deviation
        data = torch.utils.data.TensorDataset(scaled, inputs[:, :1])
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(data, params)
        parts = torch.utils.data.random_split(data, [6, 4], torch.Generator().manual_seed(0))
        plain = helios.DataLoaderParams(batch_size=2)
        self._valid_dataset = [self._create_dataset(part, plain) for part in parts]

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return super().train_dataloader()


@pytest.mark.shows("S43")
def test_a_data_module_of_the_user_resumes_without_a_warning(tmp_path: Path) -> None:
    case = Case(Regression, Reading, options=lambda _: {"valid_frequency": 4})
    assert_ordinary(case, tmp_path)


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "epochs": lambda _: {"train_unit": "epoch", "total_steps": 4, "chkpt_frequency": 1},
    "TensorBoard and a log": lambda folder: {
        "enable_tensorboard": True,
        "run_path": folder / "events",
        "enable_file_logging": True,
        "log_path": folder / "logs",
        "print_frequency": 2,
    },
    "a banner and bars": lambda _: {"print_banner": True, "enable_progress_bar": True},
    "files that are written at once": lambda _: {"store": CheckpointStore(is_async=False)},
    "clipping by value": lambda _: {"clip_value": 0.1, "enable_deterministic": True},
}


@pytest.mark.shows("S43")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_trainer_resumes_without_a_warning(name: str, tmp_path: Path) -> None:
    assert_ordinary(Case(Regression, options=OPTIONS[name]), tmp_path)
