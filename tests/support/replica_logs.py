"""Event logs over numbers of replicas and processes: rank 0's, with the calls of replicas marked.

Where logs of several numbers are the same they are told once. Without the calls that come once for
each replica all of them are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

from tests.support.event_logs import (
    LEGEND,
    Call,
    Line,
    ManualLinear,
    Recording,
    ScoringLinear,
    TwoNetworks,
    play,
    render,
)
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "replica_logs"
MOST = 4
PLACES = [(v, p) for p in range(1, MOST + 1) for v in range(p, MOST + 1)]
"""Numbers of replicas and processes, V and P."""

PER_REPLICA = (
    "process_training_batch",
    "on_forward_start",
    "train_step",
    "on_forward_end",
    "on_backward_start",
    "engine.backward_loss",
    "on_backward_end",
    "process_validation_batch",
    "process_testing_batch",
    "valid_step",
    "test_step",
)
_OF_SEVERAL = "# *: once for each replica of the process that has a batch\n"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A call whose logs are compared.

    Attributes:
        needs_processes: whether each replica needs a process of its own.
    """

    title: str
    call: Call
    needs_processes: bool = False

    def places(self) -> list[tuple[int, int]]:
        return [(v, p) for v, p in PLACES if v == p or not self.needs_processes]

    def on(self, num_replicas: int) -> Call:
        """Return the call for a number of replicas; each has as many batches, one of them more.

        Predictions are not shared.
        """
        call = self.call
        options = {**call.options, "num_replicas": num_replicas}
        share = 1 if call.verb == "predict" else num_replicas
        evaluation = call.evaluation * share + 1 if call.evaluation else 0
        training = call.training * num_replicas
        return dataclasses.replace(call, options=options, training=training, evaluation=evaluation)


def _fit(unit: str, **fields: Any) -> Call:
    options = {
        "train_unit": unit,
        "total_steps": 2 if unit == "epoch" else 3,
        "accumulation_steps": 2,
        "valid_frequency": 1 if unit == "epoch" else 2,
        "chkpt_frequency": 1,
        "print_frequency": 2,
    }
    fields = {"options": options, "training": 3, "evaluation": 1, "model": ScoringLinear, **fields}
    return Call(**fields)


SUBJECTS = {
    "fit_by_epochs": Subject("By epochs, three iterations in windows of two.", _fit("epoch")),
    "fit_by_steps": Subject("By steps, three iterations in windows of two.", _fit("iteration")),
    "fit_with_two_loaders": Subject(
        "By epochs, a validation over two loaders.", _fit("epoch", loaders=2)
    ),
    "manual_steps": Subject(
        "By steps, train_step returns None.", _fit("iteration", model=ManualLinear), True
    ),
    "generator_steps": Subject(
        "By steps, a YieldLoop.", _fit("iteration", model=TwoNetworks), True
    ),
    "validate": Subject("trainer.validate.", Call("validate", evaluation=1, model=ScoringLinear)),
    "test": Subject("trainer.test.", Call("test", evaluation=1, model=ScoringLinear)),
    "predict": Subject("trainer.predict.", Call("predict", evaluation=1, model=ScoringLinear)),
}

_Key = tuple[str, int]


def _record(rank: int, num_processes: int, root: Path) -> dict[_Key, list[Line]]:
    found = {}
    for name, subject in SUBJECTS.items():
        for num_replicas, count in subject.places():
            if count == num_processes:
                folder = root / f"{name}-{num_replicas}"
                recording: Recording = play(subject.on(num_replicas), folder)
                found[name, num_replicas] = recording.lines
    return found


@functools.cache
def logs_of(num_processes: int) -> dict[_Key, list[Line]]:
    """Return rank 0's log of each subject on each number of replicas that it carries."""
    with tempfile.TemporaryDirectory() as folder:
        if num_processes == 1:
            return _record(0, 1, Path(folder))
        logs: dict[_Key, list[Line]] = run_ranks(
            _record, num_processes, num_processes, Path(folder), timeout=200
        )[0]
        return logs


def mark(lines: list[Line]) -> str:
    """Return a log as text, with the calls of replicas marked."""
    texts = render(lines).splitlines(keepends=True)
    return "".join(
        f"{'*' if line.name in PER_REPLICA else ' '} {text}"
        for line, text in zip(lines, texts, strict=True)
    )


def sections_of(name: str, places: list[tuple[int, int]]) -> dict[str, str]:
    """Return the logs of a subject by place; ``V=2 P=1`` is one."""
    return {f"V={v} P={p}": mark(logs_of(p)[name, v]) for v, p in places}


def golden_log(name: str) -> str:
    subject = SUBJECTS[name]
    by_log: dict[str, list[str]] = {}
    for place, text in sections_of(name, sorted(subject.places())).items():
        by_log.setdefault(text, []).append(place)
    text = f"# {subject.title}\n{LEGEND}{_OF_SEVERAL}"
    return text + "".join(f"\n## {', '.join(places)}\n{log}" for log, places in by_log.items())


def golden_logs() -> dict[str, str]:
    return {f"{name}.txt": golden_log(name) for name in SUBJECTS}


def parse(text: str) -> dict[str, str]:
    found = {}
    for section in text.split("\n## ")[1:]:
        places, _, log = section.partition("\n")
        found.update(dict.fromkeys(places.split(", "), log.rstrip("\n") + "\n"))
    return found
