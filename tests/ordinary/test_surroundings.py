"""What surrounds a model: plugins, loops, engines, logs, ways to keep checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
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
