"""Metrics of several replicas: the same values and states for every number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helios
from helios.core import rng
from helios.errors import ArgumentError
from helios.plugins.metrics import Metrics
from helios.plugins.plugin import Plugin
from helios.state import Phase, TrainingState
from tests.support.elastic import (
    CLASSES,
    Elastic,
    ElasticData,
    ElasticModel,
    assert_same,
    make_trainer,
    read_bits,
)
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import digest


class Seen:
    """Keeps the ids that it was given, with something drawn, in their order."""

    def __init__(self, *, draws_at_the_end: bool = False) -> None:
        self.draws_at_the_end = draws_at_the_end
        self.reset()

    def reset(self) -> None:
        self.ids: list[int] = []
        self.noise: list[float] = []

    def update(self, ids: torch.Tensor, *_: Any) -> None:
        self.ids += ids.tolist()
        drawn = float(torch.rand(1)) + rng.get_default_numpy_rng().generator.random()
        self.noise.append(drawn + np.random.normal())

    def compute(self) -> dict[str, float]:
        place = sum(number * identity for number, identity in enumerate(self.ids, start=1))
        noise = sum(number * value for number, value in enumerate(self.noise, start=1))
        if self.draws_at_the_end:
            noise += float(torch.rand(1))
        return {"count": len(self.ids), "order": place, "noise": noise}

    def merge_state(self, other: Seen) -> None:
        self.ids = other.ids + self.ids
        self.noise = other.noise + self.noise

    def state_dict(self) -> dict[str, Any]:
        return {"ids": self.ids, "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ids, self.noise = list(state_dict["ids"]), list(state_dict["noise"])


class Guessing(ElasticModel):
    """Gives its scores to the metrics."""

    unsaved = ("log", "setting", "scores")

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.scores = self.head(self.body(batch[1]))
        return {"loss": super().train_step(batch, state), "scores": self.scores}

    def valid_step(self, batch: Any, step: int) -> Any:
        with torch.no_grad():
            self.scores = self.head(self.body(batch[1]))
        return super().valid_step(batch, step)

    test_step = valid_step


class Recorder(Plugin):
    """Writes what is logged, by process, and breaks off the run where it is told to.

    Args:
        folder: where to.
        until: the iteration; negative for an error there, so that the run goes back.
    """

    unsaved = ("folder", "until")

    def __init__(self, folder: Path, until: int) -> None:
        super().__init__("recorder")
        self.folder, self.until = folder, until

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        line = json.dumps([state.global_iteration, scalars])
        with (self.folder / f"logged-{self.context.rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        if state.global_iteration == self.until and self.context.rank == 0:
            self.context.interrupt("the test breaks off")
        if state.global_iteration == -self.until:
            raise RuntimeError("the test breaks off")


def _inputs(context: Any) -> tuple[Any, ...]:
    ids = context.batch[0]
    return ids, context.model.scores.argmax(1), ids % CLASSES


def _classes(context: Any) -> tuple[Any, ...]:
    return _inputs(context)[1:]


def _scores(context: Any) -> tuple[Any, ...]:
    scores = context.model.scores
    return scores, scores.roll(1, 1)


def _plugins(folder: Path, until: int) -> list[Plugin]:
    import torchmetrics

    plugins: list[Plugin] = []
    for phase in (Phase.TRAINING, Phase.VALIDATION, Phase.TESTING):
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        angle = torchmetrics.CosineSimilarity(reduction="mean")  # keeps all its inputs
        seen = Seen(draws_at_the_end=phase is Phase.TRAINING)
        kind = phase.value
        plugins += [
            Metrics({"seen": seen}, inputs=_inputs, phase=phase, plug_id=f"seen-{kind}"),
            Metrics({"accuracy": accuracy}, inputs=_classes, phase=phase, plug_id=f"acc-{kind}"),
            Metrics({"angle": angle}, inputs=_scores, phase=phase, plug_id=f"angle-{kind}"),
        ]
    often = {"inputs": _inputs, "phase": Phase.TRAINING, "every": 3}
    plugins.append(Metrics({"often": Seen()}, **often, plug_id="often"))
    return [*plugins, Recorder(folder, until)]


def _work(rank: int, folder: str, setting: Elastic, until: int = 0) -> dict[str, Any]:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model = Guessing(setting, path)
    trainer = make_trainer(path, setting, *_plugins(path, until))
    if trainer.fit(model, ElasticData(setting)):
        trainer.test(model, ElasticData(setting))
    return dict(model.test_scores)


def _train(folder: Path, setting: Elastic, count: int, until: int = 0) -> list[dict[str, Any]]:
    if until < 0:
        with pytest.raises((RankError, RuntimeError), match="the test breaks off"):
            _train_on(folder, setting, count, until)
        return []
    return _train_on(folder, setting, count, until)


def _train_on(folder: Path, setting: Elastic, count: int, until: int) -> list[dict[str, Any]]:
    if count == 1:
        return [_work(0, str(folder), setting, until)]
    return run_ranks(_work, count, str(folder), setting, until)


def _logged(folder: Path, rank: int = 0) -> dict[tuple[int, str], float]:
    """Return what was logged; what was done again after a break must be the same again."""
    found: dict[tuple[int, str], float] = {}
    for line in (folder / f"logged-{rank}.jsonl").read_text().splitlines():
        iteration, scalars = json.loads(line)
        for name, value in scalars.items():
            assert found.setdefault((iteration, name), value) == value
    return found


def _states(folder: Path) -> dict[str, str]:
    """Return digests of the states of plugins in all checkpoints."""
    return {
        f"{path.name} {name}": digest(state)
        for path in sorted((folder / "elastic").glob("*.pth"))
        for name, state in helios.load_checkpoint(path)["plugins"].items()
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("unit", "total", "counts"), [("iteration", 9, (3, 4)), ("epoch", 2, (2,))]
)
def test_values_and_states_are_the_same_for_every_number_of_processes(
    tmp_path: Path, unit: str, total: int, counts: tuple[int, ...]
) -> None:
    setting = Elastic(unit=unit, total_steps=total, options={"print_frequency": 1})
    expected = _train(tmp_path / "1", setting, 1)
    logged = _logged(tmp_path / "1")
    names = {name for _, name in logged}
    assert {"train/accuracy", "valid/angle", "test/seen/order", "train/often/noise"} <= names
    assert expected[0]["seen/count"] == 11
    for count in counts:
        folder = tmp_path / str(count)
        assert _train(folder, setting, count) == expected * count
        for rank in range(count):
            assert _logged(folder, rank) == logged
        assert _states(folder) == _states(tmp_path / "1")
        assert_same(read_bits(folder), read_bits(tmp_path / "1"))


class _Still(helios.Model):
    """Classifies noise; nothing changes it."""

    def __init__(self) -> None:
        super().__init__("still")

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.scores = self.net(batch[0])
        return torch.nn.functional.cross_entropy(self.scores, batch[1])


class _Noise(helios.DataModule):
    def __init__(self, length: int, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(length, 4, generator=generator)
        self.classes = torch.arange(length) % 3
        self.options = options

    def setup(self) -> None:
        params = helios.DataLoaderParams(**self.options)
        data = torch.utils.data.TensorDataset(self.features, self.classes)
        self._train_dataset = self._create_dataset(data, params)


class _Logged(Plugin):
    unsaved = ("values",)

    def __init__(self) -> None:
        super().__init__("logged")
        self.values: list[float] = []

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.values += [value for name, value in scalars.items() if name.startswith("train/acc")]


def _measure(data: _Noise, inputs: Callable[[Any], Any], length: int) -> tuple[list[float], float]:
    """Return the accuracy of each of two epochs, and that of scikit-learn."""
    # Imported slowly, in each process that collects tests.
    from sklearn.metrics import accuracy_score
    from torchmetrics.classification import MulticlassAccuracy

    logged, model = _Logged(), _Still()
    accuracy = MulticlassAccuracy(num_classes=3, average="micro")
    metrics = Metrics({"accuracy": accuracy}, inputs=inputs, phase=Phase.TRAINING)
    trainer = helios.Trainer(
        train_unit="epoch",
        total_steps=2,
        num_replicas=3,
        use_cpu=True,
        print_banner=False,
        plugins=[metrics, logged],
    )
    trainer.fit(model, data)
    assert len(logged.values) == 2
    with torch.no_grad():
        found = model.net(data.features[:length]).argmax(1)
    return logged.values, float(accuracy_score(data.classes[:length], found))


@pytest.mark.shows("P125")
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 2, "num_workers": 1},
        {"batch_size": 8, "drop_last": True},
        {"batch_sampler": [[0, 1, 2], [3, 4], [5], [6, 7], [8, 9], [10, 11], [12]]},
    ],
    ids=str,
)
def test_padding_of_an_epoch_does_not_count(options: dict[str, Any]) -> None:
    """13 samples over three replicas, and seven lists of samples."""
    is_cut = "drop_last" in options
    found, expected = _measure(
        _Noise(26 if is_cut else 13, **options),
        lambda context: (context.model.scores.argmax(1), context.batch[1]),
        24 if is_cut else 13,
    )
    assert found == pytest.approx([expected] * 2)


class Unlike(Seen):
    """Has no way to be joined."""

    merge_state = None  # type: ignore[assignment]


class Shifted(Seen):
    """Two without data are not one without data."""

    def merge_state(self, other: Seen) -> None:
        self.noise = [*self.noise, 1.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: Unlike(), "it has no merge_state"),
        (lambda _: Shifted(), "merging two without data does not give one without data"),
        (lambda library: library.PearsonCorrCoef(), "cannot be merged: RuntimeError"),
    ],
)
def test_a_metric_that_cannot_be_joined_is_refused_before_the_training(
    tmp_path: Path, make: Callable[[Any], Any], text: str
) -> None:
    import torchmetrics

    setting = Elastic(num_replicas=2)
    plugin = Metrics({"odd": make(torchmetrics)}, inputs=_inputs)
    trainer = make_trainer(tmp_path, setting, plugin)
    with pytest.raises(ArgumentError, match="merge_state") as e:
        trainer.fit(ElasticModel(setting, tmp_path), ElasticData(setting))
    assert text in str(e.value)
    assert "got 'odd'" in str(e.value)
    assert "return {name: (sum, weight)} from the step" in str(e.value)
    assert not list(tmp_path.glob("turns-*"))
