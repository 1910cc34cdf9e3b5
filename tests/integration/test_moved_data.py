"""A resume with other data than before is told so, and the fetch that finds it leaves no trace."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, SubsetRandomSampler, TensorDataset

import helios
from helios.errors import RunMismatchError
from helios.ledger.book import FILE_NAME
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support.kills import kill_self
from tests.support.ranks import RankError, run_ranks
from tests.support.scripts import call

# Machines with few processors would have fewer workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
COUNT = 22
KEPT = 18
AT_THE_TOP = np.random.default_rng().permutation(COUNT)
MOVED, UNLIKE_ITSELF = "is not what the run was trained on", "is not reproducible"


class Rows(Dataset[torch.Tensor]):
    """Samples that are their index, with noise."""

    unsaved = ("shift",)

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.shift, float(torch.rand(1)), np.random.random()])


class SplitInItsClass(Rows):
    order = np.random.default_rng().permutation(COUNT)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(int(self.order[index]))


class SplitAtTheTop(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(int(AT_THE_TOP[index]))


class Counting(Rows):
    """It counts, and its samples depend on how much it has fetched in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return super().__getitem__(index) + self.count


class CountingAside(Counting):
    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return Rows.__getitem__(self, index)


class Drawing(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * float(self.generator.random())


class Caching(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, list[float]] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index).tolist()
        return torch.tensor(self.cache[index])


class Timed(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), time.perf_counter_ns() % 10**6 / 1e6, 0.0])


class Curriculum(CountingAside):
    """A hook says how hard it is."""

    def __init__(self) -> None:
        super().__init__()
        self.difficulty = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * self.difficulty


class ByEpoch(Curriculum):
    """The usual ``set_epoch``, in one hook."""

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.difficulty = current_epoch


class ByStep(Curriculum):
    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.difficulty = state.global_iteration


def draw(seed: int | None) -> list[int]:
    return [*map(int, np.random.default_rng(seed).permutation(COUNT))][:KEPT]


FORMS: dict[str, Callable[[int | None], Any]] = {
    "setup": lambda seed: Subset(Rows(), draw(seed)),
    "seeded setup": lambda _: Subset(Rows(), np.random.permutation(COUNT)[:KEPT].tolist()),
    "class": lambda _: SplitInItsClass(),
    "top": lambda _: SplitAtTheTop(),
    "values": lambda seed: TensorDataset(torch.tensor(draw(seed)).float().repeat(3, 1).T),
    "normalization": lambda seed: Rows(shift=float(seed or 0)),
    "nested": lambda seed: Subset(Subset(Rows(), draw(seed)), range(12)),
}
KINDS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (Rows, Counting, CountingAside, Drawing, Caching, Curriculum)
}


@dataclasses.dataclass(frozen=True)
class Make:
    """Makes the data of a form; what has no seed draws from one of its own in each start."""

    form: str
    seed: int | None

    def __call__(self) -> Any:
        return FORMS[self.form](self.seed)


class Data(helios.DataModule):
    def __init__(self, make: Callable[[], Any], **params: Any) -> None:
        super().__init__()
        self._make, self._params = make, params

    unsaved = ("data",)

    def setup(self) -> None:
        self.data = self._make()
        shown = {"batch_size": 4, "shuffle": "batch_sampler" not in self._params, **self._params}
        if "batch_sampler" in shown:
            shown = {"batch_sampler": shown["batch_sampler"](self.data)}
        self._train_dataset = self._create_dataset(self.data, helios.DataLoaderParams(**shown))


class Net(helios.Model):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-5)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        if isinstance(batch, list):
            (batch,) = batch
        return self.net(batch).square().mean()


class Hardening(Plugin):
    """Says to the data how hard it is, as docs/data.md advises."""

    unsaved = ("data",)

    def __init__(self, data: Data) -> None:
        super().__init__("hardening")
        self.data = data

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.data.data.difficulty = current_epoch

    def on_training_resume(self, state: TrainingState) -> None:
        self.data.data.difficulty = state.global_epoch


class Following(Plugin):
    """Passes hooks on to a data set that has methods of their names."""

    unsaved = ("data",)

    def __init__(self, data: Data) -> None:
        super().__init__("following")
        self.data = data

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_epoch_start(self, current_epoch: int) -> None:
        if isinstance(self.data.data, ByEpoch):
            self.data.data.on_training_epoch_start(current_epoch)

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if isinstance(self.data.data, ByStep):
            self.data.data.on_training_batch_end(state, should_log)


class KillAfter(Plugin):
    """Kills the process in the step after an iteration."""

    unsaved = ("iteration",)

    def __init__(self, iteration: int) -> None:
        super().__init__("kill-after")
        self.iteration = iteration

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration > self.iteration > 0:
            kill_self()


def train(folder: Path, data: Data, *plugins: Plugin, **options: Any) -> None:
    usual: dict[str, Any] = {
        "train_unit": "iteration",
        "total_steps": 14,
        "chkpt_root": folder,
        "chkpt_frequency": 1,
        "store": helios.CheckpointStore(is_async=False),
        "use_cpu": True,
        "print_banner": False,
        "enable_progress_bar": False,
        "plugins": [*plugins],
    }
    helios.Trainer(**{**usual, **options}).fit(Net("net"), data)


def evidence(folder: Path) -> tuple[bytes, bytes]:
    """Return the ledger of a run, and its weights."""
    newest = max((folder / "net").glob("*.pth"), key=lambda p: int(p.stem.rpartition("_")[2]))
    state = torch.load(newest, weights_only=False)["model"]["objects"]["net"]
    return (folder / "net" / FILE_NAME).read_bytes(), state["weight"].numpy().tobytes()


def main() -> None:
    """Train on data of a form: folder, form, iteration to kill after."""
    folder, form, kill = sys.argv[1:]
    train(Path(folder), Data(Make(form, None)), KillAfter(int(kill)))


@pytest.mark.parametrize("form", ["setup", "class", "top"])
def test_a_split_that_each_start_draws_anew_is_named_after_a_kill(
    tmp_path: Path, form: str
) -> None:
    assert call(main, tmp_path, form, 7).returncode == -9
    found = call(main, tmp_path, form, 0)
    assert found.returncode == 0
    assert found.stderr.count("WARNING") == 1
    assert MOVED in found.stderr
    assert "iteration 7 (epoch 2" in found.stderr


def test_a_split_that_the_seed_of_the_run_draws_is_the_same_after_a_kill(tmp_path: Path) -> None:
    assert call(main, tmp_path / "whole", "seeded setup", 0).returncode == 0
    assert call(main, tmp_path / "killed", "seeded setup", 7).returncode == -9
    found = call(main, tmp_path / "killed", "seeded setup", 0)
    assert "WARNING" not in found.stderr
    assert evidence(tmp_path / "killed") == evidence(tmp_path / "whole")


def work(rank: int, folder: Path, seed: int, kill: int, options: dict[str, Any]) -> list[str]:
    """Train in a rank; return what it has logged of warnings and errors."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("helios").addHandler(handler)
    try:
        train(folder, Data(Make("setup", seed)), KillAfter(kill), num_replicas=3, **options)
    except RunMismatchError as error:
        records.append(str(error))
    return records


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_processes_find_it_together(tmp_path: Path, before: int, after: int) -> None:
    with pytest.raises(RankError):
        run_ranks(work, before, tmp_path, 1, 3, {})
    for rank, found in enumerate(
        run_ranks(work, after, tmp_path, 2, 0, {"on_incomplete": "raise"})
    ):
        assert MOVED in found[-1], rank
    first, *others = run_ranks(work, after, tmp_path, 2, 4, {"total_steps": 4})
    assert sum(MOVED in text for text in first) == 1
    assert not any(others)
    assert not any(run_ranks(work, before, tmp_path, 2, 0, {}))


def resume(
    caplog: pytest.LogCaptureFixture, folder: Path, make: Callable[..., Any], **how: Any
) -> list[str]:
    """Train with the data of one seed and, from a step on, of another; return the warnings."""
    stop, params = how.pop("stop", 7), how.pop("params", {})
    train(folder, Data(lambda: make(1), **params), total_steps=stop)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(folder, Data(lambda: make(2), **params), **how)
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("form", "num_workers", "stop"),
    [
        ("setup", 0, 7),
        ("values", 0, 7),
        ("nested", 0, 7),
        # The first batch of an epoch, and the last one.
        *[("normalization", workers, stop) for workers in (0, 2) for stop in (6, 7, 12)],
    ],
)
def test_other_content_of_equal_class_and_length_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, num_workers: int, stop: int
) -> None:
    params = {"num_workers": num_workers}
    (text,) = resume(caplog, tmp_path, FORMS[form], stop=stop, params=params)
    assert MOVED in text
    assert f"iteration {stop} (" in text
    assert "its first sample is" in text


def test_an_order_that_each_start_draws_anew_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lists(data: Any) -> Any:
        return torch.utils.data.BatchSampler(data.order, 4, drop_last=False)

    class Ordered(Rows):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.order = draw(seed)

    (text,) = resume(caplog, tmp_path, Ordered, params={"batch_sampler": lists})
    assert "had other samples" in text


def test_a_sampler_of_torch_over_another_split_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lists(data: Any) -> Any:
        return torch.utils.data.BatchSampler(SubsetRandomSampler(data.kept), 4, drop_last=False)

    class Kept(Rows):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.kept = draw(seed)

    (text,) = resume(caplog, tmp_path, Kept, params={"batch_sampler": lists})
    assert "had other samples" in text


def test_a_start_that_must_be_complete_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunMismatchError, match=MOVED):
        resume(caplog, tmp_path, FORMS["setup"], on_incomplete="raise")


def test_samples_that_cannot_be_fetched_any_more_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if self.shift == 2 and index in self.lost:
                raise FileNotFoundError(f"{index}.png")
            return super().__getitem__(index)

        lost = range(COUNT)

    with pytest.raises(FileNotFoundError):
        resume(caplog, tmp_path, lambda seed: Gone(float(seed)))
    assert "cannot be fetched any more (FileNotFoundError" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_not_reproducible_is_told_as_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    (text,) = resume(caplog, tmp_path, lambda _: Timed(), params={"num_workers": num_workers})
    assert UNLIKE_ITSELF in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_fetch_leaves_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, num_replicas: int
) -> None:
    def run(folder: Path, **options: Any) -> None:
        data = Data(KINDS[kind])
        train(folder, data, Hardening(data), num_replicas=num_replicas, **options)

    run(tmp_path / "whole")
    # Inside of an epoch, at its end and at its first batch, with one replica and with three.
    for stop in (1, 2, 3, 6, 7, 10):
        run(tmp_path / "killed", total_steps=stop)
    with caplog.at_level(logging.INFO):
        run(tmp_path / "killed")
    assert evidence(tmp_path / "killed") == evidence(tmp_path / "whole")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert ("cannot be checked" in caplog.text) == (kind in ("Counting", "Drawing"))


def test_workers_get_the_data_as_setup_and_hooks_make_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for stop in (7, 10, 14):
        data = Data(Curriculum, num_workers=2)
        train(tmp_path, data, Hardening(data), total_steps=stop)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "num_workers", "stops"),
    # Workers have what hooks set before an epoch begins, and in on_training_resume.
    [(ByEpoch, 0, (7, 12)), (ByEpoch, 2, (6, 12)), (ByStep, 0, (1, 6, 7, 12))],
)
def test_samples_that_hooks_change_are_no_other_data(
    tmp_path: Path, kind: type[Curriculum], num_workers: int, stops: tuple[int, ...]
) -> None:
    def run(folder: Path, **options: Any) -> None:
        data = Data(kind, num_workers=num_workers)
        train(folder, data, Following(data), on_incomplete="raise", **options)

    run(tmp_path / "whole")
    for stop in (*stops, 14):
        run(tmp_path / "killed", total_steps=stop)
    assert evidence(tmp_path / "killed") == evidence(tmp_path / "whole")


def test_an_epoch_that_a_hook_has_ended_is_checked_where_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Cut(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_batch_start(self, state: TrainingState) -> None:
            if state.dataset_iter == 3:
                raise StopIteration

    for number in (1, 1, 2):
        caplog.clear()
        data = Data(lambda: FORMS["setup"](number))  # noqa: B023 - called in this round
        steps = 6 if number == 1 else 9
        train(tmp_path, data, Cut("cut"), total_steps=steps)
    found = [each.getMessage() for each in caplog.records if MOVED in each.getMessage()]
    assert len(found) == 1
    assert "iteration 6 (epoch 2, batch 3)" in found[0]


def test_a_change_that_is_allowed_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Data(lambda: Subset(Rows(), draw(1))), total_steps=7)
    caplog.clear()
    train(tmp_path, Data(Rows), allow_changes=("length", "dataset"))
    assert MOVED not in caplog.text
