"""Metrics of several replicas: the same values and states for every number of processes."""

from __future__ import annotations

import copy
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
from helios.plugins.metric_state import Tally
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
from tests.support.starts import Forked


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


@pytest.mark.full
def test_an_epoch_that_others_go_on_with_has_the_value_of_all_its_batches(tmp_path: Path) -> None:
    setting = Elastic(total_steps=9, chkpt_frequency=2, options={"print_frequency": 1})
    expected = _train(tmp_path / "whole", setting, 1)
    folder = tmp_path / "broken"
    for until, count in ((1, 4), (3, 2), (-6, 1), (0, 3)):
        found = _train(folder, setting, count, until)
    assert found == expected * count
    assert _logged(folder) == _logged(tmp_path / "whole")
    assert _states(tmp_path / "whole").items() <= _states(folder).items()


def test_an_epoch_has_the_samples_of_all_replicas_in_their_order(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=3, total_steps=5, length=29, options={"valid_frequency": None})
    plugins = [
        Metrics({"seen": Seen()}, inputs=_inputs, phase=Phase.TRAINING),
        Recorder(tmp_path, 0),
    ]
    trainer = make_trainer(tmp_path, setting, *plugins)
    trainer.fit(Guessing(setting, tmp_path), ElasticData(setting))
    lines = read_bits(tmp_path).turns
    ids = [i for replica in range(3) for it in range(1, 6) for i in lines[it, replica]["ids"]]
    # The last sample of the last replica pads the epoch: it is the first one.
    assert ids.pop() == lines[1, 0]["ids"][0]
    logged = _logged(tmp_path)
    assert logged[5, "train/seen/count"] == len(ids) == len(set(ids)) == 29
    assert logged[5, "train/seen/order"] == sum(n * i for n, i in enumerate(ids, start=1))


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
        {"batch_size": 2},
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


@pytest.mark.shows("P125")
def test_padding_that_cannot_be_told_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    def inputs(context: Any) -> tuple[Any, ...]:
        return context.model.scores.argmax(1)[None], context.batch[1][None]

    _measure(_Noise(13, batch_size=3), inputs, 13)
    assert capsys.readouterr().err.count("count the samples twice that pad") == 1


class _Mapper(Plugin):
    """Owns the training batch: what the model gets is not what the loader gave."""

    def __init__(self) -> None:
        super().__init__("mapper")

    def setup(self) -> None:
        """Nothing to prepare."""

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return [batch[0] + 100, batch[1]]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_inputs_see_the_batch_as_at_its_end(tmp_path: Path, num_replicas: int) -> None:
    setting = Elastic(num_replicas=num_replicas, total_steps=1, unit="epoch", length=8)
    plugins = [
        Metrics({"seen": Seen()}, inputs=_inputs, phase=Phase.TRAINING),
        Recorder(tmp_path, 0),
        _Mapper(),
    ]
    trainer = make_trainer(tmp_path, setting, *plugins)
    trainer.fit(Guessing(setting, tmp_path), ElasticData(setting))
    (order,) = [v for (_, name), v in _logged(tmp_path).items() if name == "train/seen/order"]
    assert 0 < order <= sum(n * i for n, i in enumerate(range(8), start=1))


class _View:
    """As much of a context as the turns of two replicas look at."""

    phase = Phase.TRAINING
    padding = (0, 0)

    def __init__(self) -> None:
        self.engine = self.replicas = self._run = self
        self.local_replicas = range(2)

    def show(self, replica: int, number: int) -> _View:
        self.replica = replica
        self.batch = self.raw_batch = [torch.tensor([number])]
        return self

    def choose(self, lone: Any, shared: Any) -> Any:
        return shared

    def gather_replicas(self, values: Any) -> list[Any]:
        return [*values]


def test_the_last_forward_of_a_batch_counts() -> None:
    """A loop may go through a batch several times; with one replica its end counts."""
    rng.seed_rngs(1)
    plugin = Metrics(
        {"seen": Seen()}, inputs=lambda context: tuple(context.batch), phase=Phase.TRAINING
    )
    view: Any = _View()
    plugin.setup()
    plugin.context = view
    plugin.on_fit_start()
    for replica, number in ((0, 1), (0, 2), (1, 3), (1, 4)):
        plugin.on_forward_end(view.show(replica, number))
    plugin.on_training_batch_end(TrainingState(), False)
    states = plugin.state_dict()["replicas"]
    assert [state["metrics"]["seen"]["state"]["ids"] for state in states] == [[2], [4]]
    assert [state["num_updates"] for state in states] == [1, 1]
    # Behind a training its state may be asked for on one process alone.
    plugin.on_fit_end()
    assert plugin.state_dict() == {"replicas": []}


def test_no_process_group_adds_the_values_once_more(tmp_path: Path) -> None:
    """Torchmetrics would do so by itself; each sample counts once."""
    # Ranks that are forked from this process do not import torchmetrics again.
    from torchmetrics import SumMetric

    ranks = Forked(lambda: _sum_ids(tmp_path, SumMetric()), 2, tmp_path)
    assert ranks.wait() == [0, 0], (tmp_path / "log-0").read_text()
    found = [float(path.read_text()) for path in tmp_path.glob("sum-*")]
    assert found == [float(sum(range(11)))] * 2


def _sum_ids(folder: Path, metric: Any) -> None:
    setting = Elastic(num_replicas=2, total_steps=1)
    plugin = Metrics(
        {"sum": metric},
        inputs=lambda context: (context.batch[0],),
        phase=Phase.TESTING,
    )
    model = ElasticModel(setting, folder)
    trainer = make_trainer(folder, setting, plugin)
    trainer.fit(model, ElasticData(setting))
    trainer.test(model, ElasticData(setting))
    (folder / f"sum-{trainer.global_rank}").write_text(str(model.test_scores["sum"]))


def test_a_replica_that_has_seen_nothing_does_not_count(tmp_path: Path) -> None:
    """11 samples in batches of 2 leave two of eight replicas without any."""
    setting = Elastic(num_replicas=8, total_steps=1)
    plugin = Metrics({"seen": Seen()}, inputs=_inputs, phase=Phase.TESTING)
    model = Guessing(setting, tmp_path)
    trainer = make_trainer(tmp_path, setting, plugin)
    trainer.fit(model, ElasticData(setting))
    trainer.test(model, ElasticData(setting))
    assert model.test_scores["seen/count"] == 11


class Unlike(Seen):
    """Has no way to be joined."""

    merge_state = None  # type: ignore[assignment]


class Shifted(Seen):
    """Two without data are not one without data."""

    def merge_state(self, other: Seen) -> None:
        self.noise = [*self.noise, 1.0]


class Clinging(Seen):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: Unlike(), "it has no merge_state"),
        (lambda _: Shifted(), "merging two without data does not give one without data"),
        (lambda _: Clinging(), "it cannot be copied: RuntimeError"),
        (lambda library: library.PearsonCorrCoef(), "cannot be merged: RuntimeError"),
        (
            lambda library: library.wrappers.MinMaxMetric(library.classification.BinaryAccuracy()),
            "the metrics in it (_base_metric",
        ),
        (lambda library: library.SumMetric() + library.SumMetric(), "the metrics in it (metric_a"),
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


class Joined(Seen):
    """Counts with a tensor once it was merged, and keeps its states in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Any = 0

    def merge_state(self, other: Seen) -> None:
        super().merge_state(other)
        self.num = self.num + torch.tensor(0.0)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"num": self.num, "nan": torch.tensor(float("nan"))}
        return dict(reversed(state.items())) if isinstance(self.num, torch.Tensor) else state


def test_a_metric_that_merges_to_equal_values_of_other_types_is_taken(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=2, total_steps=1)
    plugin = Metrics({"odd": Joined()}, inputs=_inputs, phase=Phase.TRAINING)
    trainer = make_trainer(tmp_path, setting, plugin)
    assert trainer.fit(Guessing(setting, tmp_path), ElasticData(setting))


def test_one_replica_takes_any_metric(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=1, total_steps=1)
    plugin = Metrics({"odd": Unlike()}, inputs=_inputs, phase=Phase.TRAINING)
    trainer = make_trainer(tmp_path, setting, plugin)
    trainer.fit(Guessing(setting, tmp_path), ElasticData(setting))


class Least(Seen):
    """Without data it holds 0, which is no neutral number."""

    def reset(self) -> None:
        self.least = 0

    def update(self, ids: torch.Tensor, *_: Any) -> None:
        self.least = min(ids.tolist())

    def merge_state(self, other: Any) -> None:
        self.least = min(self.least, other.least)

    def state_dict(self) -> dict[str, Any]:
        return {"least": self.least}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.least = state_dict["least"]


def test_what_is_joined_stays_as_it_is_and_counts_only_with_data() -> None:
    rng.seed_rngs(1)
    whole = Tally({"seen": Seen(), "least": Least()})
    whole.prepare_to_join()
    parts = [whole.copy() for _ in range(3)]
    for number in (0, 2):
        parts[number].update([torch.tensor([number + 5])])
    states = [part.capture() for part in parts]
    before = copy.deepcopy(states)
    whole.join(states, whole.copy())
    assert states == before
    assert whole.num_updates == 2
    assert whole.capture()["metrics"]["seen"]["state"]["ids"] == [5, 7]
    assert whole.capture()["metrics"]["least"]["state"] == {"least": 5}
