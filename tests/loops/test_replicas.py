"""Several replicas in the loops: turns, joined losses, and what all processes decide together."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helios.checkpoint.checkpoint_writer import CheckpointWriter
from helios.checkpoint.record import Record
from helios.core import rng
from helios.errors import UsageError
from helios.findings import FindingKind
from helios.loops.batch import BatchLoop
from helios.loops.boundary import Boundary
from helios.loops.epoch import EvenBatches
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import require
from helios.loops.optimizer import OptimizerLoop
from helios.loops.yielding import YieldLoop
from helios.model.model import Model
from helios.model.processor import Processed
from helios.plugins.plugin import Plugin
from helios.replicas.replicas import Replicas
from helios.session import Session
from helios.state import Phase, TrainingState
from tests.engines.joined import replicas_on
from tests.loops.sessions import (
    EPOCH,
    ITERATION,
    ListBatches,
    ListSource,
    Stepper,
    fit,
    make_fit_loop,
    make_session,
)
from tests.support.quiet import Quiet
from tests.support.ranks import RankError, run_ranks
from tests.support.sums import bits, by_definition

NUM_BATCHES = 5


def named(owner: Any, kind: FindingKind) -> list[str]:
    """Return the names of the findings of a run or a record."""
    names: list[str] = owner.findings.names(kind)
    return names


def draw() -> tuple[float, float, float]:
    """Draw from all three generators."""
    numpy = rng.get_default_numpy_rng().generator.normal()
    return torch.rand(()).item(), random.random(), float(numpy)


def make_batch(iteration: int, replica: int) -> Tensor:
    """Return a batch that knows whose it is."""
    generator = torch.Generator().manual_seed(1000 * iteration + replica)
    size = 10 ** (2 * torch.rand((), generator=generator) - 1)
    return torch.randn(4, 3, generator=generator) * size


def shared_data(block: range, num_replicas: int, num_batches: int = NUM_BATCHES) -> ListSource:
    """Return the part of the data that the replicas of a process train on."""
    items = [[make_batch(i, replica) for replica in block] for i in range(num_batches)]
    return ListSource(items, num_samples=4 * num_replicas)


class Watcher(Quiet):
    """Notes the events of a training, and what can be seen and drawn in them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.turns: dict[tuple[int, int], list[Any]] = {}

    def _note(self, event: str, *more: Any) -> None:
        self.seen.append((event, draw(), *more))

    def _note_turn(self, event: str, *more: Any) -> None:
        place = (self.context.state.global_iteration, self.context.replica)
        self.turns.setdefault(place, []).append((event, *more))

    def on_training_step_start(self, state: TrainingState) -> None:
        self._note("step start", state.global_iteration)

    def on_training_batch_start(self, state: TrainingState) -> None:
        self._note("batch start", state.global_iteration)

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        assert self.context.batch is batch, "that of the replica, as it came"
        self._note_turn("process", draw(), bits(batch))
        return batch * 2

    def on_forward_start(self, context: Any) -> None:
        self._note_turn("forward", bits(context.batch))

    def on_backward_start(self, loss: Tensor) -> None:
        self._note_turn("backward", bits(loss.detach()))

    def on_backward_end(self) -> None:
        self._note_turn("backward done", draw())

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        gradients = [bits(p.grad) for group in optimizer.param_groups for p in group["params"]]
        buffers = {name: bits(b) for name, b in self.context.model.net.named_buffers()}
        self._note("update", gradients, buffers)

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        self._note("update done", committed)

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        losses = self.context.model.loss_items
        self._note("batch end", {name: bits(loss) for name, loss in losses.items()})

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self._note("step end", committed)

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self._note("epoch end", current_epoch)


class Learner(Model):
    """Dropout, BatchNorm, noise of all three generators, and losses that some replicas lack."""

    def __init__(self) -> None:
        super().__init__("learner")
        self.setup()

    unsaved = ("seen",)

    def setup(self, fast_init: bool = False) -> None:
        with rng.stream(1):
            self.net = nn.Sequential(
                nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
            )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.seen: dict[tuple[int, int], Any] = {}

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        assert dict(self.loss_items) == {}, "each replica begins with an empty table"
        first, second, third = draw()
        loss = self.net(batch + first * second).square().mean() * (1 + third**2)
        self._loss_items["loss"] = loss.detach()
        if loss.detach() > 1.0:
            self._loss_items["large"] = float(loss.detach())
        return loss


def train(rank: int, num_processes: int, num_replicas: int, unit: Any, accumulation: int) -> Any:
    """Train on this rank's replicas; returns what was seen, and the bits of the end."""
    rng.seed_rngs(rank)
    with replicas_on(rank, num_processes, num_replicas) as here:
        model, watcher = Learner(), Watcher()
        session = make_session(
            model,
            watcher,
            unit=unit,
            accumulation=accumulation,
            replicas=here,
            sources={Phase.TRAINING: [shared_data(here.local_replicas, num_replicas)]},
            total_steps=2 if unit is EPOCH else 9 // accumulation,
        )
        assert fit(session) == "total_steps reached"
        end = {name: bits(part) for name, part in model.net.state_dict().items()}
        counters = {**session.state.dict(), "average_iter_time": 0.0}
        return (
            watcher.seen,
            watcher.turns,
            end,
            counters,
            session.cursor.dict(),
            named(session, FindingKind.OBSTACLE),
        )


_CASES = [(2, ITERATION, 1), (3, ITERATION, 2), (4, EPOCH, 1), (5, EPOCH, 2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_replicas", "unit", "accumulation"), _CASES)
def test_any_number_of_processes_trains_to_the_same_bits(
    num_replicas: int, unit: Any, accumulation: int
) -> None:
    (expected,) = run_ranks(train, 1, 1, num_replicas, unit, accumulation)
    seen, turns, *end = expected
    assert any("large" in event[2] for event in seen if event[0] == "batch end")
    assert end[-1] == [], "nothing binds this run to its number of processes"
    for num_processes in range(2, num_replicas + 1):
        found = run_ranks(train, num_processes, num_processes, num_replicas, unit, accumulation)
        gathered: dict[Any, Any] = {}
        for rank_seen, rank_turns, *rank_end in found:
            assert rank_seen == seen
            assert rank_end == end
            gathered |= rank_turns
        assert gathered == turns


@pytest.mark.shows("C10")
def test_the_events_of_replicas_stand_between_those_of_the_batch() -> None:
    _, turns, *_ = train(0, 1, 3, ITERATION, 1)
    for events in turns.values():
        assert [event for event, *_ in events] == [
            "process",
            "forward",
            "backward",
            "backward done",
        ]
    assert turns.keys() == {(i, r) for i in range(1, 10) for r in range(3)}
    order = [iteration for iteration, _ in turns]
    assert order == sorted(order)


@pytest.mark.shows("C10")
@pytest.mark.parametrize(("unit", "accumulation"), [(ITERATION, 1), (ITERATION, 2), (EPOCH, 2)])
def test_events_of_the_batch_come_once(unit: Any, accumulation: int) -> None:
    seen, *_ = train(0, 1, 4, unit, accumulation)
    names = [event for event, *_ in seen]
    num_batches = names.count("batch start")
    assert (
        names.count("batch end")
        == num_batches
        == 2 * NUM_BATCHES - (unit is ITERATION) * (1 if accumulation == 1 else 2)
    )
    windows = names.count("step start")
    assert windows == names.count("update") == names.count("update done") == names.count("step end")
    assert windows < num_batches or accumulation == 1


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
) -> Session:
    """Train on rows of numbers: one row an iteration, one number for each replica."""
    rows = rows or [[1.0, 2.0, 4.0]]
    replicas = replicas or Replicas(len(rows[0]))
    items = [[row[replica] for replica in replicas.local_replicas] for row in rows]
    session = make_session(
        model,
        *plugins,
        replicas=replicas,
        accumulation=accumulation,
        sources={Phase.TRAINING: [ListSource(items)]},
        total_steps=len(rows) // accumulation,
        **options,
    )
    fit(session, loop)
    return session


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


def test_a_model_that_notes_nothing_has_the_mean_of_its_losses() -> None:
    losses = Losses()
    run_sums(Sums(), losses, rows=[[1.0, 2.0, 4.0]] * 3)
    weights = (0.0, -7 / 3, -14 / 3)
    found = [table["loss"].item() for table in losses.tables]
    assert found[0] == 0.0
    for loss, weight in zip(found, weights, strict=True):
        assert math.isclose(loss, weight * 7 / 3, rel_tol=1e-6)
    assert [list(table) for table in losses.tables] == [["loss"]] * 3


def test_a_loss_with_its_graph_is_no_warning() -> None:
    def note(model: Sums, batch: float) -> None:
        model._loss_items["loss"] = (model.net.weight * batch + 1).sum()

    losses = Losses()
    run_sums(Sums(note), losses)
    assert losses.tables[0]["loss"].item() == 1.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2), r"\(2,\)"),
        (torch.zeros(0), r"\(0,\)"),
        ("high", "str"),
        ([1.0], "list"),
        (None, "NoneType"),
    ],
)
def test_what_has_no_mean_is_refused(value: Any, shown: str) -> None:
    def note(model: Sums, batch: float) -> None:
        model._loss_items["odd"] = value

    with pytest.raises(UsageError, match=rf"_loss_items\['odd'\] must be a number .* got {shown}"):
        run_sums(Sums(note))


def _note_buffer(model: Sums, batch: float) -> None:
    model.net.running.add_(batch)
    model._loss_items["running"] = model.net.running


def _log_buffer(rank: int, num_processes: int) -> list[Any]:
    losses = Losses()
    with replicas_on(rank, num_processes, 3) as here:
        rows = [[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]] * 2
        model = Sums(_note_buffer)
        run_sums(model, losses, replicas=here, rows=rows, accumulation=2)
        return [*[table["running"].item() for table in losses.tables], model.net.running.item()]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_table_may_hold_buffers(num_processes: int) -> None:
    """What a replica has noted counts, not what an exchange leaves in the tensor later on."""
    third = [torch.tensor(total / 3).item() for total in (7, 77, 40, 110)]
    expected = [*third, 22.0]
    assert run_ranks(_log_buffer, num_processes, num_processes) == [expected] * num_processes


class LateLosses(Losses):
    """May change losses before the update, so processes exchange them after it."""

    def on_optimizer_step_start(self, optimizer: Any) -> None: ...


def _log_alias(
    rank: int, num_processes: int, make_losses: type[Losses] = Losses
) -> list[dict[str, float]]:
    scratch = torch.zeros(())

    def note(model: Sums, batch: float) -> None:
        model._loss_items["weight"] = model.net.weight
        model._loss_items["scratch"] = scratch.fill_(batch)

    losses = make_losses()
    with replicas_on(rank, num_processes, 3) as here:
        run_sums(Sums(note), losses, replicas=here, rows=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    return [{name: mean.item() for name, mean in table.items()} for table in losses.tables]


@pytest.mark.parametrize("make_losses", [Losses, LateLosses])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_table_may_hold_parameters_and_tensors_that_are_used_again(
    num_processes: int, make_losses: type[Losses]
) -> None:
    """Each as it was in the step of its replica, before the update."""
    expected = [{"scratch": 2.0, "weight": 0.0}, {"scratch": 5.0, "weight": -2.0}]
    found = run_ranks(_log_alias, num_processes, num_processes, make_losses)
    assert found == [expected] * num_processes


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
    session = run_sums(Counting(), rows=[[1.0, 2.0]] * 3)
    assert named(session, FindingKind.UNSHARED) == ["num_steps", "window"]
    assert named(session, FindingKind.OBSTACLE) == ["train_step changes num_steps, window"]
    (record,) = caplog.records
    assert "Counting.train_step changes num_steps, window." in record.message
    assert "depends on the number of processes, and the run must keep" in record.message
    assert record.levelno == logging.WARNING


def test_what_is_declared_or_never_changes_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    class Declared(Counting):
        unsaved = ("num_steps", "window")

    for model in (Declared(), Sums(), Sums(_note_buffer), Learner()):
        rows = [[make_batch(0, 0), make_batch(0, 1)]] if isinstance(model, Learner) else None
        session = run_sums(model, rows=rows)
        assert not [*session.findings]
    assert caplog.records == []


def test_one_replica_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    session = make_session(
        Counting(), sources={Phase.TRAINING: [ListSource([[1.0], [2.0]])]}, total_steps=2
    )
    fit(session)
    assert not [*session.findings, *caplog.records]


class Asked:
    """Counts how often its state is asked for."""

    def __init__(self) -> None:
        self.times = 0

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take."""


def test_few_turns_are_watched() -> None:
    model = Sums()
    model.asked = Asked()
    run_sums(model, rows=[[1.0, 2.0]] * 6)
    text = "before the first step, and three times in three turns of iterations 1 and 2, not of 3"
    assert model.asked.times == 1 + 3 * 3 * 2, text


def test_an_obstacle_that_is_known_is_not_noted_again() -> None:
    """After a resume the first turns are watched again."""
    model = Counting()
    model.discovery.take_baseline()
    session = make_session(
        model,
        replicas=Replicas(2),
        sources={Phase.TRAINING: [ListSource([[1.0, 2.0]])]},
        total_steps=1,
    )
    session.findings.add(FindingKind.OBSTACLE, text="train_step changes num_steps, window")
    for name in ("num_steps", "window"):
        session.findings.add(FindingKind.UNSHARED, name)
    fit(session)
    assert named(session, FindingKind.OBSTACLE) == ["train_step changes num_steps, window"]
    assert named(session, FindingKind.UNSHARED) == ["num_steps", "window"]


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
    session = run_sums(model, replicas=Replicas(2), rows=[[1.0, 2.0]] * 5)
    assert named(session, FindingKind.OBSTACLE) == ["train_step changes hard"]


def _change_alone(rank: int) -> tuple[list[str], list[str]]:
    with replicas_on(rank, 2, 2) as here:
        model = Late({1} if rank else set())
        model.discovery.take_baseline()
        session = run_sums(model, replicas=here, rows=[[1.0, 2.0]] * 2)
        session.capture()
        return named(session, FindingKind.OBSTACLE), named(session, FindingKind.UNSHARED)


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


class Drift(Plugin):
    """Lets the learning rate of one process go its own way."""

    def __init__(self) -> None:
        super().__init__("drift")

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        self.context.optimizer.param_groups[0]["lr"] = 0.1 * (1 + self.context.rank)


def _drift(rank: int) -> str:
    with replicas_on(rank, 2, 2) as here:
        with pytest.raises(UsageError) as caught:
            run_sums(Sums(), Drift(), replicas=here, rows=[[1.0, 2.0]])
        return str(caught.value)


def test_learning_rates_that_differ_between_processes_end_the_run() -> None:
    for text in run_ranks(_drift, 2):
        assert "the learning rate of optimizer, group 0, of rank 1 differ" in text


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
        session = run_sums(model, replicas=here, rows=[[1.0, 2.0], [10.0, 20.0]])
        return session.capture()


@pytest.mark.shows("S58")
def test_a_record_holds_what_differs_between_processes() -> None:
    """Those of a start with as many processes get their own again."""
    for record in run_ranks(_capture, 2):
        assert named(record, FindingKind.UNSHARED) == ["history", "teacher.weight"]
        assert named(record, FindingKind.OBSTACLE) == ["train_step changes history, teacher.weight"]
        assert record.num_replicas == 2
        for rank, own in enumerate(record.by_rank):
            assert own["values"]["nodes"]["history"]["content"] == [1.0 + rank, 10.0 * (1 + rank)]
            assert own["objects"]["teacher"]["weight"].tolist() == [[11.0 * (1 + rank)]]
            assert own["data"] is None


def test_a_record_of_one_process_holds_nothing_by_rank() -> None:
    model = Follower()
    model.discovery.take_baseline()
    record = run_sums(model).capture()
    assert record.by_rank == []
    assert record.num_replicas == 3


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
        record = run_sums(model, replicas=here, rows=[[1.0, 2.0], [10.0, 20.0]]).capture()
        return record.is_manual, named(record, FindingKind.OBSTACLE), record.by_rank


def test_what_manual_steps_leave_on_each_process_is_saved_too() -> None:
    for is_manual, obstacles, by_rank in run_ranks(_capture_manual, 2):
        assert is_manual is True
        assert obstacles == [], "manual steps bind a run by themselves"
        histories = [own["values"]["nodes"]["history"]["content"] for own in by_rank]
        assert histories == [[1.0, 10.0], [2.0, 20.0]]


def test_a_manual_step_needs_a_process_for_each_replica() -> None:
    with pytest.raises(UsageError, match=r"num_replicas is 3 and .* is 1\. Start 3 processes, or"):
        run_sums(Manual())


class HandedOver(Sums):
    """Steps by itself, and gives back outputs without a loss, as a batch processor does."""

    def train_step(self, batch: Any, state: TrainingState) -> Processed:
        (self.net.weight * batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Processed(None, None)


def _hand_over(rank: int) -> tuple[Any, ...]:
    with replicas_on(rank, 2, 2) as here:
        session = run_sums(HandedOver(), replicas=here, rows=[[2.0, 2.0]])
        return (
            session.is_manual,
            named(session, FindingKind.UNSHARED),
            named(session, FindingKind.OBSTACLE),
        )


def test_weights_that_a_manual_step_moves_are_no_obstacle() -> None:
    assert run_ranks(_hand_over, 2) == [(True, [], [])] * 2


class Yielding(Sums):
    """Yields its loss."""

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        yield (self.net.weight * batch).sum()


@pytest.mark.shows("L28")
def test_a_yield_loop_needs_a_process_for_each_replica() -> None:
    with pytest.raises(UsageError, match="A YieldLoop needs one process per replica"):
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


class Remembering(Yielding):
    """Keeps what it has seen, on each process."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.history: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.history.append(batch)
        yield from super().train_step(batch, state)


def _capture_yields(rank: int) -> list[Any]:
    with replicas_on(rank, 2, 2) as here:
        model = Remembering()
        model.discovery.take_baseline()
        rows = [[1.0, 2.0], [10.0, 20.0]]
        session = run_sums(model, replicas=here, rows=rows, loop=make_fit_loop(YieldLoop()))
        record = session.capture()
        return [own["values"]["nodes"]["history"]["content"] for own in record.by_rank]


def test_what_a_yield_loop_leaves_on_each_process_is_saved_too() -> None:
    assert run_ranks(_capture_yields, 2) == [[[1.0, 10.0], [2.0, 20.0]]] * 2


class Twice(BatchLoop):
    """Trains on each batch twice."""

    def advance(self, batch: Any) -> None:
        super().advance(batch)
        require(self.optimizer_loop).run(self.prepare(batch))


def _tree_with(batch_loop: BatchLoop) -> FitLoop:
    loop = make_fit_loop()
    require(loop.epoch_loop).connect(batch_loop=batch_loop)
    return loop


@pytest.mark.parametrize("accumulation", [1, 2])
def test_several_updates_a_batch_need_a_process_for_each_replica(accumulation: int) -> None:
    with pytest.raises(UsageError, match="several times per batch needs one process per replica"):
        run_sums(
            Sums(),
            rows=[[1.0, 2.0]] * 2,
            accumulation=accumulation,
            loop=_tree_with(Twice(OptimizerLoop())),
        )


class Drawing(Sums):
    """Notes what it draws."""

    unsaved = ("drawn",)

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.drawn: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        self.drawn.append(draw()[0])
        return super().train_step(batch, state)


def _count_up(model: Sums, batch: float) -> None:
    model.net.running.add_(batch)


def _train_twice(rank: int) -> tuple[float, float, list[float], list[float]]:
    rng.seed_rngs(0)
    with replicas_on(rank, 2, 2) as here:
        model, losses = Drawing(_count_up), Losses()
        loop = _tree_with(Twice(OptimizerLoop()))
        run_sums(model, losses, replicas=here, rows=[[1.0, 2.0], [4.0, 8.0]], loop=loop)
        shown = [table["loss"].item() for table in losses.tables]
        return model.net.weight.item(), model.net.running.item(), shown, model.drawn


def test_several_updates_a_batch_take_the_mean_each() -> None:
    """Each has random numbers of its own, and the buffers of the first replica go round.

    The table shows the loss of the last one, as it does for one replica.
    """
    (*first, drawn), (*second, others) = run_ranks(_train_twice, 2)
    assert first == second == [-15.0, 10.0, [-2.25, -54.0]]
    assert len({*drawn, *others}) == 8


class UntilSmall(BatchLoop):
    """Trains on each batch until the loss of this replica is small: not equally often."""

    def advance(self, batch: Any) -> None:
        super().advance(batch)
        while batch > 2.0 and self.session.context.loss is not None:
            batch /= 2
            require(self.optimizer_loop).run(self.prepare(batch))


def _train_until_small(rank: int) -> str:
    with replicas_on(rank, 2, 2) as here:
        loop = _tree_with(UntilSmall(OptimizerLoop()))
        try:
            run_sums(Sums(), replicas=here, rows=[[1.0, 8.0], [4.0, 8.0]], loop=loop)
        except UsageError as error:
            return str(error)
        return ""


@pytest.mark.shows("L43")
def test_processes_that_update_unequally_often_end_with_an_error_and_do_not_wait() -> None:
    found = run_ranks(_train_until_small, 2, timeout=90)
    assert len(set(found)) == 1
    assert "in iteration 1 some make one more than others" in found[0]


class LeavingAt(Quiet):
    """Ends the epoch by StopIteration, before its batch of a number."""

    def __init__(self, iteration: int) -> None:
        super().__init__()
        self.iteration = iteration

    def on_training_batch_start(self, state: TrainingState) -> None:
        if state.global_iteration == self.iteration:
            self.iteration = 0
            raise StopIteration


def test_a_hook_may_end_an_epoch_where_one_process_carries_all() -> None:
    """By epochs the open window is dropped, on all replicas; the next one begins with nothing."""
    losses, model = Losses(), Sums(_note_buffer)
    session = make_session(
        model,
        losses,
        LeavingAt(2),
        unit=EPOCH,
        accumulation=2,
        replicas=Replicas(2),
        sources={Phase.TRAINING: [ListSource([[1.0, 2.0], [4.0, 8.0]])]},
        total_steps=2,
    )
    fit(session)
    assert [table["running"].item() for table in losses.tables] == [1.5, 2.5, 8.5]
    assert model.net.weight.item() == -15.0 / 4, "the first window left nothing"
    assert model.net.running.item() == 6.0, "what replica 0 has seen, in both epochs"


@pytest.mark.shows("L29")
def test_a_window_that_goes_on_in_the_next_epoch_keeps_its_gradients() -> None:
    """By steps: an epoch of three batches, a window of two."""
    model, losses = Sums(_note_buffer), Losses()
    session = make_session(
        model,
        losses,
        accumulation=2,
        replicas=Replicas(2),
        sources={Phase.TRAINING: [ListSource([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])]},
        total_steps=2,
    )
    fit(session)
    assert model.net.weight.item() == -(15.0 + 51.0) / 4
    assert [table["running"].item() for table in losses.tables] == [1.5, 7.5, 29.0, 30.5]


def _stop_alone(rank: int) -> None:
    plugins = [LeavingAt(2)] if rank == 1 else []
    with replicas_on(rank, 2, 2) as here:
        run_sums(Sums(), *plugins, replicas=here, rows=[[1.0, 2.0]] * 3)


def test_a_hook_must_not_end_an_epoch_where_several_processes_train() -> None:
    with pytest.raises(RankError, match="A hook must not raise StopIteration when several"):
        run_ranks(_stop_alone, 2)


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
        session = run_sums(model, asking, replicas=here, rows=[[1.0, 2.0, 4.0]] * 5)
        requests = session.agreement.asked
        return (
            session.state.global_iteration,
            requests.stop_reason,
            requests.interruption,
            model.net.weight.item(),
        )


@pytest.mark.shows("H36", "K42", "C16")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("what", ["stop", "interrupt", "poll"])
def test_what_one_process_asks_for_ends_the_run_on_all(what: str, num_processes: int) -> None:
    expected = {
        "stop": ("enough", ""),
        "interrupt": ("", "a signal"),
        "poll": ("should_training_stop returned True", ""),
    }[what]
    for who in {0, num_processes - 1}:
        found = run_ranks(_ask, num_processes, num_processes, who, what)
        assert len(set(found)) == 1
        assert found[0][:3] == (2, *expected)


class Saver(CheckpointWriter):
    """Keeps what a session saves, in memory."""

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
        session = make_session(
            model,
            Wanting(2 if rank == 1 else 99),
            replicas=here,
            sources={Phase.TRAINING: [ListSource([[1.0]] * 4)]},
            total_steps=4,
        )
        session.writer, session.can_save = saver, True
        fit(session)
        return saver.saved


@pytest.mark.shows("H19")
def test_a_checkpoint_that_one_process_asks_for_is_taken_by_all() -> None:
    assert run_ranks(_save, 2) == [[2, 4]] * 2


class Skipping(Quiet):
    """Leaves out the first update."""

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        if self.context.state.global_iteration == 1:
            self.context.skip_step("a spike")


def _skip(rank: int) -> tuple[float, int]:
    with replicas_on(rank, 2, 2) as here:
        model, plugins = Sums(), [Skipping()] if rank == 1 else []
        session = run_sums(model, *plugins, replicas=here, rows=[[1.0, 2.0], [4.0, 8.0]])
        return model.net.weight.item(), session.state.global_step


@pytest.mark.shows("R26")
def test_an_update_that_one_process_leaves_out_is_left_out_by_all() -> None:
    """The run counts steps, so a third batch makes up for it: the data begins anew."""
    assert run_ranks(_skip, 2) == [(-7.5, 2)] * 2


def _improve(rank: int) -> int:
    class Judging(Sums):
        def have_metrics_improved(self) -> bool:
            return rank == 1

    with replicas_on(rank, 2, 2) as here:
        session = make_session(Judging(), replicas=here, unit=EPOCH, valid_frequency=1)
        session.state.early_stop_count, session.state.global_epoch = 3, 1
        assert Boundary(session).validate_if_due(lambda: True)
        return session.state.early_stop_count


@pytest.mark.shows("H36")
def test_an_improvement_that_one_process_sees_counts_for_all() -> None:
    assert run_ranks(_improve, 2) == [0, 0]


def _even_out(rank: int, lengths: list[int], knows_end: bool) -> tuple[Any, ...]:
    num_processes = len(lengths)
    with replicas_on(rank, num_processes, num_processes) as here:
        session = make_session(Sums(), replicas=here)
        inner = ListBatches(range(lengths[rank]), 10 + rank, knows_end=knows_end)
        batches = EvenBatches(inner, session)
        found = [(batch, batches.num_samples, batches.is_last) for batch in batches]
        return found, inner.is_closed, next(batches, "nothing") if num_processes == 1 else None


@pytest.mark.shows("R46")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("knows_end", [True, False])
@pytest.mark.parametrize("lengths", [[3], [2, 4], [4, 2], [3, 3], [5, 4, 2], [0, 3]])
def test_the_first_process_whose_data_ends_ends_the_pass(
    lengths: list[int], knows_end: bool
) -> None:
    least = min(lengths)
    for rank, found in enumerate(run_ranks(_even_out, len(lengths), lengths, knows_end)):
        batches, is_closed, _ = found
        assert batches == [
            (number, 10 + rank, knows_end and number == least - 1) for number in range(least)
        ]
        assert is_closed, "the workers of the others end, too"


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
        session = make_session(
            model,
            unit=unit,
            replicas=here,
            sources={Phase.TRAINING: [Uneven(items)]},
            total_steps=2 if unit is EPOCH else 7,
        )
        fit(session)
        data = [own["data"] for own in session.capture().by_rank]
        return model.net.weight.item(), session.state.global_iteration, session.cursor.epoch, data


@pytest.mark.shows("R46")
@pytest.mark.parametrize(("unit", "iterations", "epoch"), [(EPOCH, 6, 2), (ITERATION, 7, 2)])
def test_an_epoch_ends_where_the_shortest_data_ends(unit: Any, iterations: int, epoch: int) -> None:
    """R46: and each process' state of its data is saved."""
    data = [{"length": 3}, {"length": 5}]
    expected = (-3.0 * iterations, iterations, epoch, data)
    assert run_ranks(_train_unevenly, 2, unit) == [expected] * 2


def _train_to_an_unknown_end(rank: int) -> tuple[float, float]:
    with replicas_on(rank, 2, 2) as here:
        model = Sums(_count_up)
        items = [[2.0]] * 3 if rank == 0 else [[4.0]] * 5
        session = make_session(
            model,
            unit=EPOCH,
            accumulation=2,
            replicas=here,
            sources={Phase.TRAINING: [Uneven(items, knows_end=False)]},
            total_steps=2,
        )
        fit(session)
        return model.net.weight.item(), model.net.running.item()


@pytest.mark.shows("R46")
def test_a_window_that_the_end_of_data_cuts_is_dropped_on_all() -> None:
    """By epochs: its gradients are gone, and all have the buffers of the first replica."""
    assert run_ranks(_train_to_an_unknown_end, 2) == [(-6.0, 12.0)] * 2


class _Scored(Sums):
    """Writes its scores itself, when a validation ends."""

    def __init__(self, scores: dict[str, Any]) -> None:
        super().__init__()
        self.scores = scores

    def valid_step(self, batch: Any, step: int) -> None:
        """Return no scores."""

    def on_validation_end(self, validation_cycle: int) -> None:
        self.metrics.update(self.scores)


def _compare(rank: int, tables: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    messages: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("helios.loops.evaluation"), Listening()
    logger.addHandler(handler)
    try:
        with replicas_on(rank, len(tables), len(tables)) as here:
            source = ListSource([[1.0]])
            session = make_session(
                _Scored(tables[rank]), replicas=here, sources={Phase.VALIDATION: [source]}
            )
            loop = ValidationLoop()
            loop._attach(session)
            for _ in range(2):
                loop.run()
    finally:
        logger.removeHandler(handler)
    return named(session, FindingKind.OBSTACLE), messages


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ([{"a": 1.0, "b": math.nan}, {"a": 1.0, "b": math.nan}], []),
        ([{"a": 1.0}, {"a": torch.tensor(1.0)}], []),
        ([{"text": "x"}, {"text": "y"}], []),
        ([{"a": 0.1 + 0.2, "b": 1.0}, {"a": 0.3, "b": 1.0}], ["a"]),
        ([{"a": 1.0}, {"a": 1.0, "c": 2.0}], ["c"]),
        ([{"a": 1.0, "z": 0.0}, {"a": 1.0}, {"a": 2.0, "z": 0.0}], ["a", "z"]),
    ],
)
def test_scores_that_differ_between_processes_are_named_once(
    tables: list[dict[str, Any]], names: list[str]
) -> None:
    for obstacles, messages in run_ranks(_compare, len(tables), tables):
        if not names:
            assert (obstacles, messages) == ([], [])
        else:
            assert obstacles == [f"scores that differ between processes: {', '.join(names)}"]
            (message,) = messages
            assert f"The scores {', '.join(names)} differ between processes" in message


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    rng.seed_rngs(0)
    return


class _Replacing(Sums):
    """Puts a table of its own in the place of the losses, with a value that the update moves."""

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        loss = super().train_step(batch, state)
        self._loss_items = {"loss": loss, "weight": self.net.weight.detach()[0, 0]}
        return loss


def test_a_table_that_a_step_puts_in_place_is_kept_as_it_was_before_the_update() -> None:
    model = _Replacing()
    seen: list[float] = []
    weights = [model.net.weight.item()]

    class Seeing(Quiet):
        def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
            seen.append(float(self.context.model.loss_items["weight"]))
            weights.append(model.net.weight.item())

    run_sums(model, Seeing(), rows=[[1.0, 2.0], [4.0, 8.0], [1.0, 1.0]])
    assert seen == weights[:-1]
    assert len(set(weights)) == 4
