"""Several replicas in the loops: turns, joined losses, and what all processes decide together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helios.checkpoint.capture import capture
from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.core import rng
from helios.errors import UsageError
from helios.findings import FindingKind
from helios.model.model import Model
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.run_parts import RunParts
from helios.state import Phase, TrainingState
from tests.engines.joined import replicas_on
from tests.loops.parts import (
    EPOCH,
    ITERATION,
    ListSource,
    fit,
    make_parts,
)
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks


class Sums(Model):
    """One weight; what a replica contributes is the batch."""

    def __init__(self) -> None:
        super().__init__("sums")
        self.setup()

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        return (self.net.weight * batch).sum()


def run_sums(
    model: Model,
    *plugins: Plugin,
    replicas: Replicas | None = None,
    rows: list[list[float]],
) -> RunParts:
    """Train on rows of numbers: one row an iteration, one number for each replica."""
    replicas = replicas or Replicas(len(rows[0]))
    items = [[row[replica] for replica in replicas.local_replicas] for row in rows]
    parts = make_parts(
        model,
        *plugins,
        replicas=replicas,
        sources={Phase.TRAINING: [ListSource(items)]},
        total_steps=len(rows),
    )
    fit(parts)
    return parts


class Odd(Sums):
    """Fills the table with what has no mean."""

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self._loss_items["odd"] = torch.ones(2)
        return super().train_step(batch, state)


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(UsageError, match=r"loss_items\['odd'\] must be a number .* got .*\(2,\)"):
        run_sums(Odd(), rows=[[1.0, 2.0]])


class Yielding(Sums):
    def train_step(self, batch: Any, state: TrainingState) -> Any:
        yield super().train_step(batch, state)


@pytest.mark.shows("L28")
def test_a_yield_loop_needs_a_process_for_each_replica() -> None:
    with pytest.raises(UsageError, match="of its own needs one process per replica"):
        run_sums(Yielding(), rows=[[1.0, 2.0]])


class Late(Sums):
    """Changes an attribute in a few of its turns only."""

    def __init__(self, turns: set[int]) -> None:
        super().__init__()
        self.turns, self.num_turns, self.hard = turns, 0, 0

    unsaved = ("num_turns",)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.num_turns += 1
        self.hard += self.num_turns in self.turns
        return super().train_step(batch, state)


@pytest.mark.shows("S58")
@pytest.mark.parametrize("turns", [{1}, {2}, {7, 8}])
def test_a_change_is_found_in_the_turn_of_any_replica_and_later_on(
    turns: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Turns are watched in the first iteration, and in those that are powers of two."""
    model = Late(turns)
    model.discovery.take_baseline()
    parts = run_sums(model, replicas=Replicas(2), rows=[[1.0, 2.0]] * 5)
    assert parts.findings.names(FindingKind.OBSTACLE) == ["train_step changes hard"]
    (record,) = caplog.records
    assert "Late.train_step changes hard." in record.message


def _begin_apart(rank: int) -> str:
    with replicas_on(rank, 2, 2) as here:
        model = Sums()
        with torch.no_grad():
            model.net.weight.fill_(float(rank))
        with pytest.raises(UsageError) as caught:
            run_sums(model, replicas=here, rows=[[1.0, 2.0]])
        return str(caught.value)


def test_weights_that_differ_between_processes_are_refused_before_the_first_step() -> None:
    for text in run_ranks(_begin_apart, 2):
        assert "net.weight of rank 1 differ from rank 0's" in text


class Lazy(Sums):
    """A layer that gets its weights in the first step."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.head = nn.LazyLinear(1)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        return super().train_step(batch, state) + self.head(torch.ones(1, 3)).sum()


def test_layers_that_get_their_weights_in_the_first_step_are_refused() -> None:
    """Each process would draw them on the numbers of another replica."""
    match = "network 'head' has lazy layers.*Run a batch through it in Model.setup"
    with pytest.raises(UsageError, match=match):
        run_sums(Lazy(), rows=[[1.0, 2.0]])


class Asking(Quiet):
    """Asks for something in one iteration."""

    def __init__(self, what: str, iteration: int) -> None:
        super().__init__()
        self.what = what
        self.iteration = iteration

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration != self.iteration:
            return
        if self.what == "stop":
            self.context.request_stop("enough")
        elif self.what == "interrupt":
            self.context.interrupt("a signal")

    def should_training_stop(self) -> bool:
        is_due = self.context.state.global_iteration == self.iteration
        return self.what == "poll" and is_due


def _ask(rank: int, num_processes: int, who: int, what: str) -> tuple[Any, ...]:
    with replicas_on(rank, num_processes, 3) as here:
        asking = Asking(what if rank == who else "nothing", 2 if rank == who else 0)
        model = Sums()
        parts = run_sums(model, asking, replicas=here, rows=[[1.0, 2.0, 4.0]] * 5)
        asked = parts.run.asked
        number = parts.run.state.global_iteration
        return (number, asked.stop_reason, asked.interruption), model.net.weight.item()


@pytest.mark.shows("H36", "K42", "C16")
@pytest.mark.parametrize(
    ("what", "num_processes", "who", "end"),
    [
        ("stop", 2, 1, (2, "enough", "")),
        ("interrupt", 3, 0, (2, "", "a signal")),
        ("poll", 3, 2, (2, "should_training_stop returned True", "")),
    ],
)
def test_what_one_process_asks_for_ends_the_run_on_all(
    what: str, num_processes: int, who: int, end: tuple[Any, ...]
) -> None:
    found = run_ranks(_ask, num_processes, num_processes, who, what)
    assert len(set(found)) == 1
    assert found[0][0] == end


class Saver(CheckpointWriter):
    """Keeps what a run saves, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []

    def has(self, state: TrainingState) -> bool:
        return state.global_iteration in self.saved

    def save(self, payload: dict[str, Any]) -> None:
        self.saved.append(payload["training_state"]["global_iteration"])


class Wanting(Quiet):
    """Asks for a checkpoint in one iteration."""

    def __init__(self, iteration: int) -> None:
        super().__init__()
        self.iteration = iteration

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.iteration:
            self.context.request_checkpoint()


def _save(rank: int) -> list[int]:
    with replicas_on(rank, 2, 2) as here:
        model, saver = Sums(), Saver()
        model.discovery.take_baseline()
        parts = make_parts(
            model,
            Wanting(2 if rank == 1 else 99),
            replicas=here,
            sources={Phase.TRAINING: [ListSource([[1.0]] * 4)]},
            total_steps=4,
            writer=saver,
            can_save=True,
        )
        fit(parts)
        return saver.saved


@pytest.mark.shows("H19")
def test_a_checkpoint_that_one_process_asks_for_is_taken_by_all() -> None:
    assert run_ranks(_save, 2) == [[2, 4]] * 2


class Uneven(ListSource):
    """Data whose end only its own process knows."""

    ends_together = False  # type: ignore[assignment]
    level = "restart"  # type: ignore[assignment]
    state_is_per_process = True  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"length": len(self.items)}


def _train_unevenly(rank: int, unit: Any) -> tuple[Any, ...]:
    with replicas_on(rank, 2, 2) as here:
        model = Sums()
        model.discovery.take_baseline()
        items = [[2.0]] * 3 if rank == 0 else [[4.0]] * 5
        parts = make_parts(
            model,
            unit=unit,
            replicas=here,
            sources={Phase.TRAINING: [Uneven(items)]},
            total_steps=2 if unit is EPOCH else 7,
        )
        fit(parts)
        data = [own["data"] for own in capture(parts).by_rank]
        return (
            model.net.weight.item(),
            parts.run.state.global_iteration,
            parts.run.cursor.epoch,
            data,
        )


@pytest.mark.shows("R46")
@pytest.mark.parametrize(("unit", "iterations", "epoch"), [(EPOCH, 6, 2), (ITERATION, 7, 2)])
def test_an_epoch_ends_where_the_shortest_data_ends(unit: Any, iterations: int, epoch: int) -> None:
    """R46: and each process' state of its data is saved."""
    data = [{"length": 3}, {"length": 5}]
    expected = (-3.0 * iterations, iterations, epoch, data)
    assert run_ranks(_train_unevenly, 2, unit) == [expected] * 2


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return
