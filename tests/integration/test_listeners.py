"""Who listens to a run is called as docs/ledger.md says: thread, ranks, and what errors do."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import helios
from helios.checkpoint.store import CheckpointStore
from helios.listeners import Recorder, RunListener
from helios.state import TrainingState
from tests.support.event_logs import Numbers, ScoringLinear
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
STEPS, SAVED = 4, 2


class Row(NamedTuple):
    thread: str
    ranks: str
    communicates: str
    error: str


def read_rows() -> dict[str, Row]:
    """Return the rows of the page by the name of their call."""
    rows = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("`") and len(cells) == 6:
            rows[cells[0].strip("`")] = Row(*cells[2:])
    return rows


ROWS = read_rows()
Call = Callable[[str], None]


def calls_of(interface: type[RunListener]) -> list[str]:
    return [name for name, _ in inspect.getmembers(interface, inspect.isfunction)]


def make_listener(interface: type[Any], notify: Call) -> Any:
    """Return a listener that hands the name of each call on."""
    listener = type("Noting", (Recorder,), {})

    def listen(name: str) -> None:
        found = {"batches_fetched": [1.0], "saving": {}}.get(name)

        def method(self: Any, *args: Any, **rest: Any) -> Any:
            notify(name)
            if name == "iteration_ended":
                count = torch.distributed.get_world_size() if has_group() else 1
                assert list(args[0].totals) == [count]
            return found

        setattr(listener, name, method)

    for name in calls_of(interface):
        listen(name)
    return listener()


def has_group() -> bool:
    return torch.distributed.is_initialized()


class Happening(Quiet):
    def __init__(self, fails_after: int) -> None:
        super().__init__("happening")
        self._fails_after = fails_after

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self._fails_after:
            raise ValueError("an error of the training")


def fit(
    folder: Path,
    *,
    steps: int = STEPS,
    fails_after: int = 0,
    is_async: bool = True,
) -> None:
    helios.Trainer(
        train_unit="iteration",
        total_steps=steps,
        valid_frequency=2,
        chkpt_frequency=SAVED,
        chkpt_root=folder,
        store=CheckpointStore(is_async=is_async),
        use_cpu=True,
        print_banner=False,
        enable_progress_bar=False,
        plugins=[Happening(fails_after)],
    ).fit(ScoringLinear(), Numbers(8, 8))


def listen(patch: pytest.MonkeyPatch, notify: Call) -> list[Any]:
    """Let listeners take the place of what records all runs; returns the replicas of each."""
    teams = []

    def make_recorders(
        origin: Any, model: Any, replicas: Any, *_: Any, **__: Any
    ) -> list[Recorder]:
        teams.append(replicas)
        return [
            make_listener(Recorder, notify),
            make_listener(RunListener, lambda name: None),
        ]

    patch.setattr("helios.start.training.make_recorders", make_recorders)
    return teams


def train_and_note(rank: int, folder: Path, is_async: bool) -> dict[str, set[str]]:
    """Train, fail in the next start, and return in which threads each call came."""
    threads = defaultdict(set)
    refused = ["before_commit"]

    def notify(name: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        threads[name].add("training" if is_main else "writer")
        if ROWS[name].communicates == "yes":
            assert set(teams[-1].gather_objects(name)) == {name}
        if name in refused:
            refused.remove(name)
            raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        teams = listen(patch, notify)
        fit(folder, is_async=is_async)
        with pytest.raises(ValueError, match="an error of the training"):
            fit(folder, steps=STEPS + 2, fails_after=STEPS + 1, is_async=is_async)
    return dict(threads)


@pytest.mark.shows("P150")
@pytest.mark.parametrize("is_async", [True, False])
def test_calls_come_in_the_threads_and_on_the_ranks_of_the_page(
    is_async: bool, tmp_path: Path
) -> None:
    noted = run_ranks(train_and_note, 2, tmp_path, is_async)
    for name, row in ROWS.items():
        ranks = {rank for rank, calls in enumerate(noted) if name in calls}
        assert ranks == ({0} if row.ranks == "0" else {0, 1}), name
        thread = set(row.thread.split(" or ")) if is_async else {"training"}
        for rank in ranks:
            assert noted[rank][name] == thread, name


ENDS = [name for name, row in ROWS.items() if row.error.startswith("ends the run")]


@pytest.mark.shows("P150")
@pytest.mark.parametrize("name", ENDS)
def test_an_error_in_most_calls_ends_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notify(call: str) -> None:
        if name == "save_failed" and call == "before_commit":
            raise OSError("the disk is full")
        if call == name:
            raise RuntimeError(f"an error in {name}")

    listen(monkeypatch, notify)
    with pytest.raises(RuntimeError, match=f"an error in {name}"):
        fit(tmp_path, steps=STEPS + 2)
