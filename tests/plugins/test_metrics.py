"""Metrics: their values, where they stand, and that a resume inside an epoch repeats them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.core import rng
from helios.plugins import Metrics
from helios.state import Phase, TrainingState
from tests.support.quiet import Quiet
from tests.support.resume import resume_everywhere
from tests.support.runs import IndexModule, Outcome, Setting, SmallModel, train


class Mean:
    """A metric that needs no library."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, values: torch.Tensor) -> None:
        self.total += float(values.double().sum())
        self.count += values.numel()

    def compute(self) -> float:
        return self.total / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total, self.count = state_dict["total"], state_dict["count"]


class Listener(Quiet):
    """Notes what is logged, and where."""

    unsaved = ("heard",)

    def __init__(self) -> None:
        super().__init__("listener")
        self.heard: list[tuple[int, str, float]] = []

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.heard += [(state.global_iteration, name, value) for name, value in scalars.items()]

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(iteration, value) for iteration, found, value in self.heard if found == name]


def _ids(context: Any) -> tuple[Any, ...]:
    return (context.batch[0].float(),)


def _probabilities(context: Any) -> tuple[Any, ...]:
    """Return three classes made of the features, and the ids' remainders."""
    ids, features = context.batch
    return torch.sigmoid(features[:, :3]), ids % 3


def _of(metrics: Any, phase: Phase = Phase.TRAINING, **options: Any) -> Metrics:
    return Metrics(metrics, inputs=options.pop("inputs", _ids), phase=phase, **options)


@pytest.mark.shows("R43")
def test_a_number_of_steps_has_a_value_across_epochs(tmp_path: Path) -> None:
    listener = Listener()
    setting = Setting(total_steps=8, accumulation=2)
    outcome = train(tmp_path, setting, _of({"ids": Mean()}, every=3), listener)
    batches = [ids for ids, _ in outcome.records.values()]
    means = []
    for window in (batches[:6], batches[6:12]):
        ids = [number for batch in window for number in batch]
        means.append(sum(ids) / len(ids))
    assert listener.of("train/ids") == [(6, means[0]), (12, means[1])]


@pytest.mark.shows("H62")
def test_a_validation_has_a_value_in_the_table_and_in_the_log(tmp_path: Path) -> None:
    listener = Listener()
    metrics = _of({"ids": Mean()}, Phase.VALIDATION)
    outcome = train(tmp_path, Setting(total_steps=6), metrics, listener)
    assert listener.of("valid/ids") == [(3, 2.5), (6, 2.5)]
    assert list(outcome.tables["_val_scores"]) == ["score", "ids"]
    (path,) = tmp_path.glob("*/*_iter_6.json")
    assert '"ids": 2.5' in path.read_text()


class Shell(nn.Module):
    """A module that is a metric by its methods, and holds one of torchmetrics."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.metric = metric
        self.seen = 0

    def update(self, *arguments: Any) -> None:
        self.seen += 1
        self.metric.update(*arguments)

    def compute(self) -> Any:
        return {"value": self.metric.compute(), "seen": self.seen}

    def reset(self) -> None:
        self.metric.reset()


def _metrics_of_all_kinds(phase: Phase, **options: Any) -> Metrics:
    import torchmetrics

    kind: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
    return Metrics(
        {
            "accuracy": torchmetrics.Accuracy(**kind),
            "auroc": torchmetrics.AUROC(**kind),
            "mean": _MeanOfFirst(),
            "some": torchmetrics.MetricCollection(
                [torchmetrics.Precision(**kind), torchmetrics.Recall(**kind)]
            ),
            "wrapped": torchmetrics.wrappers.ClasswiseWrapper(
                torchmetrics.classification.MulticlassRecall(3, average=None)
            ),
            "composed": torchmetrics.Accuracy(**kind) + torchmetrics.Recall(**kind),
            "shell": Shell(torchmetrics.Accuracy(**kind)),
            "extremes": torchmetrics.wrappers.MinMaxMetric(torchmetrics.Accuracy(**kind)),
            "classes": torchmetrics.Recall(average=None, **kind),
        },
        inputs=_probabilities,
        phase=phase,
        **options,
    )


class _MeanOfFirst(Mean):
    def update(self, *arguments: torch.Tensor) -> None:  # type: ignore[override]
        super().update(arguments[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changed",
    [
        {"accumulation": 4, "total_steps": 4},
        {"unit": "epoch", "total_steps": 3, "valid_frequency": 1, "requests": True},
    ],
    ids=["accumulated", "epochs"],
)
@pytest.mark.parametrize("every", ["epoch", 3])
def test_a_resume_anywhere_gives_the_same_values(
    changed: dict[str, Any], every: int | str, tmp_path: Path
) -> None:
    setting = Setting(**{"total_steps": 14, **changed})
    listeners: list[Listener] = []

    def run(folder: Path) -> Outcome:
        listeners.append(Listener())
        return train(
            folder,
            setting,
            _metrics_of_all_kinds(Phase.TRAINING, every=every),
            _metrics_of_all_kinds(Phase.VALIDATION),
            listeners[-1],
        )

    resume_everywhere(run, tmp_path)
    whole, *resumed = (listener.heard for listener in listeners)
    names = {name for _, name, _ in whole}
    of_one = {"accuracy", "auroc", "mean", "some/MulticlassPrecision", "some/MulticlassRecall"}
    expected = of_one | {f"classes/{number}" for number in range(3)}
    assert {name.partition("/")[2] for name in names} > expected | {"composed", "shell/seen"}
    assert any(resumed)
    for heard in resumed:
        # NaN is not equal to itself.
        tail = whole[len(whole) - len(heard) :]
        assert [repr(item) for item in heard] == [repr(item) for item in tail]


class Rolling(Mean):
    """A metric that draws random numbers from all generators."""

    def update(self, values: torch.Tensor) -> None:
        import random

        super().update(torch.rand(2) + random.random())
        rng.get_default_numpy_rng().generator.normal()


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.VALIDATION])
def test_no_bit_of_the_training_changes(phase: Phase, tmp_path: Path) -> None:
    class Drawing(SmallModel):
        def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
            super().on_training_batch_end(state, should_log)
            self.noise = float(torch.rand(1))
            self.records[state.global_iteration] = (self.ids, str(self.noise))

    models = []
    for plugins in ([], [_of({"m": Rolling()}, phase)]):
        models.append(Drawing(Setting()))
        trainer = helios.Trainer(
            train_unit="iteration",
            total_steps=6,
            valid_frequency=2,
            use_cpu=True,
            print_banner=False,
            plugins=plugins,
        )
        trainer.fit(models[-1], IndexModule(Setting()))
    assert models[0].records == models[1].records
    states = [model.net.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
