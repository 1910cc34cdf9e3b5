"""``Tracker``: what is logged, in MLflow or Weights & Biases, exact over kills.

Training only appends to files. What a server shows of a killed and resumed run is, point for point,
that of an uninterrupted one. With several processes, rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy.typing as npt
import torch

from helios.distributed.collectives import get_global_rank
from helios.errors import ArgumentError, ArgumentTypeError, UsageError
from helios.hooks.events import asks_nothing
from helios.plugins.plugin import PLUGIN_REGISTRY, Plugin, check_folder
from helios.protocols import Clock
from helios.state import TrainingState
from helios.text import as_json
from helios.tracking.point_store import PointStore, as_pixels, store_picture
from helios.tracking.sender_process import SenderProcess, start_sender
from helios.tracking.targets import Delivery, MLflow, Target, WandB, to_plain
from helios.tracking.tracker_folder import TrackedRun, TrackerFolder

_PATIENCE = 60.0
_LIBRARIES: dict[type[Target], str] = {MLflow: "mlflow", WandB: "wandb"}


def _now() -> float:
    return datetime.now(timezone.utc).timestamp()


@PLUGIN_REGISTRY.register
class Tracker(Plugin):
    """Send what is logged to MLflow or Weights & Biases, or write an offline run of the latter.

    A run on the server has every logged number, pictures, hyper-parameters, the options of the
    trainer, and a summary. Another process sends them, so no step waits for a server. Points are
    kept in ``folder`` until they are acknowledged, and a server that does not answer is a warning.
    See ``docs/plugins/trackers.md`` for what is exact.

    Args:
        folder: folder for the points; created if missing, one for each run. A relative path is
            resolved against the current working directory.
        target: the server: ``MLflow(...)`` or ``WandB(...)``.
        params: hyper-parameters, by name: strings, numbers and bools.
        sends: whether to send. If not, points are only stored: send them with ``helios send``, also
            from another machine.
        patience: seconds to wait at the end of a training until everything is sent.
        clock: returns seconds since 1970, for the times of points.
        plug_id: unique id of the plugin; required if there are two trackers.

    Raises:
        ArgumentError: if the folder is a file, or a number is invalid.
        ArgumentTypeError: for a value of the wrong type.
        UsageError: if the library of the target is not installed.
    """

    _internals: ClassVar[str] = (
        "_clock _early _folder _mark _outcome _params _patience _process _sends _since "
        "_store _target"
    )

    def __init__(
        self,
        folder: str | Path,
        target: Target,
        *,
        params: Mapping[str, str | float | bool] | None = None,
        sends: bool = True,
        patience: float = _PATIENCE,
        clock: Clock = _now,
        plug_id: str = "tracker",
    ) -> None:
        super().__init__(plug_id)
        self._folder = check_folder("Tracker", folder, example="runs/tracker")
        self._target = _check_target(target, needs_library=sends)
        self._params = _check_params({} if params is None else params)
        if not isinstance(patience, int | float) or not 0 <= patience < float("inf"):
            raise ArgumentError(
                f"Tracker(patience=...) must be a number of seconds, got {patience!r}. Pass e.g. "
                "60, or 0 to wait for nothing."
            )
        self._sends = sends
        self._patience = patience
        self._clock = clock
        self._mark: dict[str, Any] | None = None
        self._since = ""
        self._outcome = "killed"
        self._store: PointStore | None = None
        self._process: SenderProcess | None = None
        self._early: list[dict[str, Any]] | None = None

    @property
    def folder(self) -> Path:
        """Absolute path of the folder."""
        return self._folder

    def setup(self) -> None:
        """Forget an earlier run; no file is changed yet."""
        self._mark = None
        self._outcome = "killed"
        self._early = [] if get_global_rank() == 0 else None
        self._since = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def on_fit_start(self) -> None:
        """Open the stored points, where a checkpoint has them, and begin to send."""
        waiting, self._early = self._early, None
        if waiting is None or self.context.is_replay:
            return
        folder = TrackerFolder(self._folder)
        run_folder = self.context.run_folder
        run = TrackedRun(
            key="",
            name=self.context.model.save_name,
            target=to_plain(self._target),
            params=self._params,
            created=self._now(),
            run_folder="" if run_folder is None else str(run_folder.absolute()),
            since=self._since,
        )
        forks = self._mark is None or self.context.went_back
        store = PointStore(folder, run, forks=forks)
        store.open(self._mark)
        self._store = store
        self._start_sender()
        for row in waiting:
            self._add(row)

    def _start_sender(self) -> None:
        if self._sends and self._target.delivery is not Delivery.AT_ONCE:
            self._process = start_sender(TrackerFolder(self._folder))

    @asks_nothing
    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Store the numbers."""
        values = {name: as_json(value) for name, value in scalars.items()}
        self._add(self._place(state) | {"values": values})

    def add_image(
        self,
        name: str,
        image: torch.Tensor | npt.NDArray[Any],
        dataformats: Literal["CHW", "HWC", "HW"] = "CHW",
    ) -> None:
        """Store a picture for the current iteration; does nothing outside of training.

        Args:
            name: name of the picture, which may occur once an iteration.
            image: floats in [0, 1] or bytes, with 1, 3 or 4 channels.
            dataformats: what the axes are: channels, height and width.

        Raises:
            UsageError: for another shape, or other values.
        """
        pixels = as_pixels(name, image, dataformats)
        if self._store is None or self.context.is_sanity_check:
            return
        file = store_picture(self._store.folder.pictures, pixels)
        self._add(self._place(self.context.state) | {"picture": name, "file": file})

    def _now(self) -> int:
        return round(self._clock() * 1000)

    def _place(self, state: TrainingState) -> dict[str, Any]:
        return {
            "time": self._now(),
            "epoch": state.global_epoch,
            "iteration": state.global_iteration,
        }

    def _add(self, row: dict[str, Any]) -> None:
        if self._store is not None:
            self._restart_if(has_forked=self._store.add(row))
        elif self._early is not None:
            # Logged before this plugin's on_fit_start: kept until the points are open.
            self._early.append(row)

    def _restart_if(self, *, has_forked: bool) -> None:
        if has_forked and self._process is not None:
            self._process.stop()
            self._process = None
            self._start_sender()

    def on_training_end(self) -> None:
        """Note that the run is finished."""
        self._outcome = "finished"
        if self._store is not None:
            self._restart_if(has_forked=self._store.end())

    def on_exception(self, exception: BaseException) -> None:
        """Note that the run has failed, unless the user ended it."""
        self._outcome = "killed" if isinstance(exception, KeyboardInterrupt) else "failed"

    def teardown(self) -> None:
        """Wait until everything is sent, as long as ``patience`` says."""
        self._early = None
        store, self._store = self._store, None
        process, self._process = self._process, None
        if store is None:
            return
        store.close(self._outcome)
        if self._sends and process is None:
            process = start_sender(store.folder)
        if process is not None:
            process.finish(self._outcome, self._patience)

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the points, once all of them are on the disk."""
        return {"mark": self._mark if self._store is None else self._store.mark()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the length of the points."""
        self._mark = state_dict["mark"]


def _check_target(target: object, *, needs_library: bool) -> Target:
    if not isinstance(target, MLflow | WandB):
        raise ArgumentTypeError(
            f"Tracker(target=...) must be MLflow(...) or WandB(...), got {target!r}. Pass e.g. "
            'MLflow("http://localhost:5000").'
        )
    library = _LIBRARIES[type(target)]
    if needs_library and find_spec(library) is None:
        raise UsageError(
            f"Tracker(target={type(target).__name__}(...)) needs the library {library}, which is "
            f'not installed. Run: pip install "helios-trainer[{library}]". Or pass sends=False, '
            "and send the points later from a machine that has it."
        )
    return target


def _check_params(params: object) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise ArgumentTypeError(
            f"Tracker(params=...) must be a mapping, got {params!r}. Pass e.g. {{'lr': 0.1}}."
        )
    for name, value in params.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise ArgumentTypeError(
                "Tracker(params=...) must map names to strings, numbers and bools, got "
                f"{name!r}: {value!r}. Convert it, e.g. with str()."
            )
    return {
        name: as_json(value) if isinstance(value, float) else value
        for name, value in params.items()
    }
