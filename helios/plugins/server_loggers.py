"""``WandbLogger`` and ``MlflowLogger``: send logged numbers to a server.

A line of ``run.jsonl`` names the run on the server, from the first start on. A resumed run repeats
the points after its checkpoint, with the same values: a start asks the server for its points, and
skips those. Points that the server may not have yet are in the checkpoint. With several processes,
rank 0 sends.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from helios.core.utils import import_extra
from helios.counters import Phase, TrainingState
from helios.hooks.events import asks_nothing
from helios.ledger.run_file import ERROR, START, RunFile, read_run_file
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin

_LOGGER = logging.getLogger(__name__)
_EVENT = "logger"
_FINISHED, _FAILED, _KILLED = "FINISHED", "FAILED", "KILLED"

Row = dict[str, Any]
"""The logged numbers of an iteration by name, with ``iteration`` and ``epoch``."""


class ServerLogger(Plugin):
    """Base of the loggers that send to a server.

    Args:
        plug_id: unique id of the plugin.
    """

    _internals: ClassVar[str] = (
        "_folder _has_changed _has_warned _is_open _line _outcome _params _rows _run_name _start"
    )

    def __init__(self, plug_id: str) -> None:
        super().__init__(plug_id)
        self.setup()

    def setup(self) -> None:
        """Discard the state of an earlier run."""
        self._folder: Path | None = None
        self._run_name = self._outcome = ""
        # Time and iteration.
        self._start = (0, 0)
        # What the server may not have, each with its time. The last one may grow.
        self._rows: list[tuple[int, Row]] = []
        self._line: dict[str, Any] = {}
        self._params: dict[str, Any] = {}
        self._has_changed = self._has_warned = self._is_open = False

    def on_fit_start(self) -> None:
        """Find the run on the server, or begin one."""
        context = self.context
        if context.global_rank != 0 or context.is_replay:
            return
        self._folder, self._run_name = context.run_folder, context.model.save_name
        self._start = (time.time_ns(), context.state.global_iteration)
        is_other = self._read_run_file()
        if self._outcome and self._line.get("is_complete", True):
            return
        # Without a checkpoint, nothing else says that the folder has become another run's.
        if not self._line or (context.state.global_iteration == 0 and is_other):
            self._line, self._rows = {"run_id": uuid.uuid4().hex, "shift": 0}, []
        self._write_line(is_complete=False)
        self._has_changed = context.has_changed
        self._is_open = True
        with self._surviving():
            self._open()
            self._send()

    def _read_run_file(self) -> bool:
        """Read this logger's newest line, and what the run was given.

        Returns:
            Whether this start was given other values than the one before it, or that one failed.
        """
        before: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for event in () if self._folder is None else read_run_file(self._folder):
            if event["event"] == START:
                before, given = given, event["definition"] | event["params"] | event["given"]
                options = {f"options.{name}": value for name, value in event["options"].items()}
                self._params = given | options
            elif event["event"] == ERROR:
                # The code may be another after it.
                given = {}
            elif event["event"] == _EVENT and event["plugin"] == self.plug_id:
                self._line = {name: event[name] for name in ("run_id", "shift", "is_complete")}
        return before != given

    def _write_line(self, **changed: Any) -> None:
        self._line |= changed
        if self._folder is not None:
            RunFile(self._folder).add(_EVENT, plugin=self.plug_id, **self._line)

    @abstractmethod
    def _open(self) -> None:
        """Prepare to send."""

    @abstractmethod
    def _send(self, outcome: str = "") -> None:
        """Send all rows but the last, which may grow; with an outcome all, and end the run."""

    def _branches_off(self, last: int) -> bool:
        """Return whether this start logs points again, because they may differ from the server's.

        Args:
            last: the last iteration that the server has.
        """
        _, start = self._start
        if not self._has_changed or last <= start:
            return False
        _LOGGER.warning(
            "%s: the run has changed; it is logged again from step %d on.", self.plug_id, start + 1
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
                    "%s: points could not be sent (%s). The run continues. They are sent when the "
                    "server answers again, or when this command is run again.",
                    self.plug_id,
                    f"{type(error).__name__}: {error}".partition("\n")[0],
                )

    @asks_nothing
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Add numbers to the row of the iteration, which is sent when it is complete."""
        if not self._is_open:
            return
        if not self._rows or self._rows[-1][1]["iteration"] != state.global_iteration:
            places = {"iteration": state.global_iteration, "epoch": state.global_epoch}
            self._rows.append((time.time_ns(), places))
            with self._surviving():
                self._send()
        self._rows[-1][1].update(scalars)

    def on_training_end(self) -> None:
        """Record that the run is finished."""
        self._outcome = _FINISHED

    def on_exception(self, exception: BaseException) -> None:
        """Record that the run has failed, unless the user ended it."""
        self._outcome = _KILLED if isinstance(exception, KeyboardInterrupt) else _FAILED

    def teardown(self) -> None:
        """Send the remaining points, and end the run on the server."""
        is_training = bool(self._rows) and self.context.phase is Phase.TRAINING
        if is_training and not self._is_open and not self._outcome:
            # Nothing is left to train, but the last start may not have reached the server.
            self._outcome = _FINISHED
            self.on_fit_start()
        if self._is_open:
            with self._surviving():
                self._send(self._outcome or _KILLED)
                self._write_line(is_complete=True)
        self.setup()

    def state_dict(self) -> dict[str, Any]:
        """Return the points that the server may not have."""
        return {"rows": [[when, dict(row)] for when, row in [*self._rows]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the points that the server may not have."""
        self._rows = [(when, row) for when, row in state_dict["rows"]]


_EXIT_CODES = {_FINISHED: 0, _FAILED: 1, _KILLED: 255}
_TIMEOUTS = {"init_timeout": 20.0, "finish_timeout": 30.0}
# The library writes what it has to its file every 15 seconds; a kill loses the rest.
_UNSAFE_NANOSECONDS = 60 * 10**9
_BLOCK, _HEAD = 1 << 15, 7
_FIRST_OR_WHOLE, _LAST_OR_WHOLE = (1, 2), (1, 4)


@PLUGIN_REGISTRY.register
class WandbLogger(ServerLogger):
    """Log to Weights & Biases what TensorBoard gets; exact over kills.

    Each iteration with numbers is a line of the run's history. The library sends in its own
    process. See ``docs/logging.md``.

    Args:
        project: name of the project.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.
        options: other arguments of ``wandb.init``, such as ``name`` (by default ``save_name`` of
            the model), ``mode="offline"``, ``entity``, ``group`` and ``tags``; ``dir``, the folder
            for the library's files: by default that of the run; ``settings``, a dict.
    """

    _internals: ClassVar[str] = "_last _options _recent _run"

    def __init__(self, project: str, *, plug_id: str = "wandb", **options: Any) -> None:
        # Says at once that it is not installed.
        import_extra("wandb", "wandb")
        super().__init__(plug_id)
        self._options = options | {"project": project}

    def setup(self) -> None:
        """Discard the state of an earlier run."""
        super().setup()
        self._run: Any = None
        self._last = -1
        # Rows that the library has, and perhaps not yet its file.
        self._recent: list[tuple[int, Row]] = []

    def _open(self) -> None:
        import wandb

        options = {"dir": self._folder, "name": self._run_name} | self._options
        options["settings"] = _TIMEOUTS | dict(options.get("settings", {}))
        options["config"] = self._params | options.get("config", {})
        fixed = {"id": self._line["run_id"], "resume": "allow", "allow_val_change": True}
        self._run = wandb.init(**(options | fixed))
        self._run.define_metric("*", step_metric="iteration")
        is_offline = self._run.offline
        self._last = self._find_last_step() if is_offline else self._run.starting_step - 1
        if self._branches_off(self._last - self._line["shift"]):
            self._write_line(shift=self._last - self._start[1])

    def _find_last_step(self) -> int:
        """Return the last step in the files that earlier starts have left; -1 without any."""
        from wandb.proto import wandb_internal_pb2

        # Its classes are made when it is imported, where no type checker sees them.
        made: Any = wandb_internal_pb2
        folder, last = self._options.get("dir", self._folder), -1
        name = f"*wandb/*run-*-{self._line['run_id']}*/*.wandb"
        for path in Path(folder).glob(name) if folder else ():
            for text in _read_records(path.read_bytes()):
                history = made.Record.FromString(text).history
                last = max(last, history.step.num if history.item else -1)
        return last

    def _send(self, outcome: str = "") -> None:
        if self._run is None:
            raise ConnectionError("it did not answer at the start")
        count = len(self._rows) if outcome else len(self._rows) - 1
        for _, row in self._rows[:count]:
            step = row["iteration"] + self._line["shift"]
            if step > self._last:
                self._run.log(row, step=step, commit=True)
        self._recent += self._rows[:count]
        del self._rows[:count]
        if outcome:
            self._run.finish(exit_code=_EXIT_CODES[outcome])

    def state_dict(self) -> dict[str, Any]:
        """Return the points that the library's file may not have."""
        oldest = time.time_ns() - _UNSAFE_NANOSECONDS
        self._recent = [pair for pair in self._recent if pair[0] > oldest]
        return {"rows": [*map(list, self._recent), *super().state_dict()["rows"]]}


def _read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log: blocks of 32 KiB, with parts that are first, middle or last."""
    record = b""
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        position = 0 if start else _HEAD
        while position + _HEAD <= len(block):
            _, length, kind = struct.unpack_from("<IHB", block, position)
            position += _HEAD + length
            part = block[position - length : position]
            record = part if kind in _FIRST_OR_WHOLE else record + part
            # A kill may have cut it off.
            if kind in _LAST_OR_WHOLE and position <= len(block):
                yield record


_TAG = "helios.run"
_FORBIDDEN = re.compile(r"[^\w\-. :/]|^/|/(?=/|$)", re.ASCII)
# A request takes 1000 points.
_MAX_ROWS, _PATIENCE = 20, 10.0


@PLUGIN_REGISTRY.register
class MlflowLogger(ServerLogger):
    """Log to MLflow what TensorBoard gets; exact over kills.

    The step of a point is ``global_iteration``. A thread sends the points, so no step waits for the
    server. See ``docs/logging.md``.

    Args:
        experiment: name of the experiment; created if missing.
        tracking_uri: address of the server; by default that in ``MLFLOW_TRACKING_URI``.
        run_name: name of the run; by default ``save_name`` of the model.
        plug_id: unique id of the plugin; required if there are two loggers of this kind.
    """

    _internals: ClassVar[str] = "_client _end _experiment _id _last _name _thread _uri"

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        plug_id: str = "mlflow",
    ) -> None:
        # Says at once that it is not installed. Not in the thread, while processes are started.
        import_extra("mlflow", "mlflow")
        super().__init__(plug_id)
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name

    def setup(self) -> None:
        """Discard the state of an earlier run."""
        super().setup()
        self._client: Any = None
        self._id = self._end = ""
        self._last: dict[str, int] | None = None
        self._thread: threading.Thread | None = None

    def _open(self) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)

    def _send(self, outcome: str = "") -> None:
        self._end = outcome
        # A thread that is at work may have missed the end.
        for patience in (_PATIENCE, _PATIENCE) if outcome else (0.0,):
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._deliver, daemon=True)
                self._thread.start()
            self._thread.join(patience)
        if outcome and self._rows:
            raise TimeoutError(f"no answer for {2 * _PATIENCE:g} seconds")

    def _deliver(self) -> None:
        from mlflow.entities import Metric

        with self._surviving():
            if self._last is None:
                self._last = self._find_run()
            while rows := self._rows[: None if self._end else -1][:_MAX_ROWS]:
                points = [
                    Metric(_clean(name), float(value), when // 10**6, row["iteration"])
                    for when, row in rows
                    for name, value in row.items()
                    if name != "iteration" and row["iteration"] > self._last.get(_clean(name), -1)
                ]
                self._client.log_batch(self._id, metrics=points)
                del self._rows[: len(rows)]
            if self._end:
                self._client.set_terminated(self._id, self._end)

    def _find_run(self) -> dict[str, int]:
        """Find the run by its tag, or create it; returns the last step that it has by name."""
        from mlflow.entities import Param

        client, key, name = self._client, self._line["run_id"], self._name or self._run_name
        known = client.get_experiment_by_name(self._experiment)
        place = known.experiment_id if known else client.create_experiment(self._experiment)
        found = client.search_runs([place], f"tags.`{_TAG}` = '{key}'")
        run = found[0] if found else client.create_run(place, tags={_TAG: key}, run_name=name)
        self._id = run.info.run_id
        client.update_run(self._id, status="RUNNING")
        # MLflow changes no parameters.
        given = {_clean(name): str(value) for name, value in self._params.items()}
        new = [Param(*pair) for pair in given.items() if pair[0] not in run.data.params]
        client.log_batch(self._id, params=new)
        last = {}
        for name in run.data.metrics:
            history = client.get_metric_history(self._id, name)
            steps = [point.step for point in history if point.timestamp >= self._line["shift"]]
            last[name] = max(steps, default=-1)
        if self._branches_off(max(last.values(), default=-1)):
            begun, start = self._start
            self._write_line(shift=begun // 10**6)
            last = dict.fromkeys(last, start)
        return last


def _clean(name: str) -> str:
    """Return a name that MLflow accepts."""
    return _FORBIDDEN.sub("_", name)
