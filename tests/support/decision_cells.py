"""Which cells the matrix of decisions has: what is decided, in which event, in which training.

Each decision is made once in each event; which training and which moment it has there takes turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helios.hooks.events import EVENTS, Receiver

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "decisions.txt"

REQUEST_CHECKPOINT = "request_checkpoint"
REQUEST_STOP = "request_stop"
INTERRUPT = "interrupt"
SIGNAL = "SIGTERM to rank 0"
SKIP_STEP = "skip_step"
STOP_ITERATION = "StopIteration"
FAILED_SAVE = "failed save in flight"
FAILED_WRITE = "failed save"
FAILED_WRITE_CONTINUED = "failed save, going on"
OVERFLOW = "fp16 overflow"
EARLY_STOP = "early stop"
IMPROVEMENT = "improvement"
POLL = "poll says yes"

START, TRIAL, MID, END, LAST, RESUME = "start", "trial", "mid", "epoch's end", "last", "resume"
LATE = "late poll"
FIRST_ITERATION = {TRIAL: 0, MID: 3, END: 5, LATE: 3}
"""The first iteration in which something is decided; in other moments the first event counts."""


class Cell(NamedTuple):
    """One decision in one training.

    Attributes:
        kind: what is decided.
        event: in which event; of the first ones from the moment on.
        moment: when.
        unit: what the run counts.
        accumulation: batches of a window.
        num_replicas: V.
        number: which poll or validation is answered with yes; how many validations end the run.
        asking_rank: the process that decides; ``None`` for all.
    """

    kind: str
    event: str
    moment: str
    unit: str
    accumulation: int
    num_replicas: int
    number: int = 0
    asking_rank: int | None = None

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return (
            f"{self.kind}{number} / {self.event} / {self.moment} / "
            f"{self.unit} x{self.accumulation} / V={self.num_replicas}"
        )

    @property
    def is_late(self) -> bool:
        """Whether the second poll of an iteration is meant."""
        return self.moment == LATE


_PER_BATCH = (
    "on_training_step_start",
    "on_training_batch_start",
    "process_training_batch",
    "on_forward_start",
    "train_step",
    "on_forward_end",
    "on_backward_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_before_zero_grad",
    "on_optimizer_step_end",
    "on_training_batch_end",
    "on_training_step_end",
    "on_log",
    "should_training_stop",
)
_VALIDATION = (
    "on_validation_start",
    "process_validation_batch",
    "on_validation_batch_start",
    "valid_step",
    "on_validation_batch_end",
    "on_validation_end",
)
_MOMENTS = {
    "on_fit_start": (START, RESUME),
    "on_sanity_check_start": (TRIAL,),
    "on_sanity_check_end": (TRIAL,),
    "on_training_start": (START, RESUME),
    "on_load_checkpoint": (RESUME,),
    "on_checkpoint_loaded": (RESUME,),
    "on_training_resume": (RESUME,),
    "on_training_epoch_start": (START, MID),
    **dict.fromkeys(_PER_BATCH, (MID, END)),
    "should_training_stop": (MID, END, LATE, RESUME),
    **dict.fromkeys(_VALIDATION, (TRIAL, MID)),
    "have_metrics_improved": (MID,),
    "on_save_checkpoint": (MID,),
    "on_training_epoch_end": (MID,),
    "on_training_end": (LAST,),
    "on_fit_end": (LAST,),
    "teardown": (LAST,),
}
"""The events of a fit with validation that a plugin or the model hears, and when in it."""

UNHEARD = {
    "prepare_data": "only the data module hears it",
    "setup": "there is no context yet",
    "on_exception": "the run has failed already",
}
"""The other events of a fit."""

_BEFORE_WINDOW_ENDS = _PER_BATCH[: _PER_BATCH.index("on_before_zero_grad")]
_ENDING_EPOCHS = ("on_training_step_start", "on_training_batch_start")
KINDS = (
    REQUEST_CHECKPOINT,
    REQUEST_STOP,
    INTERRUPT,
    SIGNAL,
    SKIP_STEP,
    STOP_ITERATION,
    FAILED_SAVE,
    FAILED_WRITE,
    FAILED_WRITE_CONTINUED,
    OVERFLOW,
    EARLY_STOP,
    IMPROVEMENT,
    POLL,
)
TRAININGS = [
    (unit, accumulation, num_replicas)
    for unit in ("iteration", "epoch")
    for accumulation in (1, 2)
    for num_replicas in (1, 2, 3)
    if num_replicas < 3 or (unit, accumulation) in (("iteration", 1), ("epoch", 2))
]
"""Unit, accumulation and number of replicas."""


def _places_of(kind: str) -> Iterator[tuple[str, str, int]]:
    """Yield event, moment and number of each decision of a kind."""
    if kind in (EARLY_STOP, IMPROVEMENT):
        yield from (("have_metrics_improved", START, number) for number in (1, 2))
    elif kind == POLL:
        yield from (("should_training_stop", START, number) for number in range(1, 11))
    elif kind in (FAILED_WRITE, FAILED_WRITE_CONTINUED):
        yield "on_save_checkpoint", MID, 0
    elif kind == OVERFLOW:
        for event in ("train_step", "on_backward_end"):
            yield from ((event, moment, 0) for moment in (MID, END))
    else:
        for event, moments in _MOMENTS.items():
            yield from ((event, moment, 0) for moment in moments if _has(kind, event, moment))


def _has(kind: str, event: str, moment: str) -> bool:
    if kind == FAILED_SAVE:
        # A save is in flight from the first window's end on.
        return moment in (MID, LATE)
    is_settled = kind == SIGNAL or is_misplaced(kind, event)
    return moment != END or not is_settled


def is_misplaced(kind: str, event: str) -> bool:
    """Return whether a decision is an error in an event, which may hit an open window however."""
    legal = {SKIP_STEP: _BEFORE_WINDOW_ENDS, STOP_ITERATION: _ENDING_EPOCHS}
    return kind in legal and event not in legal[kind]


def _make() -> Iterator[Cell]:
    for kind in KINDS:
        for event, moment, number in _places_of(kind):
            for unit, accumulation, num_replicas in TRAININGS:
                if kind == STOP_ITERATION and is_misplaced(kind, event) and accumulation > 1:
                    continue
                asking = 0 if kind == SIGNAL else None
                yield Cell(kind, event, moment, unit, accumulation, num_replicas, number, asking)


def _choose() -> Iterator[Cell]:
    alike: dict[tuple[str, str, int, bool], list[Cell]] = {}
    for cell in _make():
        alike.setdefault((cell.kind, cell.event, cell.number, cell.is_late), []).append(cell)
    for number, cells in enumerate(alike.values()):
        yield cells[7 * number % len(cells)]


CELLS = list(_choose())

_ASKED_ALONE = (
    "on_training_start",
    "on_training_resume",
    "on_training_epoch_start",
    "on_training_batch_start",
    "on_training_batch_end",
    "on_optimizer_step_start",
    "should_training_stop",
    "on_validation_start",
    "on_validation_end",
    "have_metrics_improved",
    "on_save_checkpoint",
    "on_training_epoch_end",
    "on_training_end",
)


def asked_by_last(cell: Cell, num_processes: int) -> Cell | None:
    """Return a cell in which the last process decides alone; ``None`` where there is none."""
    is_request = cell.kind in (REQUEST_CHECKPOINT, REQUEST_STOP, INTERRUPT)
    is_skip = cell.kind == SKIP_STEP and not is_misplaced(cell.kind, cell.event)
    is_chosen = is_request and cell.event in _ASKED_ALONE and cell.moment != END
    if is_chosen or is_skip or cell.kind in (POLL, IMPROVEMENT, OVERFLOW):
        return cell._replace(asking_rank=num_processes - 1)
    return None


GROUPS = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3))
"""The numbers of replicas and processes."""


def cells_of(num_replicas: int, num_processes: int) -> list[Cell]:
    """Return the cells of a number of replicas on a number of processes."""
    cells = [cell for cell in CELLS if cell.num_replicas == num_replicas]
    if num_processes > 1:
        alone = (asked_by_last(cell, num_processes) for cell in cells)
        cells += [cell for cell in alone if cell is not None]
    return cells


def heard_events() -> set[str]:
    """Return the events of a fit that a plugin or the model may hear."""
    other = ("testing", "test_step", "predict")
    return {
        event.name
        for event in EVENTS.values()
        if {Receiver.PLUGIN, Receiver.MODEL} & set(event.receivers)
        and not any(part in event.name for part in other)
    }
