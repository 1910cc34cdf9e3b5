"""Several replicas in the loops: turns, joined losses, and what all processes decide together."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helios.checkpoint.capture import capture
from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.checkpoint.record import Record
from helios.core import rng
from helios.errors import UsageError
from helios.findings import FindingKind
from helios.loops import YieldLoop
from helios.loops.fit import FitLoop
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
    Stepper,
    fit,
    make_fit_loop,
    make_parts,
)
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.sums import bits, by_definition


def named(owner: Any, kind: FindingKind) -> list[str]:
    """Return the names of the findings of a run or a record."""
    names: list[str] = owner.findings.names(kind)
    return names


class Sums(Model):
    """One weight; what a replica contributes is the batch; what it notes is up to the test."""

    def __init__(self, note: Callable[[Sums, float], None] = lambda model, batch: None) -> None:
        super().__init__("sums")
        self.note = note
        self.setup()

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.net.register_buffer("running", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.note(self, batch)
        return (self.net.weight * batch).sum()


class Losses(Quiet):
    """Notes the table at the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[dict[str, Any]] = []

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.tables.append(dict(self.context.model.loss_items))


def run_sums(
    model: Model,
    *plugins: Plugin,
    replicas: Replicas | None = None,
    rows: list[list[float]] | None = None,
    accumulation: int = 1,
    loop: FitLoop | None = None,
    **options: Any,
) -> RunParts:
    """Train on rows of numbers: one row an iteration, one number for each replica."""
    rows = rows or [[1.0, 2.0, 4.0]]
    replicas = replicas or Replicas(len(rows[0]))
    items = [[row[replica] for replica in replicas.local_replicas] for row in rows]
    parts = make_parts(
        model,
        *plugins,
        replicas=replicas,
        accumulation=accumulation,
        sources={Phase.TRAINING: [ListSource(items)]},
        total_steps=len(rows) // accumulation,
        **options,
    )
    fit(parts, loop)
    return parts


@pytest.mark.shows("L29")
def test_an_update_takes_the_mean_of_micro_batches_and_replicas() -> None:
    values = [[0.1, 0.7, -1e3, 3e-3, 0.5], [2e4, -0.3, 0.9, 1e-4, 1.1]]
    one = Stepper()
    run_sums(one, rows=values, accumulation=2)
    leaves = [torch.tensor(a) + torch.tensor(b) for a, b in zip(*values, strict=True)]
    assert bits(one.net.weight.detach()) == bits(-(by_definition(leaves) / 10.0))


def test_the_table_holds_means_over_the_replicas_that_have_a_name() -> None:
    def note(model: Sums, batch: float) -> None:
        model._loss_items["value"] = torch.tensor(batch)
        if batch > 1:
            model._loss_items["rare"] = batch
        if batch == 4:
            model._loss_items["once"] = torch.tensor([[batch]])

    losses = Losses()
    run_sums(Sums(note), losses, rows=[[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    first, second = losses.tables
    assert {name: mean.item() for name, mean in first.items()} == {
        "once": 4.0,
        "rare": 3.0,
        "value": torch.tensor(7 / 3).item(),
    }
    assert all(mean.dim() == 0 and mean.dtype is torch.float32 for mean in first.values())
    assert {name: mean.item() for name, mean in second.items()} == {"value": 1.0}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2), r"\(2,\)"),
        (None, "NoneType"),
    ],
)
def test_what_has_no_mean_is_refused(value: Any, shown: str) -> None:
    def note(model: Sums, batch: float) -> None:
        model._loss_items["odd"] = value

    with pytest.raises(UsageError, match=rf"loss_items\['odd'\] must be a number .* got {shown}"):
        run_sums(Sums(note))


def _note_buffer(model: Sums, batch: float) -> None:
    model.net.running.add_(batch)
    model._loss_items["running"] = model.net.running


class Counting(Sums):
    """Counts its steps, which every replica does on its own."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.num_steps = 0
        self.window: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.num_steps += 1
        self.window.append(batch)
        return super().train_step(batch, state)


def test_what_a_step_changes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = run_sums(Counting(), rows=[[1.0, 2.0]] * 3)
    assert named(parts, FindingKind.UNSHARED) == ["num_steps", "window"]
    assert named(parts, FindingKind.OBSTACLE) == ["train_step changes num_steps, window"]
    (record,) = caplog.records
    assert "Counting.train_step changes num_steps, window." in record.message
    assert "depends on the number of processes, and the run must keep" in record.message
    assert record.levelno == logging.WARNING


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
def test_a_change_is_found_in_the_turn_of_any_replica_and_later_on(turns: set[int]) -> None:
    """Turns are watched in the first iteration, and in those that are powers of two."""
    model = Late(turns)
    model.discovery.take_baseline()
    parts = run_sums(model, replicas=Replicas(2), rows=[[1.0, 2.0]] * 5)
    assert named(parts, FindingKind.OBSTACLE) == ["train_step changes hard"]


def _change_alone(rank: int) -> tuple[list[str], list[str]]:
    with replicas_on(rank, 2, 2) as here:
        model = Late({1} if rank else set())
        model.discovery.take_baseline()
        parts = run_sums(model, replicas=here, rows=[[1.0, 2.0]] * 2)
        capture(parts)
        return named(parts, FindingKind.OBSTACLE), named(parts, FindingKind.UNSHARED)


@pytest.mark.shows("S58")
def test_what_one_process_changes_is_known_to_all() -> None:
    expected = (["train_step changes hard"], ["hard"])
    assert run_ranks(_change_alone, 2) == [expected] * 2


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


_LAZY = "network 'head' has lazy layers.*Run a batch through it in Model.setup"


def _refuse_lazy(rank: int) -> str:
    with replicas_on(rank, 2, 2) as here, pytest.raises(UsageError) as caught:
        run_sums(Lazy(), replicas=here, rows=[[1.0, 2.0]])
    return str(caught.value)


def test_layers_that_get_their_weights_in_the_first_step_are_refused() -> None:
    """Each process would draw them on the numbers of another replica."""
    with pytest.raises(UsageError, match=_LAZY):
        run_sums(Lazy())
    for text in run_ranks(_refuse_lazy, 2):
        assert re.search(_LAZY, text)


class Follower(Sums):
    """A second network that follows the first one inside of the step."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.teacher = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.teacher.weight)
        self.history: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.add_(batch)
        self.history.append(batch)
        return super().train_step(batch, state)


def _capture(rank: int) -> Record:
    with replicas_on(rank, 2, 2) as here:
        model = Follower()
        model.discovery.take_baseline()
        parts = run_sums(model, replicas=here, rows=[[1.0, 2.0], [10.0, 20.0]])
        return capture(parts)


@pytest.mark.shows("S58")
def test_a_record_holds_what_differs_between_processes() -> None:
    """Those of a start with as many processes get their own again."""
    for record in run_ranks(_capture, 2):
        assert named(record, FindingKind.UNSHARED) == ["history", "teacher.weight"]
        assert named(record, FindingKind.OBSTACLE) == ["train_step changes history, teacher.weight"]
        assert record.num_replicas == 2
        for rank, own in enumerate(record.by_rank):
            assert own["model"]["values"][""]["history"] == [1.0 + rank, 10.0 * (1 + rank)]
            assert own["model"]["objects"]["teacher"]["weight"].tolist() == [[11.0 * (1 + rank)]]
            assert own["data"] is None


class Manual(Model):
    """Steps by itself, and counts; each process does so on its own."""

    def __init__(self) -> None:
        super().__init__("manual")
        self.setup()

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.history: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> None:
        self.history.append(batch)
        self.net(torch.full((1, 1), 2.0)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _capture_manual(rank: int) -> tuple[Any, ...]:
    with replicas_on(rank, 2, 2) as here:
        model = Manual()
        model.discovery.take_baseline()
        record = capture(run_sums(model, replicas=here, rows=[[1.0, 2.0], [10.0, 20.0]]))
        return record.is_manual, named(record, FindingKind.OBSTACLE), record.by_rank


def test_what_manual_steps_leave_on_each_process_is_saved_too() -> None:
    for is_manual, obstacles, by_rank in run_ranks(_capture_manual, 2):
        assert is_manual is True
        assert obstacles == [], "manual steps bind a run by themselves"
        histories = [own["model"]["values"][""]["history"] for own in by_rank]
        assert histories == [[1.0, 10.0], [2.0, 20.0]]


def test_a_manual_step_needs_a_process_for_each_replica() -> None:
    with pytest.raises(UsageError, match=r"num_replicas is 3 and .* is 1\. Start 3 processes, or"):
        run_sums(Manual())


class Yielding(Sums):
    """Yields its loss."""

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        yield (self.net.weight * batch).sum()


@pytest.mark.shows("L28")
def test_a_yield_loop_needs_a_process_for_each_replica() -> None:
    with pytest.raises(UsageError, match="of its own needs one process per replica"):
        run_sums(Yielding(), loop=make_fit_loop(YieldLoop()))


def _train_by_yields(rank: int, accumulation: int) -> tuple[float, list[Any]]:
    with replicas_on(rank, 2, 2) as here:
        losses, model = Losses(), Yielding()
        rows = [[1.0, 2.0], [4.0, 8.0]]
        loop = make_fit_loop(YieldLoop())
        run_sums(model, losses, replicas=here, rows=rows, accumulation=accumulation, loop=loop)
        return model.net.weight.item(), [table["loss"].item() for table in losses.tables]


@pytest.mark.shows("L28")
@pytest.mark.parametrize(
    ("accumulation", "expected"), [(1, (-7.5, [0.0, -9.0])), (2, (-3.75, [0.0, 0.0]))]
)
def test_a_yield_loop_trains_on_as_many_processes(
    accumulation: int, expected: tuple[float, list[float]]
) -> None:
    assert run_ranks(_train_by_yields, 2, accumulation) == [expected] * 2


@pytest.mark.shows("L29")
def test_a_window_that_goes_on_in_the_next_epoch_keeps_its_gradients() -> None:
    """By steps: an epoch of three batches, a window of two."""
    model, losses = Sums(_note_buffer), Losses()
    parts = make_parts(
        model,
        losses,
        accumulation=2,
        replicas=Replicas(2),
        sources={Phase.TRAINING: [ListSource([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])]},
        total_steps=2,
    )
    fit(parts)
    assert model.net.weight.item() == -(15.0 + 51.0) / 4
    assert [table["running"].item() for table in losses.tables] == [1.5, 7.5, 29.0, 30.5]


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
