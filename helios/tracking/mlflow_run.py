"""A run on a server of MLflow.

MLflow stores a point once for each run, name, step, time and value, so a point that is sent again
with its stored time changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from helios.tracking.targets import Delivery, MLflow, Rows
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder
from helios.version import __version__

_TAG = "helios.run"
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
# Limits of a request, of a name and of a parameter's value.
_MOST_POINTS, _MOST_PARAMS, _LONGEST_NAME, _LONGEST_VALUE = 1000, 100, 250, 500
_OUTCOMES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_RETRIES, _SECONDS = 2, 30


def clean(name: str) -> str:
    """Return a name that MLflow accepts; one that is changed ends with a digest of its own.

    Example:
        >>> clean("train/loss"), clean("loss (%)")
        ('train/loss', 'loss ___-d4b77b72')
    """
    found = _FORBIDDEN.sub("_", name)[:_LONGEST_NAME]
    # MLflow reads names as paths, and refuses those that are not in their shortest form.
    is_path = not name.startswith("/") and not {"", ".", ".."}.intersection(name.split("/"))
    if found == name and is_path:
        return name
    parts = (part for part in found.split("/") if part not in ("", ".", ".."))
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{'/'.join(parts)[: _LONGEST_NAME - 9]}-{digest}"


@final
class MLflowRun:
    """A run on a server of MLflow, which is found by a tag.

    Args:
        folder: the folder of the tracker.
        run: which run it is.
        target: the server.
    """

    delivery = Delivery.ACKNOWLEDGED

    def __init__(self, folder: TrackerFolder, run: TrackedRun, target: MLflow) -> None:
        from mlflow import MlflowClient, entities, environment_variables

        # The sender itself tries again, and says first what is wrong.
        for setting, value in (
            (environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES, _RETRIES),
            (environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT, _SECONDS),
        ):
            if not setting.is_set():
                setting.set(value)
        self._folder = folder
        self._run = run
        self._target = target
        self._client = MlflowClient(target.uri)
        self._make_point, self._make_param = entities.Metric, entities.Param
        self._id = ""

    @property
    def place(self) -> str:
        """The server, and the run's id there."""
        return f"run {self._id} of experiment {self._target.experiment!r} on {self._target.uri}"

    def open(self, params: Mapping[str, Any]) -> None:
        """Find the run by its tag, or create it."""
        client, experiment = self._client, self._find_experiment()
        tag = f"tags.`{_TAG}` = '{self._run.key}'"
        found = client.search_runs([experiment], tag, max_results=1)
        if found:
            self._id = found[0].info.run_id
        else:
            self._id = client.create_run(
                experiment,
                start_time=self._run.created,
                tags={_TAG: self._run.key, "helios.version": __version__},
                run_name=self._target.run_name or self._run.name,
            ).info.run_id
        client.update_run(self._id, status="RUNNING")
        self.add_params(params)

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._target.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._target.experiment))

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add parameters; those that the run has stay as they are."""
        known = self._client.get_run(self._id).data.params
        texts = {clean(name): str(value)[:_LONGEST_VALUE] for name, value in params.items()}
        new = [self._make_param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(new), _MOST_PARAMS):
            part = new[start : start + _MOST_PARAMS]
            self._client.log_batch(self._id, params=part, synchronous=True)

    def channels(self) -> Mapping[str, Callable[[Rows], int]]:
        """Return what sends numbers, and what sends pictures, which another server may store."""
        return {"numbers": self._send_numbers, "pictures": self._send_pictures}

    def _send_numbers(self, rows: Rows) -> int:
        points = [
            self._make_point(clean(name), float(value), row["time"], row["iteration"])
            for row in rows
            for name, value in row.get("values", {}).items()
        ]
        for start in range(0, len(points), _MOST_POINTS):
            part = points[start : start + _MOST_POINTS]
            self._client.log_batch(self._id, metrics=part, synchronous=True)
        return len(rows)

    def confirm(self) -> None:
        """Do nothing: every request is acknowledged."""

    def _send_pictures(self, rows: Rows) -> int:
        for row in rows:
            if "picture" in row:
                folder = f"pictures/{clean(row['picture'])}/{row['iteration']:08d}"
                path = self._folder.pictures / row["file"]
                self._client.log_artifact(self._id, str(path), folder)
        return len(rows)

    def add_document(self, path: Path) -> None:
        """Store a file as an artifact of the run."""
        self._client.log_artifact(self._id, str(path))

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Store the summary as an artifact, and set the status of the run."""
        self._client.log_text(self._id, json.dumps(summary, indent=1), "summary.json")
        self._client.set_terminated(self._id, _OUTCOMES[outcome])
