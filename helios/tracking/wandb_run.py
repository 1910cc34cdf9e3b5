"""An offline run of Weights & Biases, written in one go from all stored points.

An offline run cannot be continued: a second part with the same id replaces the first one when it is
synchronized. So no parts are written while training runs; the whole run is written from our rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, final

from helios.tracking.targets import Delivery, Rows, WandB
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder

_MILLI = 1e-3

# The process that sends is not the one that trains: what it prints, runs and uses is of no
# interest.
SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
"""Settings of the library."""


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


def write_summary(run: Any, outcome: str, summary: Mapping[str, Any]) -> None:
    """Write the least and greatest value of each name, the best validation, and the outcome."""
    for name, entry in summary["numbers"].items():
        for key in ("min", "max"):
            if key in entry:
                run.summary[f"{name}.{key}"] = float(entry[key])
    best = summary.get("best")
    if best is not None:
        run.summary["best.iteration"] = best["iteration"]
        for name, score in best["scores"].items():
            run.summary[f"best.{name}"] = float(score)
    run.summary["outcome"] = outcome


def add_document(run: Any, path: Path) -> None:
    """Add a copy of a file to a run."""
    copied = Path(run.dir) / path.name
    shutil.copyfile(path, copied)
    run.save(str(copied), base_path=run.dir, policy="now")


@final
class WandBRun:
    """An offline run in the folder ``wandb``, whose id is the run's key.

    Args:
        folder: the folder of the tracker.
        run: which run it is.
        target: the project.
    """

    delivery = Delivery.AT_ONCE

    def __init__(self, folder: TrackerFolder, run: TrackedRun, target: WandB) -> None:
        self._folder = folder
        self._tracked = run
        self._target = target
        self._root = Path(target.folder or folder.path)
        self._earlier: list[Path] = []
        import wandb

        self._library: Any = wandb
        self._run: Any = None

    @property
    def place(self) -> str:
        """The folder of the offline run."""
        return str(Path(self._run.dir).parent)

    def open(self, params: Mapping[str, Any]) -> None:
        """Begin a new offline run."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._earlier = list((self._root / "wandb").glob(f"offline-run-*-{self._tracked.key}*"))
        self._run = self._library.init(
            mode="offline",
            id=self._tracked.key,
            project=self._target.project,
            entity=self._target.entity or None,
            name=self._target.run_name or self._tracked.name,
            dir=str(self._root),
            config=dict(params),
            settings=self._library.Settings(**SETTINGS),
        )

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add options."""
        self._run.config.update(dict(params))

    def channels(self) -> Mapping[str, Callable[[Rows], int]]:
        """Return what writes rows: one record of the history per iteration."""
        return {"points": self._send}

    def _send(self, rows: Rows) -> int:
        for iteration, values in merge(rows):
            for name, value in values.items():
                if isinstance(value, Path):
                    values[name] = self._library.Image(str(self._folder.pictures / value))
            # The library merges what several calls give of one step.
            self._run.log(values, step=iteration)
        return len(rows)

    def confirm(self) -> None:
        """Do nothing: no server is asked."""

    def add_document(self, path: Path) -> None:
        """Add a copy of a file to the run."""
        add_document(self._run, path)

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Write the summary, end the run, and remove what an earlier call has written of it."""
        write_summary(self._run, outcome, summary)
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
        for folder in self._earlier:
            shutil.rmtree(folder)
