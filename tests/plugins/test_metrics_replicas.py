"""Metrics of several replicas: the same values and states for every number of processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helios
from helios.core import rng
from helios.plugins import Metrics, Plugin
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
from tests.support.quiet import Quiet
from tests.support.ranks import FORK, RankError, run_ranks
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

    def __add__(self, other: Seen) -> Seen:
        other.merge_state(self)
        return other

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


class Unlike(Seen):
    merge_state = None  # type: ignore[assignment]


class Recorder(Quiet):
    """Writes what is logged, by process, and is killed where it is told to.

    Args:
        folder: where to.
        until: the iteration in which rank 1 is killed.
    """

    unsaved = ("folder", "until")

    def __init__(self, folder: Path, until: int) -> None:
        super().__init__("recorder")
        self.folder, self.until = folder, until

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        line = json.dumps([state.global_iteration, scalars])
        with (self.folder / f"logged-{self.context.rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        if state.global_iteration == self.until and self.context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Counter(Quiet):
    """Keeps the samples of each replica, and logs them together."""

    _internals = "parts"

    def _begin(self) -> None:
        self.parts = self.context.per_replica(Seen, lambda first, second: first + second)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._begin()
        self.parts.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.parts.state_dict()

    def on_fit_start(self) -> None:
        if self.context.state.global_iteration == 0:
            self._begin()

    def on_forward_end(self, context: Any) -> None:
        if context.phase is Phase.TRAINING:
            self.parts.current.update(context.batch[0])

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        values = self.parts.merged().compute()
        self.context.log({f"counter/{name}": value for name, value in values.items()})


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
        kind, both = phase.value, {"seen": seen, "unlike": Unlike()}
        correlation = torchmetrics.PearsonCorrCoef(CLASSES)
        plugins += [
            Metrics(both, inputs=_inputs, phase=phase, plug_id=f"seen-{kind}"),
            Metrics({"linear": correlation}, inputs=_scores, phase=phase, plug_id=f"corr-{kind}"),
            Metrics({"accuracy": accuracy}, inputs=_classes, phase=phase, plug_id=f"acc-{kind}"),
            Metrics({"angle": angle}, inputs=_scores, phase=phase, plug_id=f"angle-{kind}"),
        ]
    often = {"inputs": _inputs, "phase": Phase.TRAINING, "every": 3}
    plugins.append(Metrics({"often": Seen()}, **often, plug_id="often"))
    return [*plugins, Counter(), Recorder(folder, until)]


def _work(rank: int, folder: str, setting: Elastic, until: int = 0) -> dict[str, Any]:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model = Guessing(setting, path)
    trainer = make_trainer(path, setting, *_plugins(path, until))
    if trainer.fit(model, ElasticData(setting)):
        trainer.test(model, ElasticData(setting))
    return dict(model.test_scores)


def _train(folder: Path, setting: Elastic, count: int, until: int = 0) -> list[dict[str, Any]]:
    if count == 1:
        return [_work(0, str(folder), setting, until)]
    return run_ranks(_work, count, str(folder), setting, until, context=FORK)


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


NAMES = {
    "train/accuracy",
    "valid/angle",
    "test/seen/order",
    "test/unlike/order",
    "valid/linear/0",
    "train/often/noise",
    "counter/noise",
}


@pytest.mark.parametrize(
    ("unit", "total"), [("iteration", 6), pytest.param("epoch", 2, marks=pytest.mark.full)]
)
def test_values_and_states_are_the_same_after_a_kill_on_other_processes(
    unit: str, total: int, tmp_path: Path
) -> None:
    setting = Elastic(unit=unit, total_steps=total, options={"print_frequency": 1})
    expected = _train(tmp_path / "whole", setting, 1)
    logged = _logged(tmp_path / "whole")
    assert {name for _, name in logged} >= NAMES
    assert expected[0]["seen/count"] == expected[0]["unlike/count"] == 11
    folder = tmp_path / "killed"
    with pytest.raises(RankError):
        _train(folder, setting, 3, until=3)
    assert _train(folder, setting, 2) == expected * 2
    assert _logged(folder, 0) == _logged(folder, 1) == logged
    assert _states(folder) == _states(tmp_path / "whole")
    assert_same(read_bits(folder), read_bits(tmp_path / "whole"))


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


class _Logged(Quiet):
    unsaved = ("values",)

    def __init__(self) -> None:
        super().__init__("logged")
        self.values: list[float] = []

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.values += [value for name, value in scalars.items() if name == "train/accuracy"]


@pytest.mark.shows("P125")
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (13, {"batch_size": 3, "shuffle": True}),
        (26, {"batch_size": 8, "drop_last": True}),
        (13, {"batch_sampler": [[0, 1, 2], [3, 4], [5], [6, 7], [8, 9], [10, 11], [12]]}),
    ],
)
def test_padding_of_an_epoch_does_not_count(length: int, options: dict[str, Any]) -> None:
    """13 samples over three replicas, and seven lists of samples; cut off, 24 of 26 count."""
    from torchmetrics.classification import MulticlassAccuracy

    logged, model, data = _Logged(), _Still(), _Noise(length, **options)
    metrics = Metrics(
        {"accuracy": MulticlassAccuracy(num_classes=3, average="micro")},
        inputs=lambda context: (context.model.scores.argmax(1), context.batch[1]),
        phase=Phase.TRAINING,
    )
    trainer = helios.Trainer(
        total_steps=2,
        num_replicas=3,
        use_cpu=True,
        print_banner=False,
        plugins=[metrics, logged],
    )
    trainer.fit(model, data)
    count = length // 24 * 24 or length
    with torch.no_grad():
        hits = model.net(data.features[:count]).argmax(1) == data.classes[:count]
    assert logged.values == pytest.approx([hits.double().mean().item()] * 2)
