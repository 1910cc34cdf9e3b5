"""Where a run's results go: log, event files, progress bars and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helios.checkpoint import layout
from helios.checkpoint.store import RunFolder, Sidecar
from helios.core import logging as log
from helios.core.group import has_failed
from helios.core.progress import Display, create_display
from helios.core.scalars import as_numbers
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.model.model import Model
from helios.startup.arguments import Arguments
from helios.startup.banner import machine
from helios.startup.promise import Promise
from helios.startup.resume import Start
from helios.startup.together import on_first
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
        promise: the level of reproducibility that the run reaches.
        engine: the device and the replicas; rank 0 writes.
        options: what defines the run and what ends it.
        watch: looks after plugins at the first checkpoint.
    """

    def __init__(
        self,
        arguments: Arguments,
        model: Model,
        start: Start,
        *,
        promise: Promise,
        engine: Engine,
        options: dict[str, Any],
        watch: PluginWatch,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._start = start
        self._promise = promise
        self._replicas = engine.replicas
        self._options = options
        self._machine = machine(engine)
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
        """Write a snapshot as a checkpoint of the run; all processes wait until it is there.

        Raises:
            UsageError: after a collective has failed: the processes may be at different places.
        """
        folder = self._start.folder
        if folder is None:
            return
        if has_failed():
            raise UsageError(
                "No checkpoint can be saved after a collective has failed, because the processes "
                "no longer agree on where they are. Let the error end this process, and start the "
                "run again: it goes on from the newest checkpoint."
            )
        self._watch.look()
        self._newest = on_first(self._replicas, lambda: self._write(folder, snapshot))

    def _write(self, folder: RunFolder, snapshot: dict[str, Any]) -> Path:
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
        level = self._promise.level_after(snapshot)
        return folder.save(
            payload,
            stem=stem,
            sidecar=self._sidecar(epoch, iteration, level),
            safe_types=self._types(),
        )

    def has_saved(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this iteration is committed; rank 0 looks."""
        folder, replicas = self._start.folder, self._replicas
        if folder is None:
            return False
        is_there = replicas.rank == 0 and folder.has(state.global_epoch, state.global_iteration)
        (is_there,) = replicas.agree(is_there)
        return is_there

    def _types(self) -> list[Any]:
        return self._model.types_for_safe_load()

    def _sidecar(self, epoch: int, iteration: int, level: str) -> Sidecar:
        return Sidecar(
            run_name=self.name,
            num_replicas=self._replicas.num_replicas,
            epoch=epoch,
            iteration=iteration,
            metrics=as_numbers(self._model.metrics),
            level=level,
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
        """Whether there are event files, which rank 0 writes."""
        return self._replicas.rank == 0 and log.get_tensorboard_writer() is not None

    def log_scalars(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        """Write numbers into the event files, by name.

        A curve that user code has written at this iteration, as scripts of Helios 1 do, is left.
        """
        writer, step = log.get_tensorboard_writer(), state.global_iteration
        if writer is None or not self.logs_scalars:
            return
        for name, value in scalars.items():
            if not writer.has_point(name, step):
                writer.add_scalar(name, value, step)

    def finish(self, reason: str) -> None:
        """Note in the sidecar of the last checkpoint that the run has come to its end."""
        folder, newest = self._start.folder, self._newest
        if folder is not None and newest is not None:
            on_first(self._replicas, lambda: folder.mark_finished(newest, reason))
