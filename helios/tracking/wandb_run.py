"""An offline run of Weights & Biases, written in one go from all stored points.

An offline run cannot be continued: a second part with the same id replaces the first one when it is
synchronized. So no parts are written while training runs; the whole run is written from our rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from helios.tracking.sender import Rows
from helios.tracking.targets import WandB
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder

_MILLI = 1e-3


@final
class WandBRun:
    """An offline run in the folder ``wandb``, whose id is the run's key.

    Args:
        folder: the folder of the tracker.
        run: which run it is.
        target: the project.
    """

    is_resumable = False

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
        self._earlier = list((self._root / "wandb").glob(f"offline-run-*-{self._tracked.key}"))
        self._run = self._library.init(
            mode="offline",
            id=self._tracked.key,
            project=self._target.project,
            entity=self._target.entity or None,
            name=self._target.run_name or self._tracked.name,
            dir=str(self._root),
            config=dict(params),
            # The process that sends is not the one that trains: what it prints, runs and uses is
            # of no interest.
            settings=self._library.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add options."""
        self._run.config.update(dict(params))

    def channels(self) -> Mapping[str, Callable[[Rows], None]]:
        """Return what writes rows: one record of the history per iteration."""
        return {"points": self._send}

    def _send(self, rows: Rows) -> None:
        for row in rows:
            # The library merges what several calls give of one step.
            self._run.log(self._read(row), step=row["iteration"])

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: float(value) for name, value in row.get("values", {}).items()}
        if "picture" in row:
            values[row["picture"]] = self._library.Image(str(self._folder.pictures / row["file"]))
        return {"epoch": row["epoch"], "_timestamp": row["time"] * _MILLI, **values}

    def add_document(self, path: Path) -> None:
        """Add a copy of a file to the run."""
        copied = Path(self._run.dir) / path.name
        shutil.copyfile(path, copied)
        self._run.save(str(copied), base_path=self._run.dir, policy="now")

    def finish(self, outcome: str, summary: Mapping[str, Any]) -> None:
        """Write the summary, end the run, and remove what an earlier call has written of it."""
        for name, entry in summary["numbers"].items():
            for key in ("min", "max"):
                if key in entry:
                    self._run.summary[f"{name}.{key}"] = float(entry[key])
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
        for folder in self._earlier:
            shutil.rmtree(folder)
