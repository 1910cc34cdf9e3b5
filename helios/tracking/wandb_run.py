"""Runs of Weights & Biases: offline ones, which are written at the end, and online ones."""

from __future__ import annotations

import hashlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, final

from helios.errors import HeliosError, UsageError
from helios.storage.folder_lock import InheritedLock
from helios.tracking.targets import Delivery, Rows, WandB
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder

_MILLI = 1e-3

# The process that sends is not the one that trains: what it prints, runs and uses is of no
# interest.
_SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
_LOCK_NAME = ".helios-wandb-lock"
_ONLINE = {"symlink": False, "init_timeout": 20.0, "x_file_stream_retry_wait_max_seconds": 10.0}
_EXIT_CODES = {"finished": 0, "failed": 1, "killed": 255}
_ASK_EVERY, _LATE_AFTER = 60.0, 300.0
_TIMEOUT, _PATIENCE, _PAUSE = 10, 30.0, 1.0
_PER_PAGE = 1000


def merge(rows: Rows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each iteration with what its rows say, as the library logs it.

    A picture is the name of its file, as ``Path``. If a name occurs twice, the later one stays.
    """
    for iteration, group in groupby(rows, itemgetter("iteration")):
        values: dict[str, Any] = {}
        for row in group:
            values |= {"epoch": row["epoch"], "_timestamp": row["time"] * _MILLI}
            values |= {name: float(value) for name, value in row.get("values", {}).items()}
            if "picture" in row:
                values[row["picture"]] = Path(row["file"])
        yield iteration, values


class _Run(ABC):
    """A run of the library, whose id is the run's key.

    Args:
        folder: the folder of the tracker.
        run: which run it is.
        target: the project.
    """

    def __init__(self, folder: TrackerFolder, run: TrackedRun, target: WandB) -> None:
        import wandb

        self._library: Any = wandb
        self._folder = folder
        self._tracked = run
        self._target = target
        self._root = Path(target.folder or folder.path)
        self._run: Any = None

    def _start(self, params: Mapping[str, Any], settings: Mapping[str, Any], **options: Any) -> Any:
        return self._library.init(
            id=self._tracked.key,
            project=self._target.project,
            entity=self._target.entity or None,
            name=self._target.run_name or self._tracked.name,
            dir=str(self._root),
            config=dict(params),
            settings=self._library.Settings(**_SETTINGS, **settings),
            **options,
        )

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add options."""
        self._run.config.update(dict(params), allow_val_change=True)

    def channels(self) -> Mapping[str, Callable[[Rows], int]]:
        """Return what takes rows: one line of the history per iteration."""
        return {"points": self._send}

    @abstractmethod
    def _send(self, rows: Rows) -> int:
        """Log rows; returns how many the run did not have."""

    def _open_picture(self, file: Path) -> Any:
        return self._library.Image(str(self._folder.pictures / file))

    def add_document(self, path: Path) -> None:
        """Add a copy of a file, in place of an earlier one of its name."""
        copied = Path(self._run.dir) / path.name
        shutil.copyfile(path, copied)
        self._run.save(str(copied), base_path=self._run.dir, policy="now")

    def _end(self, outcome: str, summary: Mapping[str, Any], exit_code: int) -> None:
        """Write the summary and the outcome, and end the run."""
        for name, entry in summary["numbers"].items():
            for key in ("min", "max"):
                if key in entry:
                    self._run.summary[f"{name}.{key}"] = float(entry[key])
        best = summary.get("best")
        if best is not None:
            self._run.summary["best.iteration"] = best["iteration"]
            for name, score in best["scores"].items():
                self._run.summary[f"best.{name}"] = float(score)
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=exit_code)


@final
class WandBRun(_Run):
    """An offline run in the folder ``wandb``.

    It cannot be continued: a second part with the same id replaces the first one when it is
    synchronized. So no parts are written while training runs, but all of it from our rows.
    """

    delivery = Delivery.AT_ONCE

    @property
    def place(self) -> str:
        """The folder of the offline run."""
        return str(Path(self._run.dir).parent)

    def open(self, params: Mapping[str, Any]) -> None:
        """Begin a new offline run."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._earlier = list((self._root / "wandb").glob(f"offline-run-*-{self._tracked.key}*"))
        self._run = self._start(params, {}, mode="offline")

    def _send(self, rows: Rows) -> int:
        for iteration, values in merge(rows):
            for name, value in values.items():
                if isinstance(value, Path):
                    values[name] = self._open_picture(value)
            # The library merges what several calls give of one step.
            self._run.log(values, step=iteration)
        return len(rows)

    def confirm(self) -> None:
        """Do nothing: no server is asked."""

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Write the summary, end the run, and remove what an earlier call has written of it."""
        self._end(outcome, summary, 0 if outcome == "finished" else 1)
        for folder in self._earlier:
            shutil.rmtree(folder)


@final
class WandBOnlineRun(_Run):
    """A run on a server, which continues from where the server says it stands.

    The library sends in a process of its own, so no note of ours can say what has arrived. Each
    start asks the server, and sends all later iterations. The history has one line for each
    iteration, so a line of a sender that was killed, which arrives late, is equal to the line that
    replaces it.
    """

    delivery = Delivery.CONTINUED

    def __init__(self, folder: TrackerFolder, run: TrackedRun, target: WandB) -> None:
        super().__init__(folder, run, target)
        # It is kept by the process of the library, too, which lives on for a moment.
        self._lock = InheritedLock(folder.path / _LOCK_NAME)
        self._first = 0
        self._last: int | None = None
        self._stored: set[str] | None = None
        self._pictures: set[str] = set()
        self._expected = -1
        self._asked = self._confirmed = 0.0

    @property
    def place(self) -> str:
        """The address of the run."""
        return str(self._run.url)

    def open(self, params: Mapping[str, Any]) -> None:
        """Resume the run, or create it.

        Raises:
            FolderInUseError: while the library's process of an earlier sender is running.
            UsageError: without credentials.
            Exception: if the server cannot be reached.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._remove_files()
        errors = self._library.errors
        try:
            with self._lock.lent():
                self._run = self._start(params, _ONLINE, mode="online", resume="allow")
        except (errors.UsageError, errors.AuthenticationError) as error:
            self._close()
            raise UsageError(
                f"W&B cannot log in: {error} Set WANDB_API_KEY, or run: wandb login"
            ) from error
        except BaseException:
            self._close()
            raise
        # Not `step`, which begins at 0 in a process that has logged nothing.
        self._first = self._run.starting_step
        self._asked = self._confirmed = time.monotonic()

    def _close(self) -> None:
        # Without it, a second attempt finds that the run is in use.
        self._library.teardown()
        self._lock.release()

    def _remove_files(self) -> None:
        """Remove what the library writes beside our rows; ``wandb sync`` would send it twice."""
        for folder in (self._root / "wandb").glob(f"run-*-{self._tracked.key}"):
            shutil.rmtree(folder)

    def _send(self, rows: Rows) -> int:
        for iteration, values in merge(rows):
            images = {
                name: self._open_picture(value)
                for name, value in values.items()
                if isinstance(value, Path) and self._is_missing(name, iteration, value)
            }
            if iteration >= self._first:
                self._run.log(values | images, step=iteration, commit=True)
                self._last = iteration
            for name, image in images.items():
                if iteration < self._first:
                    # The sender was killed after it had sent the line, and before the picture.
                    image.bind_to_run(self._run, name, iteration)
                self._pictures.add(image.to_json(self._run)["path"])
        return sum(row["iteration"] >= self._first for row in rows)

    def _is_missing(self, name: str, iteration: int, file: Path) -> bool:
        """Whether the server lacks a picture."""
        if iteration >= self._first:
            return True
        if self._stored is None:
            self._stored = self._list()
        # As the library names it. With another name, the picture would be sent again.
        digest = hashlib.sha256((self._folder.pictures / file).read_bytes()).hexdigest()[:20]
        return f"media/images/{name}_{iteration}_{digest}.png" not in self._stored

    def _find(self) -> Any:
        return self._library.Api(timeout=_TIMEOUT).run(self._run.path)

    def _list(self) -> set[str]:
        return {file.name for file in self._find().files(per_page=_PER_PAGE) if file.size}

    def confirm(self) -> None:
        """Ask the server every minute whether it has what the library was given.

        Raises:
            HeliosError: if it has not for minutes.
            Exception: if it cannot be reached.
        """
        now = time.monotonic()
        if self._last is None or now < self._asked + _ASK_EVERY:
            return
        self._asked = now
        if self._find().lastHistoryStep >= self._expected:
            self._confirmed, self._expected = now, self._last
        elif now > self._confirmed + _LATE_AFTER:
            raise HeliosError(f"W&B has not received iteration {self._expected} for minutes")

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Write the summary, end the run, and check that the server has all of it."""
        self._end(outcome, summary, _EXIT_CODES[outcome])
        self._check()
        self._close()
        self._remove_files()

    def _check(self) -> None:
        end = time.monotonic() + _PATIENCE
        while not self._has_all():
            if time.monotonic() > end:
                raise HeliosError(
                    f"W&B has not received all up to iteration {self._last}, or not all pictures"
                )
            time.sleep(_PAUSE)

    def _has_all(self) -> bool:
        has_rows = self._last is None or self._find().lastHistoryStep >= self._last
        return has_rows and (not self._pictures or self._pictures <= self._list())
