"""Stands in for MLflow's client: what Helios uses of it, with a database instead of a server.

A point is stored once for each run, name, time, step and value, parameters cannot be changed, and
names are checked, as the real server does; ``tests/tracking/test_libraries.py`` holds the two
against each other. While ``<database>.down`` exists, every call fails.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

from . import entities as entities
from . import environment_variables as environment_variables

_GREATEST = sys.float_info.max
_TABLES = """
create table if not exists experiments (name primary key, id);
create table if not exists runs (id primary key, experiment, name, start, status, tags);
create table if not exists points (
    run, name, time, step, value, is_nan, primary key (run, name, time, step, value, is_nan));
create table if not exists params (run, name, value, primary key (run, name));
"""


class MlflowClient:
    def __init__(self, tracking_uri: str) -> None:
        self.path = Path(tracking_uri.removeprefix("sqlite:///"))
        self.down = Path(f"{self.path}.down")

    def _run(self, command: str, *values: object) -> list[tuple]:
        if self.down.exists():
            raise ConnectionError("the server is down")
        with sqlite3.connect(self.path, timeout=60) as base:
            base.executescript(_TABLES)
            found = base.execute(command, values).fetchall()
        base.close()
        return found

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        found = self._run("select id from experiments where name = ?", name)
        return SimpleNamespace(experiment_id=found[0][0]) if found else None

    def create_experiment(self, name: str) -> str:
        self._run("insert into experiments values (?, ?)", name, uuid.uuid4().hex)
        return self.get_experiment_by_name(name).experiment_id

    def create_run(self, experiment_id: str, start_time: int, tags: dict, run_name: str):
        key = uuid.uuid4().hex
        values = (key, experiment_id, run_name, start_time, "RUNNING", json.dumps(tags))
        self._run("insert into runs values (?, ?, ?, ?, ?, ?)", *values)
        return self.get_run(key)

    def get_run(self, run_id: str) -> SimpleNamespace:
        ((name, start, status, tags),) = self._run(
            "select name, start, status, tags from runs where id = ?", run_id
        )
        info = SimpleNamespace(run_id=run_id, run_name=name, start_time=start, status=status)
        params = dict(self._run("select name, value from params where run = ?", run_id))
        return SimpleNamespace(
            info=info, data=SimpleNamespace(params=params, tags=json.loads(tags))
        )

    def search_runs(self, experiment_ids, filter_string="", max_results=1000):
        found = [
            self.get_run(key)
            for (key,) in self._run("select id from runs where experiment = ?", experiment_ids[0])
        ]
        if filter_string:
            name, value = re.fullmatch(r"tags\.`(.*)` = '(.*)'", filter_string).groups()
            found = [run for run in found if run.data.tags.get(name) == value]
        return found[:max_results]

    def update_run(self, run_id: str, status: str) -> None:
        self._run("update runs set status = ? where id = ?", status, run_id)

    set_terminated = update_run

    def log_batch(self, run_id, metrics=(), params=(), synchronous=None) -> None:
        if len(metrics) > 1000 or len(params) > 100:
            raise ValueError("too many at once")
        for each in (*metrics, *params):
            if re.search(r"[^\w\-. :/]", each.key) or each.key != _shortest(each.key):
                raise ValueError(f"invalid name {each.key!r}")
        for each in metrics:
            is_nan = math.isnan(each.value)
            # A database has no NaN, and no infinity; the server loses the sign of zero.
            value = 0.0 if is_nan else max(min(each.value, _GREATEST), -_GREATEST)
            self._run(
                "insert or ignore into points values (?, ?, ?, ?, ?, ?)",
                *(run_id, each.key, each.timestamp, each.step, value + 0.0, is_nan),
            )
        known = self.get_run(run_id).data.params
        for each in params:
            if known.get(each.key, each.value) != each.value:
                raise ValueError(f"{each.key} cannot be changed")
            self._run("insert or ignore into params values (?, ?, ?)", run_id, each.key, each.value)

    def get_metric_history(self, run_id: str, key: str) -> list[entities.Metric]:
        rows = self._run(
            "select value, time, step, is_nan from points where run = ? and name = ?", run_id, key
        )
        return [
            entities.Metric(key, math.nan if is_nan else value, time, step)
            for value, time, step, is_nan in rows
        ]

    def _folder(self, run_id: str) -> Path:
        self.get_run(run_id)
        return self.path.with_suffix(".files") / run_id

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str = "") -> None:
        target = self._folder(run_id) / artifact_path
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(local_path, target)

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        target = self._folder(run_id) / artifact_file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def list_artifacts(self, run_id: str, path: str = "") -> list[SimpleNamespace]:
        root = self._folder(run_id)
        found = (root / path).iterdir() if (root / path).is_dir() else []
        return [
            SimpleNamespace(path=each.relative_to(root).as_posix(), is_dir=each.is_dir())
            for each in sorted(found)
        ]

    def download_artifacts(self, run_id: str, path: str, dst_path: str = "") -> str:
        return str(self._folder(run_id) / path)


def _shortest(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)
