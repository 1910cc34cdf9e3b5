"""Files of runs that nobody has trained: as long as a test wants them, in little time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helios.best import BestRule, BestSoFar, Validation
from helios.ledger import book, run_file
from helios.ledger.line import VERSION, seal, write_float
from helios.text import json_value


def write_ledger(folder: Path, losses: Sequence[float], *, names: Sequence[str] = ("loss",)) -> str:
    """Write a ledger with these losses, and return the hash of its last line."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"ledger": VERSION, "run": "00", "every": 1000, "after": 0}
    data, chain = seal(json.dumps(head, separators=(",", ":"))[:-1], "")
    rate = write_float(0.001)
    with (folder / book.FILE_NAME).open("wb") as handle:
        handle.write(data)
        for number, loss in enumerate(losses, 1):
            digits = write_float(loss)
            parts = ",".join(f'{json.dumps(name)}:"{digits}"' for name in names)
            body = (
                f'{{"at":[1,{number},{number}],"data":["0123456789abcdef","0123456789abcdef"],'
                f'"loss":{{{parts}}},"lr":["{rate}"]'
            )
            data, chain = seal(body, chain)
            handle.write(data)
        data, chain = seal(f'{{"at":[1,{len(losses)},{len(losses)}],"end":1', chain)
        handle.write(data)
    return chain


START = {"event": "start", "iteration": 0, "run": "00", "host": "here", "processes": 1}
"""What the event of every start has, besides the command and the level."""


def write_run_file(folder: Path, *events: Mapping[str, Any]) -> None:
    """Write the events of a run; starts are completed."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"time": "2026-01-02T03:04:05+00:00", "command": ["train.py"], "level": "restart"}
    lines = [own | (START if x["event"] == "start" else {}) | dict(x) for x in events]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / run_file.FILE_NAME).write_text(text)


def write_run(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    scores: Mapping[str, Sequence[float]],
    losses: Sequence[float] = (1.0, 0.5),
) -> Path:
    """Write a run with a ledger, one start, and the scores of validations.

    The best one has the smallest of the first scores.
    """
    write_ledger(folder, losses)
    count = max(map(len, scores.values()), default=0)
    events: list[dict[str, Any]] = [{"event": "start", **facts}]
    best = BestSoFar(BestRule(next(iter(scores), ""), "min"))
    for number in range(count):
        event: dict[str, Any] = {"event": "validation", "iteration": number + 1, "step": number + 1}
        event["scores"] = {name: values[number] for name, values in scores.items()}
        best.judge(Validation(number + 1, event["scores"]), has_improved=True)
        events.append({**event, "best": json_value(best.best)})
    write_run_file(folder, *events)
    return folder
