"""``WandbLogger`` and ``MlflowLogger``: what is logged, on a server.

A line of ``run.jsonl`` names the run on the server, from the first start on. A resumed run repeats
the points after its checkpoint, with the same values: a start asks what the server has, and leaves
that out. What the server may not have yet is in the checkpoint. With several processes, rank 0
sends.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from helios.core.loss_means import as_numbers
from helios.distributed.collectives import get_global_rank
from helios.errors import UsageError
from helios.hooks.events import asks_nothing
from helios.ledger.line import hash_of
from helios.ledger.run_file import START, RunFile, read_run_file
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin
from helios.state import TrainingState

_LOGGER = logging.getLogger(__name__)
_EVENT = "logger"
_OPTIONS, _SEED = "options.", "options.random_seed"
_FINISHED, _FAILED, _KILLED = "FINISHED", "FAILED", "KILLED"

Row = dict[str, Any]
"""What was logged at an iteration: numbers by name, with ``iteration`` and ``epoch``."""


class ServerLogger(Plugin):
    """Base of the loggers that send to a server.

    Args:
        plug_id: unique id of the plugin.

    Raises:
        UsageError: if the library is not installed.
    """

    _library: ClassVar[str]
    _internals: ClassVar[str] = (
        "_folder _has_changed _has_tested _has_warned _is_open _is_writing _line _outcome _params "
        "_row _run_name _start _waiting"
    )

    def __init__(self, plug_id: str) -> None:
        super().__init__(plug_id)
        if find_spec(self._library) is None:
            raise UsageError(
                f"{type(self).__name__} needs {self._library}, which is not installed. Run: "
                f'pip install "helios-trainer[{self._library}]"'
            )
        self.setup()

    def setup(self) -> None:
        """Forget an earlier run."""
        self._folder: Path | None = None
        self._row: Row = {}
        # Complete rows that the server may not have, each with its time in milliseconds.
        self._waiting: list[tuple[int, Row]] = []
        self._line: dict[str, Any] = {}
        self._params: dict[str, Any] = {}
        self._run_name, self._outcome, self._start = "", _KILLED, 0
        self._has_changed = self._has_tested = self._has_warned = self._is_open = False
        self._is_writing = get_global_rank() == 0

    def on_fit_start(self) -> None:
        """Find the run on the server, or begin one."""
        self._is_writing = self._is_writing and not self.context.is_replay
        if not self._is_writing:
            return
        self._find_line()
        self._start = self.context.state.global_iteration
        self._has_changed = self.context.has_changed
        # Without a checkpoint, the folder may have been another run's. Most options are free.
        names = [name for name in self._params if name == _SEED or not name.startswith(_OPTIONS)]
        digest = hash_of({name: self._params[name] for name in names})
        if not self._line or (self._start == 0 and self._line["params"] != digest):
            self._write_line(run_id=uuid.uuid4().hex, params=digest, shift=0)
        self._open()
        self._is_open = True

    def _find_line(self) -> None:
        """Read the newest line of this logger in ``run.jsonl``, and what the run was given."""
        self._folder, self._run_name = self.context.run_folder, self.context.model.save_name
        for event in () if self._folder is None else read_run_file(self._folder):
            if event["event"] == START:
                options = {f"{_OPTIONS}{name}": value for name, value in event["options"].items()}
                self._params = event["params"] | event["given"] | options
            elif event["event"] == _EVENT and event.get("plugin") == self.plug_id:
                self._line = {name: event[name] for name in ("run_id", "params", "shift")}

    def _write_line(self, **changed: Any) -> None:
        self._line |= changed
        if self._folder is not None:
            RunFile(self._folder).add(_EVENT, plugin=self.plug_id, **self._line)

    @abstractmethod
    def _open(self) -> None:
        """Prepare to send."""

    @abstractmethod
    def _send(self, row: Row) -> None:
        """Send a row that waits, unless the server has it."""

    @abstractmethod
    def _send_scores(self, scores: Mapping[str, float]) -> None:
        """Send the scores of a test."""

    @abstractmethod
    def _close(self) -> None:
        """Send the rest, and end the run on the server."""

    def _begins_course(self, row: Row, last: int, stored: Mapping[str, float]) -> bool:
        """Whether this start computes other points than the server has, from this row on.

        Args:
            row: what was logged.
            last: the last iteration that the server has.
            stored: what it has of this one, as far as that is known.
        """
        if not self._start < row["iteration"] <= last:
            return False
        # Without a checkpoint, the code may be another.
        is_other = self._start == 0 and any(
            repr(float(value)) != repr(float(row.get(name, value)))
            for name, value in stored.items()
        )
        if not self._has_changed and not is_other:
            return False
        self._has_changed = False
        _LOGGER.warning(
            "%s: this start may compute other points than the last one, so they are logged again "
            "from step %d on.",
            self.plug_id,
            row["iteration"],
        )
        return True

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Turn errors of the library into one warning."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "%s: the server cannot be reached (%s). The run continues; points are sent "
                    "when the server answers again, at the next start at the latest.",
                    self.plug_id,
                    f"{type(error).__name__}: {error}".partition("\n")[0],
                )

    @asks_nothing
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Add numbers to the row of the iteration, which is sent when it is complete."""
        if self._is_writing:
            if self._is_open and self._row.get("iteration") != state.global_iteration:
                self._commit()
            places = {"iteration": state.global_iteration, "epoch": state.global_epoch}
            self._row = {**self._row, **scalars, **places}

    def _commit(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._add(row)

    def _add(self, row: Row) -> None:
        self._waiting.append((time.time_ns() // 1_000_000, row))
        with self._surviving():
            self._send(row)

    def on_training_end(self) -> None:
        """Note that the run is finished."""
        self._outcome = _FINISHED

    def on_testing_end(self) -> None:
        """Note that there are scores; the model may still complete them."""
        self._has_tested = self._is_writing

    def on_exception(self, exception: BaseException) -> None:
        """Note that the run has failed, unless the user ended it."""
        self._outcome = _KILLED if isinstance(exception, KeyboardInterrupt) else _FAILED

    def teardown(self) -> None:
        """Send what is left, or the scores of a test, and end the run on the server."""
        with self._surviving():
            if self._is_open:
                self._commit()
                self._close()
            elif self._has_tested and self._outcome != _FAILED:
                self._find_line()
                scores = as_numbers(self.context.model.test_scores)
                if self._line and scores:
                    self._start, self._outcome = self.context.state.global_iteration, _FINISHED
                    self._send_scores({f"test/{name}": value for name, value in scores.items()})
        self.setup()

    def state_dict(self) -> dict[str, Any]:
        """Return what was logged and the server may not have."""
        return {"row": self._row, "waiting": [list(pair) for pair in self._waiting]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was logged and the server may not have."""
        self._row = dict(state_dict["row"])
        self._waiting = [(when, row) for when, row in state_dict["waiting"]]


_EXIT_CODES = {_FINISHED: 0, _FAILED: 1, _KILLED: 255}
_TIMEOUTS = {"init_timeout": 20.0, "finish_timeout": 30.0}
_SETTLING_SECONDS, _PAUSE = 30.0, 0.1
# The library writes what it has to its file every 15 seconds; a kill loses the rest.
_UNSAFE_MILLISECONDS = 60_000
_BLOCK, _HEAD = 1 << 15, 7
_FIRST_OR_WHOLE, _LAST_OR_WHOLE = (1, 2), (1, 4)


@PLUGIN_REGISTRY.register
class WandbLogger(ServerLogger):
    """Log to Weights & Biases what TensorBoard gets; exact over kills.

    Each iteration with numbers is a line of the run's history. The library sends in a process of
    its own. See ``docs/plugins/trackers.md``.

    Args:
        project: name of the project.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.
        options: other arguments of ``wandb.init``, such as ``name`` (by default ``save_name`` of
            the model), ``mode="offline"``, ``entity``, ``group`` and ``tags``; ``dir``, the folder
            for the library's files: by default that of the run; ``settings``, a dict.

    Raises:
        UsageError: if the library is not installed.
    """

    _library: ClassVar[str] = "wandb"
    _internals: ClassVar[str] = "_last _options _run _stored"

    def __init__(self, project: str, *, plug_id: str = "wandb", **options: Any) -> None:
        super().__init__(plug_id)
        self._options = options | {"project": project}

    def setup(self) -> None:
        """Forget an earlier run."""
        super().setup()
        self._run: Any = None
        self._last = -1
        self._stored: dict[int, Row] = {}

    def _open(self) -> None:
        import wandb

        self._stored = self._read_files()
        self._last = max(self._stored, default=-1)
        try:
            self._run = self._begin()
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError):
            raise
        except Exception as error:
            with self._surviving():
                raise error
            # Otherwise the library says that the run is in use.
            wandb.teardown()
            self._run = self._begin(mode="offline")
        self._run.define_metric("*", step_metric="iteration")
        if not self._run.offline:
            sent = self._run.starting_step - 1
            for step in sorted(step for step in self._stored if step > sent):
                # An earlier start has logged it, and could not send it.
                self._run.log(self._stored[step], step=step, commit=True)
            self._last = max(sent, self._last)
        waiting, self._waiting = self._waiting, []
        for _, row in waiting:
            self._add(row)

    def _begin(self, **changed: Any) -> Any:
        import wandb

        options = {"dir": self._folder, "name": self._run_name} | self._options | changed
        options["settings"] = _TIMEOUTS | dict(options.get("settings", {}))
        options["config"] = self._params | options.get("config", {})
        fixed = {"id": self._line["run_id"], "resume": "allow", "allow_val_change": True}
        return wandb.init(**(options | fixed))

    def _read_files(self) -> dict[int, Row]:
        """Return the lines, by step, that earlier starts have left on the disk."""
        folder, key = self._options.get("dir", self._folder), self._line["run_id"]
        paths = sorted(Path(folder).glob(f"*wandb/*run-*-{key}*/*.wandb")) if folder else []
        # The process of a killed start still writes what it was given.
        end = time.monotonic() + _SETTLING_SECONDS
        while any(map(_is_in_use, paths)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return {step: row for path in paths for step, row in _read_history(path.read_bytes())}

    def _send(self, row: Row) -> None:
        step = row["iteration"] + self._line["shift"]
        last = self._last - self._line["shift"]
        if self._begins_course(row, last, self._stored.get(step, {})):
            self._write_line(shift=self._last + 1 - row["iteration"])
            step = self._last + 1
        if step > self._last:
            self._run.log(row, step=step, commit=True)
            self._last = step
        newest, _ = self._waiting[-1]
        while self._waiting[0][0] < newest - _UNSAFE_MILLISECONDS:
            del self._waiting[0]

    def _send_scores(self, scores: Mapping[str, float]) -> None:
        self._open()
        self._run.summary.update(scores)
        self._close()

    def _close(self) -> None:
        self._run.finish(exit_code=_EXIT_CODES[self._outcome])


def _is_in_use(path: Path) -> bool:
    """Whether a process has a file open; not known on systems without ``/proc``."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(link.samefile(path) for link in folder.iterdir() if link.exists()):
                return True
    return False


def _read_history(data: bytes) -> Iterator[tuple[int, Row]]:
    """Yield step and line of the history in a file of the library; a kill may have cut it off."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    # Its classes are made when it is imported, where no type checker sees them.
    made: Any = wandb_internal_pb2
    with suppress(struct.error, DecodeError):
        for text in _read_records(data):
            items = made.Record.FromString(text).history.item
            row = {x.key or ".".join(x.nested_key): json.loads(x.value_json) for x in items}
            if row:
                row.pop("_runtime", None)
                yield row.pop("_step"), row


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log: blocks of 32 KiB, with parts that are first, middle or last."""
    position, record = _HEAD, b""
    while position < len(data):
        rest = _BLOCK - position % _BLOCK
        if rest < _HEAD:
            position += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + _HEAD : position + _HEAD + length]
        position += _HEAD + length
        record = part if kind in _FIRST_OR_WHOLE else record + part
        if kind in _LAST_OR_WHOLE:
            yield record


_TAG = "helios.run"
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
# Limits of a request, of a name and of a parameter's value.
_MAX_ROWS, _MAX_POINTS, _MAX_PARAMS, _MAX_NAME, _MAX_VALUE = 100, 1000, 100, 250, 500
_PATIENCE, _RETRY_SECONDS = 10.0, 30.0


@PLUGIN_REGISTRY.register
class MlflowLogger(ServerLogger):
    """Log to MLflow what TensorBoard gets; exact over kills.

    The step of a point is ``global_iteration``. A thread sends what has gathered, so no step waits
    for the server. See ``docs/plugins/trackers.md``.

    Args:
        experiment: name of the experiment; created if missing.
        tracking_uri: address of the server; by default what ``MLFLOW_TRACKING_URI`` says.
        run_name: name of the run; by default ``save_name`` of the model.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.

    Raises:
        UsageError: if the library is not installed.
    """

    _library: ClassVar[str] = "mlflow"
    _internals: ClassVar[str] = (
        "_client _experiment _id _is_found _name _newest _next_try _stored _thread _uri _will_end"
    )

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        plug_id: str = "mlflow",
    ) -> None:
        super().__init__(plug_id)
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name

    def setup(self) -> None:
        """Forget an earlier run."""
        super().setup()
        self._stored: dict[int, dict[str, float]] = {}
        self._is_found = self._will_end = False
        self._newest, self._next_try = 0, 0.0
        self._thread: threading.Thread | None = None

    def _open(self) -> None:
        # Not in the thread, while this one starts processes.
        import mlflow.entities  # noqa: F401

        self._start_thread()

    def _send(self, row: Row) -> None:
        self._start_thread()

    def _start_thread(self) -> threading.Thread:
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._thread is None or (not is_busy and time.monotonic() >= self._next_try):
            self._thread = threading.Thread(target=self._deliver, daemon=True)
            self._thread.start()
        return self._thread

    def _deliver(self) -> None:
        with self._surviving():
            try:
                self._send_all()
                self._next_try = 0.0
            except Exception:
                self._next_try = time.monotonic() + _RETRY_SECONDS
                raise

    def _send_all(self) -> None:
        if not self._is_found:
            self._find_run()
            self._is_found = True
        while self._waiting:
            pairs = self._waiting[:_MAX_ROWS]
            points = [point for when, row in pairs for point in self._make_points(when, row)]
            self._log("metrics", points, _MAX_POINTS)
            del self._waiting[: len(pairs)]
        if self._will_end:
            self._client.set_terminated(self._id, self._outcome)

    def _log(self, kind: str, entries: list[Any], most: int) -> None:
        for start in range(0, len(entries), most):
            part = {kind: entries[start : start + most]}
            self._client.log_batch(self._id, synchronous=True, **part)

    def _find_run(self) -> None:
        """Find the run by its tag, or create it; and ask what it has."""
        from mlflow import MlflowClient, entities

        self._client = client = MlflowClient(self._uri)
        key, known = self._line["run_id"], client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment)
        found = client.search_runs([experiment], f"tags.`{_TAG}` = '{key}'", max_results=1)
        name = self._name or self._run_name
        run = found[0] if found else client.create_run(experiment, tags={_TAG: key}, run_name=name)
        self._id = run.info.run_id
        client.update_run(self._id, status="RUNNING")
        # MLflow changes no parameters.
        texts = {_clean(name): str(value)[:_MAX_VALUE] for name, value in self._params.items()}
        new = [entities.Param(*pair) for pair in texts.items() if pair[0] not in run.data.params]
        self._log("params", new, _MAX_PARAMS)
        # Only points that may be repeated, and that are no earlier course's.
        since = min([self._start, *(row["iteration"] for _, row in self._waiting)])
        for name in run.data.metrics:
            for point in client.get_metric_history(self._id, name):
                self._newest = max(self._newest, point.timestamp)
                if point.step >= since and point.timestamp >= self._line["shift"]:
                    self._stored.setdefault(point.step, {})[name] = point.value

    def _make_points(self, when: int, row: Row) -> Iterator[Any]:
        """Yield the points of a row that the server lacks."""
        from mlflow.entities import Metric

        step, values = row["iteration"], {_clean(name): value for name, value in row.items()}
        stored = self._stored.get(step, {})
        if self._begins_course(values, max(self._stored, default=-1), stored):
            # Later than all points of the last course, whatever the clock says.
            self._write_line(shift=self._newest + 1)
            self._stored, stored = {}, {}
        for name, value in values.items():
            if name != "iteration" and name not in stored:
                yield Metric(name, float(value), max(when, self._line["shift"]), step)

    def _send_scores(self, scores: Mapping[str, float]) -> None:
        self._add({"iteration": self._start, **scores})
        self._close()

    def _close(self) -> None:
        self._will_end, self._next_try = True, 0.0
        self._flush()

    def _flush(self) -> None:
        """Wait until the server has all points, unless it does not answer."""
        if self._thread is None or time.monotonic() < self._next_try:
            return
        # A thread that is at work may have missed the last point.
        for _ in range(2):
            self._start_thread().join(_PATIENCE)
        if self._thread.is_alive():
            self._next_try = float("inf")
            raise TimeoutError(f"no answer for {2 * _PATIENCE:g} seconds")

    def state_dict(self) -> dict[str, Any]:
        """Wait until the server has what was logged; return what it may not have."""
        with self._surviving():
            self._flush()
        return super().state_dict()


def _clean(name: str) -> str:
    """Return a name that MLflow accepts."""
    parts = _FORBIDDEN.sub("_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_MAX_NAME]
