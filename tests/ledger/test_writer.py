"""What a line of the ledger says of an iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.core.loss_means import LossMeans
from helios.ledger.book import EVERY, FILE_NAME, Book
from helios.ledger.line import read_float
from helios.ledger.writer import LedgerWriter, add_up
from helios.listeners import Iteration
from helios.state import TrainingState
from helios.storage.content_hash import read_safely


class Holder:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5, momentum=0.9)


def _make(
    folder: Path,
    holder: Holder,
    *,
    every: int = EVERY,
) -> tuple[LedgerWriter, Book]:
    book = Book(folder, run="r")
    book.open(None, after=0)

    writer = LedgerWriter(
        book,
        range(1),
        num_processes=1,
        find_weights=lambda: {"weight": holder.weight},
        find_buffers=dict,
        find_optimizers=lambda: {"optimizer": holder.optimizer},
        reads_weights=True,
        every=every,
        attributes=vars(holder),
    )
    return writer, book


def _state(number: int) -> TrainingState:
    state = TrainingState(global_epoch=1, global_iteration=number, global_step=number)
    state.is_step_boundary = state.is_step_committed = True
    return state


def _end(
    writer: LedgerWriter,
    state: TrainingState,
    losses: Any = (),
    *,
    rates: Any = None,
    norm: Any = None,
) -> None:
    """Notify a writer of the end of an iteration."""
    iteration = Iteration(state, LossMeans(), means=dict(losses), norm=norm)
    iteration.totals, iteration.rates = (), rates or {}
    writer.iteration_ended(iteration)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()[1:]]


def test_a_line_holds_the_bits_of_every_number(tmp_path: Path) -> None:
    holder = Holder()
    writer, book = _make(tmp_path, holder)
    writer.batches_fetched([torch.ones(2)], [[4, 2]], None)
    losses = {"loss": torch.tensor(0.1), 'a "name"': 0.2}
    _end(writer, _state(1), losses, norm=torch.tensor(2.5), rates={holder.optimizer: [0.25, 1]})
    writer.settle()
    book.close()
    (line,) = _lines(tmp_path)
    assert line["at"] == [1, 1, 1]
    found = {name: read_float(digits) for name, digits in line["loss"].items()}
    assert found == {"loss": torch.tensor(0.1).item(), 'a "name"': 0.2}
    assert [read_float(digits) for digits in line["lr"]] == [0.25, 1.0]
    assert read_float(line["norm"]) == 2.5
    assert "skipped" not in line


@pytest.mark.shows("P10")
def test_a_line_of_one_loss_and_one_rate_has_at_most_160_bytes(tmp_path: Path) -> None:
    writer, book = _make(tmp_path, Holder())
    writer.batches_fetched([torch.ones(2)], [[4, 2]], None)
    state = _state(1_000_000)
    state.global_step = 999_999  # no hash of the weights
    state.global_epoch = 100
    _end(writer, state, {"loss": 1.0})
    writer.settle()
    book.close()
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines(keepends=True)[1]) <= 160


@pytest.mark.parametrize(
    ("is_boundary", "is_committed", "is_skipped"),
    [(True, True, False), (True, False, True), (False, True, False)],
)
def test_an_update_that_was_left_out_is_marked(
    is_boundary: bool, is_committed: bool, is_skipped: bool, tmp_path: Path
) -> None:
    writer, book = _make(tmp_path, Holder())
    state = _state(1)
    state.is_step_boundary, state.is_step_committed = is_boundary, is_committed
    writer.batches_fetched([1], None, None)
    _end(writer, state)
    writer.settle()
    book.close()
    (line,) = _lines(tmp_path)
    assert ("skipped" in line) is is_skipped


def _hash(batches: list[Any], indices: Any, block: range) -> Any:
    return add_up(block, [*map(read_safely, batches)], indices)


def test_replicas_that_exchange_their_batches_are_seen() -> None:
    one = _hash([1, 2], [[3], [4]], range(2))
    other = _hash([2, 1], [[4], [3]], range(2))
    assert one.order != other.order
    assert one.content != other.content


@pytest.mark.shows("P8")
def test_a_batch_that_cannot_be_read_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("not like this")

    writer, book = _make(tmp_path, Holder())
    for _ in range(2):
        writer.batches_fetched([torch.ones(2).as_subclass(Refusing)], [[0]], None)
        _end(writer, _state(1))
    writer.settle()
    book.close()
    assert [line["data"][1:] for line in _lines(tmp_path)] == [["0" * 16, 1]] * 2
    assert caplog.text.count("cannot read the batches") == 1


@pytest.mark.shows("P8")
@pytest.mark.parametrize("number", [None, torch.ones(3), object()])
def test_what_is_no_number_is_null_and_stops_nobody(number: Any, tmp_path: Path) -> None:
    holder = Holder()
    writer, book = _make(tmp_path, holder)
    writer.batches_fetched([1], [[0]], None)
    _end(writer, _state(1), {"loss": number, 3: 1.0}, rates={holder.optimizer: [number]})
    writer.settle()
    book.close()
    (line,) = _lines(tmp_path)
    assert line["loss"]["loss"] is None
    assert read_float(line["loss"]["3"]) == 1.0
    assert line["lr"] == [None]


def test_weights_and_moments_are_hashed_in_every_so_many_steps_and_at_the_end(
    tmp_path: Path,
) -> None:
    holder = Holder()
    writer, book = _make(tmp_path, holder, every=3)
    for number in range(1, 8):
        holder.weight.grad = torch.ones(3)
        holder.optimizer.step()
        writer.batches_fetched([1], [[0]], None)
        _end(writer, _state(number))
    writer.training_ended(_state(7))
    holder.optimizer.state[holder.weight]["momentum_buffer"][0] += 1
    writer.training_ended(_state(7))
    writer.settle()
    book.close()
    lines = _lines(tmp_path)
    assert [line["at"][1] for line in lines if "weights" in line] == [3, 6, 7, 7]
    assert len({line["weights"] for line in lines if "weights" in line}) == 3
    assert lines[-1]["optimizer"] != lines[-2]["optimizer"]
