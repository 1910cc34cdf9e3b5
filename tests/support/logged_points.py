"""What loggers have sent: read back from MLflow, and from offline files of W&B."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, str]]]
"""By name: iteration and value, in the order of iterations."""


def mlflow_runs(uri: str, experiment: str = "Default") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def mlflow_points(uri: str, experiment: str = "Default") -> Points:
    from mlflow import MlflowClient

    runs = mlflow_runs(uri, experiment)
    if not runs:
        return {}
    (run,) = runs
    histories = {
        name: MlflowClient(uri).get_metric_history(run.info.run_id, name)
        for name in run.data.metrics
    }
    return {
        name: [(each.step, repr(each.value)) for each in sorted(history, key=_place)]
        for name, history in histories.items()
    }


def _place(point: Any) -> tuple[int, int]:
    return point.step, point.timestamp


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the histories of all files of the library in a folder."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.rglob("*.wandb")):
        for text in _read_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            row = {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            found += [row] if row else []
    return found


def points_of(rows: list[dict[str, Any]]) -> Points:
    """Return the points of lines of a history, which must have increasing steps."""
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))
    found: Points = {}
    for row in rows:
        for name in row.keys() - {"_step", "_runtime", "_timestamp", "iteration"}:
            found.setdefault(name, []).append((row["iteration"], repr(float(row[name]))))
    return found


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in blocks of 32 KiB, whose pieces are first, middle or last."""
    block, head, position, record = 1 << 15, 7, 7, b""
    while position + head <= len(data):
        if block - position % block < head:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + head : position + head + length]
        position += head + length
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record
