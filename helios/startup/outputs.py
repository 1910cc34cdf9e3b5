"""Where a run's results go: log, event files, progress bars and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helios.checkpoint import layout
from helios.checkpoint.store import Sidecar
from helios.core import logging as log
from helios.core.progress import Display, create_display
from helios.core.scalars import as_numbers
from helios.model.model import Model
from helios.startup.arguments import Arguments
from helios.startup.resume import Start
from helios.startup.watch import PluginWatch
from helios.state import TrainingState
from helios.version import __version__

_LOGGER = logging.getLogger(__name__)


def open_display(arguments: Arguments) -> Display:
    """Return the progress bars, or what stands in for them."""
    return create_display(arguments.enable_progress_bar)


def _find_again(root: Path | None, stored: str | None) -> Path | None:
    # A run folder that was moved or copied lies under the given root; look there first.
    if stored is None:
        return None
    moved = None if root is None else root / Path(stored).name
    return moved if moved is not None and moved.exists() else Path(stored)


def open_logs(
    arguments: Arguments, name: str, payload: dict[str, Any] | None, *, is_training: bool
) -> None:
    """Open the log file and the event files, or go on with those of a checkpoint (H24).

    Args:
        arguments: the options of the trainer.
        name: the name of the run.
        payload: the checkpoint; ``None`` for new files.
        is_training: whether events behind the checkpoint are cut off: training repeats them.
    """
    stored = payload or {}
    log_path = _find_again(arguments.log_path, stored.get("log_path"))
    run_path = _find_again(arguments.run_path, stored.get("run_path"))
    log.setup_default_loggers(
        name,
        log_root=arguments.log_path if arguments.enable_file_logging and log_path is None else None,
        runs_root=arguments.run_path if arguments.enable_tensorboard and run_path is None else None,
    )
    if payload is not None:
        log.restore_default_loggers(
            log_path=log_path if arguments.enable_file_logging else None,
            run_path=run_path if arguments.enable_tensorboard else None,
            marks=stored.get("events", {}) if is_training else None,
        )


class FitRecorder:
    """Writes the checkpoints and scalars of one training.

    Args:
        arguments: the options of the trainer.
        model: names checkpoints and holds the metrics.
        start: the run's folder and history.
        level: the level of reproducibility that the run reaches.
        options: what defines the run and what ends it.
        machine: what the bits of arithmetic depend on, besides the run.
        watch: looks after plugins at the first checkpoint.
    """

    def __init__(
        self,
        arguments: Arguments,
        model: Model,
        start: Start,
        *,
        level: str,
        options: dict[str, Any],
        machine: dict[str, str],
        watch: PluginWatch,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._start = start
        self._level = level
        self._options = options
        self._machine = machine
        self._watch = watch
        self._newest: Path | None = None if start.loaded is None else start.loaded.path

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._arguments.run_name or self._model.save_name

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of the run; ``None`` before there is one."""
        return self._newest

    def save(self, snapshot: dict[str, Any]) -> None:
        """Write a snapshot as a checkpoint of the run."""
        folder = self._start.folder
        if folder is None:
            return
        self._watch.look()
        state = snapshot["training_state"]
        epoch, iteration = state["global_epoch"], state["global_iteration"]
        payload = {
            "schema": layout.SCHEMA,
            "version": __version__,
            **snapshot,
            "options": self._options,
            "machine": self._machine,
            **self._log_places(),
        }
        stem = layout.stem(self.name, epoch, iteration)
        stem = layout.apply_metadata(stem, self._model.append_metadata_to_chkpt_name(stem))
        self._newest = folder.save(
            payload, stem=stem, sidecar=self._sidecar(epoch, iteration), safe_types=self._types()
        )

    def has_saved(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this iteration is committed."""
        folder = self._start.folder
        return folder is not None and folder.has(state.global_epoch, state.global_iteration)

    def _types(self) -> list[Any]:
        return self._model.types_for_safe_load()

    def _sidecar(self, epoch: int, iteration: int) -> Sidecar:
        return Sidecar(
            run_name=self.name,
            num_replicas=1,
            epoch=epoch,
            iteration=iteration,
            metrics=as_numbers(self._model.metrics),
            level=self._level,
            resumed_from=self._start.origin,
            changes=self._start.changes,
            options=self._options,
        )

    def _log_places(self) -> dict[str, Any]:
        places: dict[str, Any] = {}
        log_file = log.get_root_logger().log_file
        if log_file is not None:
            places["log_path"] = str(log_file)
        writer = log.get_tensorboard_writer()
        if writer is not None:
            places |= {"run_path": str(writer.run_path), "events": writer.mark()}
        return places

    @property
    def logs_scalars(self) -> bool:
        """Whether there are event files."""
        return log.get_tensorboard_writer() is not None

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write numbers into the event files, by name.

        A curve that user code has written at this iteration, as scripts of Helios 1 do, is left.
        """
        writer, step = log.get_tensorboard_writer(), state.global_iteration
        if writer is None:
            return
        for name, value in scalars.items():
            if not writer.has_point(name, step):
                writer.add_scalar(name, value, step)

    def finish(self, reason: str) -> None:
        """Note in the sidecar of the last checkpoint that the run has come to its end."""
        if self._start.folder is not None and self._newest is not None:
            self._start.folder.mark_finished(self._newest, reason)
