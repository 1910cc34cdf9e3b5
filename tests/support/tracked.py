"""What servers of trackers show: read back from MLflow, and from offline runs of W&B."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"
LIBRARIES = ("mlflow", "wandb")
Curves = dict[str, list[tuple[int, int, str]]]
"""By name the points: step, time and the value's bits."""


def forget_libraries() -> None:
    """Let the next import find another library of the same name."""
    for name in [each for each in sys.modules if each.partition(".")[0] in LIBRARIES]:
        del sys.modules[name]


@contextmanager
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the stand-ins before the libraries, here and in child processes."""
    forget_libraries()
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS), prepend=":")
    yield
    forget_libraries()


def find_runs(uri: str, experiment: str = "Default") -> list[Any]:
    """Return the runs of an experiment of MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def read_mlflow(uri: str, run_id: str, names: list[str]) -> Curves:
    """Return the points of a run, in the order of steps and times."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return {
        name: sorted(
            (point.step, point.timestamp, float(point.value).hex())
            for point in client.get_metric_history(run_id, name)
        )
        for name in names
    }


def stored_curves(folder: Path) -> Curves:
    """Return the points that a tracker has stored."""
    found: Curves = {}
    for line in (folder / "points.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.get("values", {}).items():
            point = (row["iteration"], row["time"], float(value).hex())
            found.setdefault(name, []).append(point)
    return found


def without_times(curves: Curves) -> dict[str, list[tuple[int, str]]]:
    """Return step and value of each point: times differ from run to run."""
    return {name: [(step, bits) for step, _, bits in each] for name, each in curves.items()}


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """Return the history of an offline run: by step, what was logged."""
    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    if data.startswith(b"{"):
        history: list[dict[str, Any]] = json.loads(data)["history"]
        return history
    from wandb.proto import wandb_internal_pb2

    found = []
    for text in _read_records(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(text)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *path, name = item.nested_key or [item.key]
                place = row
                for part in path:
                    place = place.setdefault(part, {})
                place[name] = json.loads(item.value_json, parse_int=float)
            found.append(row)
    return found


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in blocks of 32 KiB, whose pieces are first, middle or last."""
    block, head, position, record = 1 << 15, 7, 7, b""
    while position < len(data):
        if block - position % block < head:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + head : position + head + length]
        position += head + length
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record


def history_curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, str]]]:
    """Return step and value of each point of an offline run, without what the library adds."""
    found: dict[str, list[tuple[int, str]]] = {}
    for row in history:
        for name, value in row.items():
            if not name.startswith("_") and name != "epoch" and not isinstance(value, dict):
                found.setdefault(name, []).append((row["_step"], float(value).hex()))
    return found
