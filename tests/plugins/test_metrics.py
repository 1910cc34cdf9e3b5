"""Metrics: their values, where they stand, and that a resume inside an epoch repeats them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.core import rng
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.model.processor import BatchProcessor
from helios.plugins.metrics import Metric, Metrics
from helios.plugins.plugin import Plugin
from helios.state import Phase, TrainingState
from tests.support.resume import copy_checkpoint, resume_everywhere
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


class Given(Mean):
    """Computes what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


class Listener(Plugin):
    """Notes what is logged, and where."""

    unsaved = ("heard",)

    def __init__(self) -> None:
        super().__init__("listener")
        self.heard: list[tuple[int, str, float]] = []

    def setup(self) -> None:
        """Nothing to prepare."""

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


def _ids_by_epoch(outcome: Outcome, length: int = 6) -> list[list[int]]:
    batches = [ids for ids, _ in outcome.records.values()]
    groups = [batches[start : start + length] for start in range(0, len(batches), length)]
    return [[number for batch in group for number in batch] for group in groups]


@pytest.mark.shows("R43")
def test_an_epoch_has_a_value(tmp_path: Path) -> None:
    listener = Listener()
    outcome = train(tmp_path, Setting(total_steps=12), _of({"ids": Mean()}), listener)
    expected = [(6, 10.5), (12, 10.5)]
    assert [sum(ids) / len(ids) for ids in _ids_by_epoch(outcome)] == [10.5, 10.5]
    assert listener.of("train/ids") == expected


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


def test_only_updates_that_were_made_are_counted(tmp_path: Path) -> None:
    class Skipper(Plugin):
        def setup(self) -> None: ...

        def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer) -> None:
            if self.context.state.global_iteration in (2, 3, 6):
                self.context.skip_step("on purpose")

    listener = Listener()
    plugins = [_of({"ids": Mean()}, every=2), Skipper("skipper"), listener]
    train(tmp_path, Setting(total_steps=6), *plugins)
    assert [iteration for iteration, _ in listener.of("train/ids")] == [4, 7, 9]


def test_what_an_error_has_left_does_not_count(tmp_path: Path) -> None:
    class Stumble(Plugin):
        unsaved = ("left",)
        left = 2

        def setup(self) -> None: ...

        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            self._act()

        def on_testing_batch_end(self, step: int) -> None:
            self._act()

        def _act(self) -> None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("on purpose")

    setting, listener, stumble = Setting(total_steps=3), Listener(), Stumble("stumble")
    testing = _of({"ids": Mean()}, Phase.TESTING)
    trainer = _trainer(_of({"ids": Mean()}, every=3), testing, listener, stumble)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(SmallModel(setting), IndexModule(setting))
    model, data = SmallModel(setting), IndexModule(setting)
    trainer.fit(model, data)
    ids = [number for ids, _ in list(model.records.values())[:3] for number in ids]
    assert listener.of("train/ids")[0] == (3, sum(ids) / len(ids))
    stumble.left = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.test(model, data)
    trainer.test(model, data)
    assert model.test_scores["ids"] == 2.5


def test_an_epoch_that_begins_anew_has_the_value_of_all_its_batches(tmp_path: Path) -> None:
    """An allowed change of the order begins the epoch under way again."""
    setting, listener = Setting(total_steps=12), Listener()
    train(tmp_path / "a", setting, _of({"ids": Mean()}))
    (path,) = (tmp_path / "a").glob("*/*_iter_9.pth")
    changed = Setting(total_steps=16, seed=6, options={"allow_changes": ("random_seed",)})
    folder = copy_checkpoint(path, tmp_path / "b")
    train(folder, changed, _of({"ids": Mean()}), listener)
    assert listener.of("train/ids")[0] == (15, 10.5)


def test_an_epoch_that_is_cut_off_has_the_value_of_its_part(tmp_path: Path) -> None:
    listener = Listener()
    outcome = train(tmp_path, Setting(total_steps=8), _of({"ids": Mean()}), listener)
    last = _ids_by_epoch(outcome)[1]
    assert listener.of("train/ids") == [(6, 10.5), (8, sum(last) / len(last))]


@pytest.mark.shows("H62")
def test_a_validation_has_a_value_in_the_table_and_in_the_log(tmp_path: Path) -> None:
    listener = Listener()
    metrics = _of({"ids": Mean()}, Phase.VALIDATION)
    outcome = train(tmp_path, Setting(total_steps=6), metrics, listener)
    assert listener.of("valid/ids") == [(3, 2.5), (6, 2.5)]
    assert list(outcome.tables["_val_scores"]) == ["score", "ids"]
    (path,) = tmp_path.glob("*/*_iter_6.json")
    assert '"ids": 2.5' in path.read_text()


class Choosy(SmallModel):
    """Decides by the plugin's value, and looks for it at the end of each pass."""

    unsaved = ("records", "setting", "found")

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.found: list[Any] = []
        if not fast_init:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
            self.scheduler_interval = {"scheduler": "validation:ids"}

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        self.found.append(self.metrics["ids"])

    def on_testing_end(self) -> None:
        self.found.append(self.test_scores["ids"])

    def have_metrics_improved(self) -> bool:
        self.found.append(self.metrics["ids"])
        return False


def _trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        **{
            "train_unit": "iteration",
            "total_steps": 6,
            "valid_frequency": 2,
            "use_cpu": True,
            "print_banner": False,
            "plugins": list(plugins),
            **options,
        }
    )


def test_the_model_decides_by_the_value() -> None:
    """Before its own on_validation_end, before the schedulers and early stopping."""
    setting = Setting()
    trainer = _trainer(_of({"ids": Mean()}, Phase.VALIDATION), early_stop_cycles=2)
    model = Choosy(setting)
    trainer.fit(model, IndexModule(setting))
    assert model.found == [2.5] * 4
    assert len(model.records) == 4
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_tests_and_validations_of_their_own_have_values() -> None:
    setting, listener = Setting(), Listener()
    trainer = _trainer(
        _of({"ids": Mean()}, Phase.VALIDATION), _of({"ids": Mean()}, Phase.TESTING), listener
    )
    model, data = Choosy(setting), IndexModule(setting)
    trainer.fit(model, data)
    model.found.clear()
    trainer.test(model, data)
    assert model.test_scores["ids"] == 2.5
    assert listener.of("test/ids") == [(6, 2.5)]
    trainer.validate(model, data)
    assert model.metrics["ids"] == 2.5
    assert model.found == [2.5, 2.5]
    trainer.fit(model, data)
    trainer.test(model, data)
    assert listener.of("test/ids") == [(6, 2.5)] * 2


@pytest.mark.shows("K14")
def test_a_trial_validation_leaves_nothing_behind(tmp_path: Path) -> None:
    def run(steps: int) -> tuple[Outcome, list[Any]]:
        listener, metrics = Listener(), _metrics_of_all_kinds(Phase.VALIDATION)
        setting = Setting(total_steps=7, options={"sanity_steps": steps})
        return train(tmp_path / str(steps), setting, metrics, listener), listener.heard

    (plain, heard), (tried, heard_too) = run(0), run(1)
    assert tried.bits() == plain.bits()
    assert heard_too == heard
    first = helios.load_checkpoint(next((tmp_path / "1").glob("*/*_iter_1.pth")))
    assert first["tables"]["_val_scores"].keys() & {"accuracy", "mean"} == set()
    assert first["plugins"]["metrics-validation"]["num_updates"] == 0


def _metrics_of_all_kinds(phase: Phase, **options: Any) -> Metrics:
    import torchmetrics

    return Metrics(
        {
            "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
            "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
            "mean": _MeanOfFirst(),
            "some": torchmetrics.MetricCollection(
                [
                    torchmetrics.Precision(task="multiclass", num_classes=3),
                    torchmetrics.Recall(task="multiclass", num_classes=3),
                ]
            ),
            "classes": torchmetrics.Recall(task="multiclass", num_classes=3, average=None),
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
        {},
        {"accumulation": 4, "total_steps": 4},
        {"unit": "epoch", "total_steps": 3, "valid_frequency": 1, "requests": True},
        {"is_manual": True, "scheduler": "none"},
    ],
    ids=["steps", "accumulated", "epochs", "manual"],
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
    assert {name.partition("/")[2] for name in names} == expected | {"score"}
    assert any(resumed)
    for heard in resumed:
        # NaN is not equal to itself.
        tail = whole[len(whole) - len(heard) :]
        assert [repr(item) for item in heard] == [repr(item) for item in tail]


def test_the_last_step_of_an_epoch_alone_is_resumed_without_a_warning(tmp_path: Path) -> None:
    """torchmetrics warns of a value without an update: it forgets its count in a checkpoint."""
    setting = Setting(total_steps=8, chkpt_frequency=6)

    def run() -> list[tuple[int, float]]:
        listener, metrics = Listener(), _metrics_of_all_kinds(Phase.TRAINING)
        train(tmp_path, setting, metrics, listener)
        return listener.of("train/accuracy")

    whole = run()
    assert [iteration for iteration, _ in whole] == [6, 8]
    for path in tmp_path.glob("*/*_iter_8.*"):
        path.unlink()
    assert run() == whole


_CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
# Each makes its metric of the library, which is imported by the tests that need it: it is slow.
_MANY: dict[str, Callable[[Any], Metric]] = {
    "accuracy": lambda library: library.Accuracy(**_CLASSES),
    "lists": lambda library: library.AUROC(**_CLASSES),
    "binned": lambda library: library.AveragePrecision(**_CLASSES, thresholds=10),
    "matrix": lambda library: library.ConfusionMatrix(**_CLASSES),
    "per sample": lambda library: library.Accuracy(**_CLASSES, average="micro", top_k=2),
    "wrapped by class": lambda library: library.wrappers.ClasswiseWrapper(
        library.classification.MulticlassRecall(3, average=None)
    ),
    "composed": lambda library: library.Accuracy(**_CLASSES) + library.Recall(**_CLASSES),
    "inside of a module": lambda library: Shell(library.Accuracy(**_CLASSES)),
    "extremes": lambda library: library.wrappers.MinMaxMetric(library.Accuracy(**_CLASSES)),
}


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


@pytest.mark.parametrize("name", _MANY)
@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_the_state_of_a_metric_is_whole(name: str, cut: int) -> None:
    """Cut after some updates, the last one among them: the value has the same bits."""
    import torchmetrics

    make = _MANY[name]
    whole, first, second = (
        Metrics({"m": make(torchmetrics)}, inputs=_probabilities) for _ in range(3)
    )
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.rand(7, 3, generator=generator), torch.randint(3, (7,), generator=generator))
        for _ in range(5)
    ]
    for plugin, part in ((whole, batches), (first, batches[:cut])):
        plugin.setup()
        for batch in part:
            _update(plugin, batch)
    second.setup()
    # What another run has left in it must not count.
    _update(second, batches[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in batches[cut:]:
        _update(second, batch)
    assert repr(second._compute()) == repr(whole._compute())


class View:
    """As much of a context as an update looks at."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def choose(self, lone: Any, shared: Any) -> Any:
        return lone


def _update(plugin: Metrics, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    probabilities, classes = batch
    plugin.context = View((classes, torch.logit(probabilities)))  # type: ignore[assignment]
    plugin._update(Phase.VALIDATION)


def test_a_running_window_goes_on_in_its_place() -> None:
    """It counts its values outside of what torchmetrics calls state."""
    from torchmetrics import SumMetric
    from torchmetrics.wrappers import Running

    plugins = [_of({"m": Running(SumMetric(), window=3)}) for _ in range(3)]
    whole, first, second = plugins
    for plugin in plugins:
        plugin.setup()
    batches = [View((torch.tensor([10.0**number]), None)) for number in range(7)]
    for plugin, part in ((whole, batches), (first, batches[:4])):
        for plugin.context in part:  # type: ignore[assignment]
            plugin._update(Phase.TRAINING)
    second.context = batches[4]  # type: ignore[assignment]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for second.context in batches[4:]:  # type: ignore[assignment]
        second._update(Phase.TRAINING)
    assert whole._compute() == second._compute() == {"m": 1110000.0}


def test_members_of_a_collection_do_not_share_by_chance() -> None:
    """A collection joins members that look alike after their first update, for good."""
    from torchmetrics import MetricCollection, classification

    collection = MetricCollection(
        {name: classification.BinaryAccuracy(float(name) / 10) for name in ("5", "7")}
    )
    plugin = Metrics({"at": collection}, inputs=lambda context: context.batch)
    plugin.setup()
    for probability in (0.9, 0.6):
        batch = torch.tensor([probability]), torch.tensor([1])
        plugin.context = View(batch)  # type: ignore[assignment]
        plugin._update(Phase.VALIDATION)
    assert plugin._compute() == {"at/5": 1.0, "at/7": 0.5}


def test_a_collection_may_be_all_there_is() -> None:
    from torchmetrics import MetricCollection, SumMetric

    collection = MetricCollection({"a": SumMetric()}, prefix="my_")
    plugin = _of(collection)
    assert list(plugin.state_dict()["metrics"]) == ["my_a"]


def test_outputs_of_the_step_and_of_a_processor_are_seen() -> None:
    """A training step may return more than the loss."""

    class Telling(SmallModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            return {"loss": super().train_step(batch, state), "ids": batch[0].float()}

    def process(model: Any, batch: Any) -> tuple[Any, torch.Tensor]:
        ids, features = batch
        return {"ids": ids.float()}, model.net(features).square().mean()

    class Processed(SmallModel):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.ids: list[int] = []
            self.batch_processor = BatchProcessor.from_callable(process)

        train_step = helios.Model.train_step
        valid_step = helios.Model.valid_step
        have_metrics_improved = helios.Model.have_metrics_improved

        def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
            """Keep no records."""

    def outputs(context: Any) -> tuple[Any, ...]:
        return (context.model_outputs["ids"],)

    for model in (Telling(Setting()), Processed(Setting())):
        listener = Listener()
        phases = [Phase.TRAINING, Phase.VALIDATION][: 1 + isinstance(model, Processed)]
        plugins = [_of({"ids": Mean()}, phase, inputs=outputs) for phase in phases]
        _trainer(*plugins, listener).fit(model, IndexModule(Setting()))
        assert listener.of("train/ids") == [(6, 10.5)]
        assert listener.of("valid/ids") == [(2, 2.5), (4, 2.5), (6, 2.5)][: 3 * (len(phases) - 1)]


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
        _trainer(*plugins).fit(models[-1], IndexModule(Setting()))
    assert models[0].records == models[1].records
    states = [model.net.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_metric_gets_no_graph_and_runs_without_gradients(tmp_path: Path) -> None:
    class Curious(Mean):
        def update(self, values: torch.Tensor) -> None:
            assert not values.requires_grad
            assert not torch.is_grad_enabled()
            super().update(values)

    plugin = _of({"m": Curious()}, inputs=lambda context: (context.model_outputs,))
    train(tmp_path, Setting(total_steps=3), plugin)


def test_values_of_other_shapes_are_spread_or_kept_in_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {
        "dict": {"a": torch.tensor(1), "b": {"c": 2}},
        "vector": torch.tensor([1.5, 2.5]),
        "one": torch.tensor([3.0]),
        "flags": torch.tensor([True, False]),
        "matrix": torch.eye(2),
    }
    for phase in (Phase.TRAINING, Phase.VALIDATION):
        listener = Listener()
        metrics = _of({name: Given(value) for name, value in values.items()}, phase)
        outcome = train(tmp_path / phase.value, Setting(total_steps=6), metrics, listener)
        prefix = phase.value[:5]
        heard = {name: value for _, name, value in listener.heard if name != "valid/score"}
        names = ["dict/a", "dict/b/c", "vector/0", "vector/1", "one", "flags/0", "flags/1"]
        assert list(heard) == [f"{prefix}/{name}" for name in names]
        assert list(heard.values()) == [1.0, 2.0, 1.5, 2.5, 3.0, 1.0, 0.0]
        said = capfd.readouterr().err
        assert ("training metric 'matrix' is not a number" in said) == (phase is Phase.TRAINING)
    assert torch.equal(outcome.tables["_val_scores"]["matrix"], torch.eye(2))


def test_a_name_that_is_taken_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plugins = [_of({"loss": Mean()}), _of({"score": Mean()}, Phase.VALIDATION)]
    train(tmp_path, Setting(total_steps=12), *plugins)
    said = capfd.readouterr().err
    assert said.count("training metric 'loss' has the name of a loss") == 1
    assert said.count("validation metric 'score' replaces a score of the model") == 1


def test_a_model_that_keeps_its_scores_finds_none_of_ours(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Keeper(SmallModel):
        def on_validation_start(self, validation_cycle: int) -> None:
            """Clear nothing."""

    trainer = _trainer(_of({"ids": Mean()}, Phase.VALIDATION))
    trainer.fit(Keeper(Setting()), IndexModule(Setting()))
    assert "replaces" not in capfd.readouterr().err


def test_other_metrics_than_before_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(total_steps=8, chkpt_frequency=2)
    train(tmp_path, setting, _of({"a": Mean(), "b": Mean()}))
    for path in tmp_path.glob("*/*_iter_[68].*"):
        path.unlink()
    listener = Listener()
    train(tmp_path, setting, _of({"a": Mean(), "c": Mean()}), listener)
    assert "'metrics-training' hold different metrics: b, c." in capfd.readouterr().err
    assert listener.of("train/a")[0] == (6, 10.5)
    assert listener.of("train/c")[0] != (6, 10.5)


def test_inputs_must_be_a_tuple(tmp_path: Path) -> None:
    plugin = _of({"m": Mean()}, inputs=lambda context: context.batch[0])
    with pytest.raises(UsageError, match="must return the tuple of arguments for update, got Ten"):
        train(tmp_path, Setting(), plugin)


_TWICE = Mean()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"metrics": {}}, ArgumentError, "dict of at least one metric"),
        ({"metrics": [Mean()]}, ArgumentError, "dict of at least one metric"),
        ({"metrics": {"a": len}}, ArgumentTypeError, "update, compute, reset.*got 'a'"),
        ({"metrics": {3: Mean()}}, ArgumentTypeError, "got 3: Mean"),
        ({"metrics": {"a": _TWICE, "b": _TWICE}}, ArgumentError, "each metric once"),
        ({"inputs": None}, ArgumentTypeError, "function of the context"),
        ({"phase": Phase.PREDICTION}, ArgumentError, "trainer.predict"),
        ({"phase": "training"}, ArgumentError, r"Phase.TRAINING, .* got 'training'"),
        ({"every": 0}, ArgumentError, "positive number of steps, got 0"),
        ({"every": True}, ArgumentError, "got True"),
        ({"every": "step"}, ArgumentError, "got 'step'"),
        ({"every": 3, "phase": Phase.TESTING}, ArgumentError, "a pass has one value"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    base = {"metrics": {"m": Mean()}, "inputs": _ids, "phase": Phase.TRAINING}
    with pytest.raises(error, match=text):
        Metrics(**{**base, **arguments})


def test_each_phase_has_a_name_of_its_own() -> None:
    names = [_of({"m": Mean()}, phase).plug_id for phase in list(Phase)[:3]]
    assert names == ["metrics-training", "metrics-validation", "metrics-testing"]
    assert _of({"m": Mean()}, plug_id="mine").plug_id == "mine"
