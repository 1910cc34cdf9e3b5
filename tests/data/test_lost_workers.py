"""Workers that die, or do not answer, in the middle of a pass are replaced, and no bit changes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import helios
from helios.core import rng
from helios.core.utils import collector_at_rest
from helios.data import Stream, create_dataloader
from helios.data import source as sources
from helios.data.phase_sources import open_source
from helios.data.source import LONE, Shard
from helios.errors import WorkerError
from helios.state import TrainingState
from tests.data.datasets import FETCH, Augmented, Indices
from tests.support import elastic, stuck_workers
from tests.support.elastic import Elastic
from tests.support.quiet import Quiet
from tests.support.ranks import FORKSERVER, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LENGTH = 24
FORKED, FRESH = 3.0, 60.0
"""Longer than workers that are forked, or started anew, need for a batch on a busy machine."""
LOGGER = sources.__name__


class Fatal(Augmented):
    """Samples of which some do something to the worker that fetches them.

    Args:
        folder: where these leave their marks.
        acts: what happens at an index, and how often.
    """

    def __init__(self, folder: Path, acts: dict[int, tuple[Callable[[], object], int]]) -> None:
        super().__init__(LENGTH)
        self.folder, self.acts = folder, acts

    def __getitem__(self, index: int) -> Any:
        act, times = self.acts.get(index, (bool, 0))
        for number in range(times):
            mark = self.folder / f"{index}-{number}"
            if not mark.exists():
                mark.touch()
                act()
                break
        return super().__getitem__(index)


def leave() -> None:
    """End as a library does that gives up."""
    os._exit(0)


def make(
    data: Any, *, num_workers: int, method: Any = "fork", share: Shard = LONE, **options: Any
) -> Any:
    """Return a source of shuffled batches."""
    options = {"batch_size": 2, "shuffle": True, "pin_memory": False, **options}
    if num_workers:
        options |= {"num_workers": num_workers, "multiprocessing_context": method}
    loader, sampler = create_dataloader(data, **options)
    return open_source(loader, sampler, run_seed=7, purpose=FETCH, share=share)


def read(data: Any = None, **options: Any) -> list[bytes]:
    """Return two epochs as bytes, batch by batch."""
    source = make(Augmented(LENGTH) if data is None else data, **options)
    found = []
    with contextlib.closing(source):
        for epoch in (0, 1):
            with contextlib.closing(source.batches(epoch)) as batches:
                found += [batch.numpy().tobytes() for (batch,) in batches]
    return found


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def _cases() -> Iterator[Any]:
    """Return every way to be lost with every way to be started; some of them always run."""
    always = [
        (stuck_workers.die, "fork", False),
        (stuck_workers.die, "fork", True),
        (stuck_workers.die, FORKSERVER, False),
        (stuck_workers.stop, "fork", False),
        (leave, "fork", False),
    ]
    for act in (stuck_workers.die, stuck_workers.stop, leave):
        for method in ("fork", FORKSERVER, "spawn"):
            for persists in (False, True):
                case = act, method, persists
                yield pytest.param(*case, marks=() if case in always else pytest.mark.full)


@pytest.mark.shows("P141")
@pytest.mark.parametrize(("act", "method", "persists"), [*_cases()])
def test_a_worker_that_is_lost_changes_no_bit(
    act: Any, method: Any, persists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fatal(tmp_path, {9: (act, 1)})
    # What a process opens once for all workers it ever starts.
    read(num_workers=1, method=method)
    before = stuck_workers.count_files_at_rest()
    # PyTorch sees after 5 s that one has left with code 0.
    timeout = FORKED if method == "fork" and act is not leave else FRESH
    options = {"method": method, "persistent_workers": persists, "worker_timeout": timeout}
    assert read(data, num_workers=2, prefetch_factor=3, **options) == read(num_workers=0)
    assert lines_of(caplog)
    # One that died is not found dead once more at the next pass.
    assert sum("died" in line for line in lines_of(caplog)) == (act is not stuck_workers.stop)
    assert multiprocessing.active_children() == []
    assert stuck_workers.count_files_at_rest() == before


@pytest.mark.shows("P141")
def test_workers_that_never_begin_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """As where another thread holds a lock while they are forked."""
    with stuck_workers.forks({1: stuck_workers.die, 3: stuck_workers.stop}):
        found = read(num_workers=2, worker_timeout=FORKED)
    assert found == read(num_workers=0)
    died, silent, *_ = lines_of(caplog)
    assert died.startswith("A loader worker died: ")
    assert "No batch came from the loader workers for 3 s. New workers take " in silent


def kill_children(number: int = signal.SIGKILL) -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, number)


@pytest.mark.shows("P141")
def test_a_batch_that_ends_every_worker_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 9)})
    source = make(data, num_workers=2, shuffle=False)
    batches = source.batches(0)
    with pytest.raises(WorkerError) as caught:
        list(batches)
    line, *_ = lines_of(caplog)
    assert "was ended by SIGKILL" in line
    assert line.endswith("New workers take their place.")
    text = str(caught.value)
    assert "They did not fetch batch 4 of epoch 1 with the samples [8, 9]. Find" in text
    assert text.count("SIGKILL") == 3
    batches.close()
    assert multiprocessing.active_children() == []


class Leaking(Augmented):
    """Each worker dies after a few samples, as of memory that is never given back."""

    fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        if self.fetched > 9:
            stuck_workers.die()
        return super().__getitem__(index)


@pytest.mark.shows("P141")
def test_workers_that_leak_are_replaced_as_often_as_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each gets further than the one before it, also where more is under way than it can fetch."""
    assert read(Leaking(LENGTH), num_workers=2, prefetch_factor=8) == read(num_workers=0)
    assert len(lines_of(caplog)) > 1


class Large(Indices):
    """Batches that do not fit into a pipe, and are not sent as shared memory."""

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 20, index)


@pytest.mark.shows("P141")
@pytest.mark.parametrize(
    "act", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_a_worker_that_is_lost_within_a_message_is_replaced(
    act: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"collate_fn": unwrap, "prefetch_factor": 1, "worker_timeout": FORKED}
    source = make(Large(4), num_workers=1, batch_size=1, shuffle=False, **options)
    batches = source.batches(0)
    first = next(batches)
    [child] = multiprocessing.active_children()
    await_write(child.pid or 0)
    kill_children(act)
    assert [int(batch[0]) for (batch,) in [first, *batches]] == [0, 1, 2, 3]
    assert len(lines_of(caplog)) == 1


def unwrap(samples: list[Any]) -> Any:
    return samples[0]


def await_write(pid: int) -> None:
    """Wait until a thread of a process waits for room in a pipe."""
    while True:
        for place in Path(f"/proc/{pid}/task").glob("*/wchan"):
            if "pipe_write" in place.read_text() or "unix_stream" in place.read_text():
                return
        time.sleep(0.01)


@pytest.mark.parametrize(
    "act", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_an_idle_worker_that_was_lost_between_passes_is_replaced(
    act: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"persistent_workers": True, "worker_timeout": FORKED}
    source = make(Augmented(LENGTH), num_workers=2, **options)
    found = [batch.numpy().tobytes() for (batch,) in source.batches(0)]
    os.kill(multiprocessing.active_children()[0].pid or 0, act)
    found += [batch.numpy().tobytes() for (batch,) in source.batches(1)]
    source.close()
    assert found == read(num_workers=0)
    [line] = lines_of(caplog)
    assert line.endswith("New workers take their place.")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let PyTorch pin batches, as with an accelerator, and note which; it does nothing to them."""
    found: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *args: object) -> torch.Tensor:
        found.append(tensor)
        return tensor

    for name, value in (
        ("is_available", True),
        ("current_accelerator", torch.device("cuda")),
        ("current_device_index", 0),
        ("set_device_index", None),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("pinned")
def test_workers_whose_batches_are_pinned_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread of PyTorch's receives what they send."""
    data = Fatal(tmp_path, {9: (stuck_workers.die, 1)})
    assert read(data, num_workers=2, pin_memory=True) == read(num_workers=0)
    assert len(lines_of(caplog)) == 1


@pytest.mark.parametrize("data", [Indices(4), Stream(lambda index, count: map(float, range(4)))])
def test_the_training_process_pins_what_it_fetches(data: Any, pinned: list[torch.Tensor]) -> None:
    before = torch.get_rng_state()
    loader, sampler = create_dataloader(data, batch_size=2)
    with rng.stream(0):
        found = [*open_source(loader, sampler, run_seed=7, purpose=FETCH).batches(0)]
    assert [*map(id, pinned)] == [id(batch) for (batch,) in found]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("streams", [False, True])
def test_a_batch_that_cannot_be_pickled_is_an_error_at_once(streams: bool) -> None:
    data: Any = Stream(lambda index, count: range(4)) if streams else Indices(4)
    options: Any = {"collate_fn": lambda samples: (each for each in samples), "shuffle": False}
    batches = make(data, num_workers=1, worker_timeout=FORKED, **options).batches(0)
    with (
        contextlib.closing(batches),
        pytest.raises(WorkerError, match=r"cannot pickle .generator. object.*num_workers=0"),
    ):
        next(batches)


class Failing(Indices):
    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise FileNotFoundError("sample 2")
        return index


def test_an_error_of_the_data_set_is_none_of_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    """It is raised at once; whoever goes on gets each other batch once."""
    loader, _ = create_dataloader(
        Failing(10), num_workers=1, multiprocessing_context="fork", pin_memory=False
    )
    batches = iter(loader)
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    with pytest.raises(FileNotFoundError, match="sample 2"):
        next(batches)
    assert [*map(int, batches)] == [*range(3, 10)]
    assert not lines_of(caplog)


@pytest.mark.shows("P141")
@pytest.mark.parametrize("by_script", [True, False])
def test_a_death_raises_nothing_where_training_is(
    by_script: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's handler of SIGCHLD raises an error between any two lines; a script may set it."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    if by_script:
        next(iter(DataLoader(Indices(2), num_workers=1, multiprocessing_context="fork")))
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
    batches = make(Augmented(LENGTH), num_workers=2).batches(0)
    next(batches)
    children = multiprocessing.active_children()
    kill_children()
    # As a step would run on; a child that was waited for is none that PyTorch's handler sees.
    for child in children:
        os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)
    assert lines_of(caplog) == []
    assert len([*batches]) == LENGTH // 2 - 1
    assert len(lines_of(caplog)) == 1


def test_a_loop_of_the_users_ends_with_an_error(tmp_path: Path) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 1)})
    loader, _ = create_dataloader(
        data, batch_size=2, num_workers=2, multiprocessing_context="fork", pin_memory=False
    )
    with pytest.raises(WorkerError, match="A loader worker died"):
        list(loader)
    for _ in loader:
        break
    del _
    gc.collect()
    assert multiprocessing.active_children() == []


class Part:
    """A part of a stream whose worker dies once in the middle; with a state, if asked for."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder, self.index, self.position = folder, index, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 10:
            self.position += 1
            mark = self.folder / f"{self.index}-{self.position}"
            if self.position in (4, 9) and self.index == 1 and not mark.exists():
                mark.touch()
                stuck_workers.die()
            yield torch.tensor([float(self.position), self.index, *torch.rand(1)])


class StatefulPart(Part):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        (self.folder / "loaded").touch()


@pytest.mark.shows("P141")
@pytest.mark.parametrize("kind", [Part, StatefulPart])
def test_the_workers_of_a_stream_are_replaced(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for name, num_workers in (("calm", 0), ("lost", 2)):
        folder = tmp_path / name
        folder.mkdir()
        for position in (4, 9) if name == "calm" else ():
            (folder / f"1-{position}").touch()
        share = Shard(num_replicas=2, block=range(2), pads=True)
        stream = Stream(lambda index, count, folder=folder: kind(folder, index))
        source = make(stream, num_workers=num_workers, shuffle=False, share=share)
        source.uses_state = kind is StatefulPart
        found.append([torch.cat(batch).numpy().tobytes() for batch in source.batches(0)])
    assert len(found[0]) == 5
    assert found[1] == found[0]
    assert len(lines_of(caplog)) == 2
    assert (tmp_path / "lost" / "loaded").exists() == (kind is StatefulPart)


@pytest.mark.shows("P141")
def test_a_loader_of_the_users_without_a_state_is_an_error(tmp_path: Path) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 1)})
    loader = DataLoader(data, 2, num_workers=2, multiprocessing_context="fork")
    batches = open_source(loader, None, run_seed=7, purpose=FETCH).batches(0)
    with pytest.raises(WorkerError, match=r"SIGKILL.*because the DataLoader has no state"):
        list(batches)
    batches.close()


class Resumable(DataLoader[Any]):
    """A loader that knows how many batches it has returned, by its iterator, as torchdata's."""

    num_skipped = 0

    def __iter__(self) -> Any:
        self._iterator = _Counted(self)
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        return {"num_returned": 0 if self._iterator is None else self._iterator.num_returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped, self._iterator = state["num_returned"], None


class _Counted(_MultiProcessingDataLoaderIter):
    def __init__(self, loader: Resumable) -> None:
        super().__init__(loader)
        self.num_returned = 0
        for _ in range(loader.num_skipped):
            next(self)

    def __next__(self) -> Any:
        found = super().__next__()
        self.num_returned += 1
        return found


def test_a_loader_of_the_users_goes_on_from_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fatal(tmp_path, {9: (stuck_workers.die, 1)})
    loader = Resumable(data, 2, num_workers=2, multiprocessing_context="fork")
    batches = open_source(loader, None, run_seed=7, purpose=FETCH).batches(0)
    found = torch.cat([batch for (batch,) in batches])[:, 0].tolist()
    assert found == [*range(LENGTH)]
    [line] = lines_of(caplog)
    assert line.endswith("New workers take their place.")


@dataclasses.dataclass(frozen=True)
class Lossy(Elastic):
    """A training that loses workers.

    Attributes:
        number: the signal that they get; 0 for none.
        method: how they are started.
    """

    number: int = 0
    method: Any = "fork"


class DataOfWorkers(elastic.ElasticData):
    """Fetched by workers in training and validation."""

    def setup(self) -> None:
        setting = self.setting
        assert isinstance(setting, Lossy)
        options: Any = {
            "num_workers": setting.num_workers,
            "multiprocessing_context": setting.method if setting.num_workers else None,
            "worker_timeout": FORKED if setting.method == "fork" else FRESH,
            "pin_memory": False,
        }
        params = helios.DataLoaderParams(batch_size=setting.batch_size, shuffle=True, **options)
        self._train_dataset = self._create_dataset(elastic.Pictures(setting.length), params)
        params = helios.DataLoaderParams(batch_size=1, **options)
        self._valid_dataset = self._create_dataset(elastic.Pictures(11), params)


class LoseWorkers(Quiet):
    """Sends a signal to a worker of each rank, twice in training and twice in validation."""

    def __init__(self, number: int) -> None:
        super().__init__("lose-workers")
        self.number = number

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        if state.global_iteration in (2, 9):
            self.lose()

    def on_validation_batch_start(self, step: int) -> None:
        if step == 0:
            self.lose()

    def lose(self) -> None:
        child = max(multiprocessing.active_children(), key=lambda each: each.pid or 0)
        os.kill(child.pid or 0, self.number)
        if self.number == signal.SIGKILL:
            # PyTorch's handler would raise here.
            child.join()


def _train_lossy(rank: int, folder: Path, setting: Lossy) -> list[str]:
    # Marks of the test do not hold in a rank; PyTorch counts the cores of this machine.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    lines: list[str] = []
    logging.getLogger(LOGGER).addFilter(lambda record: lines.append(record.getMessage()) or True)
    elastic.train(folder, setting, LoseWorkers(setting.number))
    return lines


@pytest.mark.shows("P141")
@pytest.mark.parametrize(
    ("number", "num_ranks", "method"),
    [
        (signal.SIGKILL, 1, "fork"),
        (signal.SIGKILL, 2, "fork"),
        pytest.param(signal.SIGKILL, 4, "fork", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 1, "spawn", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 2, "forkserver", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 4, "fork", marks=pytest.mark.full),
    ],
)
def test_a_run_that_loses_workers_ends_with_the_same_bits(
    number: int, num_ranks: int, method: str, tmp_path: Path
) -> None:
    setting = Lossy(total_steps=12, chkpt_frequency=12, make_data=DataOfWorkers)
    elastic.train(tmp_path / "calm", setting)
    setting = dataclasses.replace(setting, num_workers=2, number=number, method=method)
    # On a busy machine, a worker that is spawned needs half a minute.
    lines = run_ranks(_train_lossy, num_ranks, tmp_path / "lossy", setting, timeout=900)
    assert all(lines)
    elastic.assert_same(elastic.read_bits(tmp_path / "lossy"), elastic.read_bits(tmp_path / "calm"))


class Dropped:
    """Something in a cycle, which only the collector frees, and which notes who has done so."""

    def __init__(self, marks: Path) -> None:
        self.cycle, self.marks = self, marks

    def __del__(self) -> None:
        (self.marks / str(os.getpid())).touch()


class Collecting(Augmented):
    """Samples that let the collector run where they are fetched."""

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.shows("P144")
def test_a_worker_frees_nothing_that_the_training_process_has_dropped(tmp_path: Path) -> None:
    """Tensors on a GPU cannot be freed in a fork: the worker would be ended."""
    gc.collect()
    with collector_at_rest():
        Dropped(tmp_path)
        read(Collecting(LENGTH), num_workers=2)
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_pytorch_has_the_private_names_that_are_used() -> None:
    loader = DataLoader(
        Indices(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    items = iter(loader)
    assert loader._iterator is items
    [worker] = items._workers
    assert worker.is_alive()
    assert items._worker_result_queue._writer.fileno()
    items._shutdown_workers()
    assert not worker.is_alive()
