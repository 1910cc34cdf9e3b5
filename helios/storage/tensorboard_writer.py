"""Writes TensorBoard events so that a resumed run duplicates or loses no point.

A checkpoint records the size of each event file (:meth:`TensorboardWriter.mark`). A resume
truncates the files to these sizes, removes later ones and starts a new one. So it does not matter
whether the step of a point counts iterations, epochs or something else.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from helios.core import rng
from helios.distributed.collectives import get_global_rank
from helios.errors import UsageError
from helios.storage import files

_LOGGER = logging.getLogger(__name__)
# Only event files with this suffix are truncated or removed, never those of a user's own writer.
_SUFFIX = ".helios"


class TensorboardWriter:
    """Writer of TensorBoard events; does nothing before :meth:`setup` and on ranks other than 0.

    :meth:`setup` imports TensorBoard.
    """

    def __init__(self) -> None:
        self._writer: Any = None  # torch's SummaryWriter, which is not annotated
        self._run_path: Path | None = None
        self._suffix = _SUFFIX
        self._newest_steps: dict[str, int | None] = {}
        # What :meth:`cut_back` does: the size of each event file, ``None`` for one that goes.
        self._uncut: dict[Path, int | None] = {}

    def setup(self, run_path: Path) -> None:
        """Start a new event file in the folder of a run; creates the folder if it is missing."""
        self.close()
        self._run_path = run_path
        if get_global_rank() == 0:
            run_path.mkdir(parents=True, exist_ok=True)
            self._writer = self._open(run_path)

    @property
    def run_path(self) -> Path:
        """The folder of the run.

        Raises:
            UsageError: before :meth:`setup` (a ``RuntimeError``).
        """
        if self._run_path is None:
            raise UsageError("TensorboardWriter.run_path is not set. Call setup(run_path) first.")
        return self._run_path

    def mark(self) -> dict[str, int]:
        """Flush all events, and return the size of each event file.

        Returns:
            Size in bytes by the file's path relative to the folder of the run, for
            :meth:`restore`.
        """
        if self._writer is None:
            return {}
        self.flush()
        return {name: path.stat().st_size for name, path in _event_files(self.run_path).items()}

    def restore(self, run_path: Path, marks: Mapping[str, int] | None = None) -> None:
        """Continue in the folder of a run, from a checkpoint, with a new event file.

        :meth:`cut_back` then truncates older files to their marks, and removes later ones. If a
        file is missing or shorter than its mark, a warning is logged, as its points are lost.

        Args:
            run_path: the present folder of the run.
            marks: the result of :meth:`mark` in the checkpoint; ``None`` for an evaluation of the
                run, which keeps all events and whose own ones are kept by later resumes.
        """
        self._suffix = "" if marks is None else _SUFFIX
        if get_global_rank() != 0:
            marks = None
        found = {} if marks is None else _event_files(run_path)
        # An open writer would continue to write after the truncated end.
        self.setup(run_path)
        if marks is None:
            return
        sizes = {name: path.stat().st_size for name, path in found.items()}
        lost = [name for name, size in marks.items() if sizes.get(name, -1) < size]
        if lost:
            _LOGGER.warning(
                "Event files of the resumed run are missing or shorter than at the checkpoint: %s "
                "in %s. Their points are lost. To keep them, put the files back and resume again.",
                lost,
                run_path,
            )
        # Only files found in the folder are changed: a mark cannot refer to a file elsewhere.
        self._uncut = {path: marks.get(name) for name, path in found.items()}

    def cut_back(self) -> None:
        """Truncate and remove files as :meth:`restore` says, once."""
        for path, size in self._uncut.items():
            if size is None:
                files.unlink(path)
            elif path.stat().st_size > size:
                files.truncate(path, size)
        self._uncut = {}

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Write nothing during a block, such as a sanity check."""
        writer, self._writer = self._writer, None
        try:
            yield
        finally:
            self._writer = writer

    def flush(self) -> None:
        """Write all events to the files, and wait until that is done."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._uncut = {}
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def add_scalar(
        self, tag: str, scalar_value: float | str | torch.Tensor, global_step: int | None = None
    ) -> None:
        """Add a point to the curve ``tag``."""
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)
            self._newest_steps[tag] = global_step

    def has_point(self, tag: str, global_step: int) -> bool:
        """Return whether ``global_step`` is the step of the last point of the curve ``tag``."""
        return self._newest_steps.get(tag) == global_step

    def add_scalars(self, *args: Any, **kwargs: Any) -> None:
        """Add points to several curves of one plot, each in its own subfolder."""
        self._add("scalars", *args, **kwargs)

    def add_image(self, *args: Any, **kwargs: Any) -> None:
        """Add an image of floats in [0, 1] or bytes."""
        self._add("image", *args, **kwargs)

    def add_images(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch of images, of floats in [0, 1] or bytes."""
        self._add("images", *args, **kwargs)

    def add_figure(self, *args: Any, **kwargs: Any) -> None:
        """Add a Matplotlib figure as an image, and close it unless ``close`` is False."""
        self._add("figure", *args, **kwargs)

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """Add a text in Markdown."""
        self._add("text", *args, **kwargs)

    def add_pr_curve(self, *args: Any, **kwargs: Any) -> None:
        """Add a precision-recall curve."""
        self._add("pr_curve", *args, **kwargs)

    def _add(self, kind: str, *args: Any, **kwargs: Any) -> None:
        if self._writer is not None:
            getattr(self._writer, f"add_{kind}")(*args, **kwargs)

    def add_graph(
        self,
        model: torch.nn.Module,
        input_to_model: torch.Tensor | Sequence[torch.Tensor] | None = None,
        verbose: bool = False,
        use_strict_trace: bool = True,
    ) -> None:
        """Add the graph of a network, traced on CPU copies of the network and its input.

        Tracing runs the network with separate random numbers, so training is not affected.

        Args:
            model: the network.
            input_to_model: its argument, or the list of its arguments.
            verbose: whether to print the graph.
            use_strict_trace: the argument ``strict`` of ``torch.jit.trace``.
        """
        if self._writer is None:
            return
        inputs: Any = input_to_model
        if inputs is not None:
            parts = [inputs] if isinstance(inputs, torch.Tensor) else inputs
            inputs = [part.detach().cpu() for part in parts]
        with rng.stream(rng.key("add_graph")), warnings.catch_warnings():
            # torch's writer still uses torch.jit, which its users cannot change.
            warnings.filterwarnings("ignore", r"`torch\.jit\.")
            self._writer.add_graph(copy.deepcopy(model).cpu(), inputs, verbose, use_strict_trace)

    def add_hparams(
        self,
        hparam_dict: dict[str, bool | str | float | int | None],
        metric_dict: dict[str, float],
        hparam_domain_discrete: dict[str, list[Any]] | None = None,
        run_name: str | None = None,
        global_step: int | None = None,
    ) -> None:
        """Add hyperparameters and the resulting metrics.

        Args:
            hparam_dict: values by name.
            metric_dict: results by name; use names that no other curve has.
            hparam_domain_discrete: all values that a hyperparameter may have, by name.
            run_name: subfolder for them; ``None`` for the folder of the run.
            global_step: step of the metrics.
        """
        if self._writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        # TensorBoard reads only the newest file of a folder, so a second one would hide what is
        # written to the open one. Only in a subfolder, a new file is created.
        writer = self._open(self.run_path / run_name) if run_name else self._writer
        parts: Any = hparams  # not annotated
        for summary in parts(hparam_dict, metric_dict, hparam_domain_discrete):
            writer.file_writer.add_summary(summary, global_step)
        for name, value in metric_dict.items():
            writer.add_scalar(name, value, global_step)
        if run_name:
            writer.close()

    def _open(self, folder: Path) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        suffix = self._suffix
        return SummaryWriter(str(folder), max_queue=200, flush_secs=20, filename_suffix=suffix)


def _event_files(run_path: Path) -> dict[str, Path]:
    """Return the event files with our suffix by relative path, including subfolders."""
    paths = sorted(run_path.rglob(f"*tfevents*{_SUFFIX}"))
    return {path.relative_to(run_path).as_posix(): path for path in paths}
