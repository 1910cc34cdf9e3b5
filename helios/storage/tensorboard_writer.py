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
from typing import TYPE_CHECKING, Any

import torch

import helios.core.rng as rng  # "from helios.core" would import this module again
from helios.distributed.collectives import get_global_rank
from helios.errors import UsageError
from helios.storage import files

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

    _Image = torch.Tensor | npt.NDArray[Any]

_LOGGER = logging.getLogger(__name__)
# Only event files with this suffix are truncated or removed, never those of a user's own writer.
_SUFFIX = ".helios"
_FLUSH_SECONDS = 20
_QUEUE_LENGTH = 200


class TensorboardWriter:
    """Writer of TensorBoard events; does nothing before :meth:`setup` and on ranks other than 0.

    :meth:`setup` imports TensorBoard.
    """

    def __init__(self) -> None:
        self._writer: Any = None  # torch's SummaryWriter, which is not annotated
        self._run_path: Path | None = None
        self._suffix = _SUFFIX
        self._newest_steps: dict[str, int | None] = {}
        # What :meth:`cut_back` has still to do.
        self._uncut: tuple[Path, Mapping[str, int], dict[str, Path]] | None = None

    def setup(self, run_path: Path) -> None:
        """Start a new event file in the folder of a run; creates the folder if it is missing."""
        self.close()
        self._run_path = run_path
        if get_global_rank() == 0:
            run_path.mkdir(parents=True, exist_ok=True)
            self._writer = _open_writer(run_path, self._suffix)

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

    def restore(
        self, run_path: Path, marks: Mapping[str, int] | None = None, *, cuts: bool = True
    ) -> None:
        """Continue in the folder of a run, from a checkpoint.

        Event files are truncated to their marks, later ones are removed, and a new one is started.
        If a file is missing or shorter than its mark, a warning is logged, as its points are lost.

        Args:
            run_path: the present folder of the run.
            marks: the result of :meth:`mark` in the checkpoint; ``None`` for an evaluation of the
                run, which keeps all events and whose own ones are kept by later resumes.
            cuts: whether to truncate and remove files now, or in :meth:`cut_back`.
        """
        self._suffix = "" if marks is None else _SUFFIX
        uncut = None
        if marks is not None and get_global_rank() == 0:
            uncut = (run_path, marks, _event_files(run_path))
        # An open writer would continue to write after the truncated end.
        self.setup(run_path)
        self._uncut = uncut
        if cuts:
            self.cut_back()

    def cut_back(self) -> None:
        """Truncate and remove files after ``restore(cuts=False)``, once."""
        uncut, self._uncut = self._uncut, None
        if uncut is not None:
            _cut_back(*uncut)

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
        self._uncut = None
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
        """Whether ``global_step`` is the step of the last point added to the curve ``tag``."""
        return self._newest_steps.get(tag) == global_step

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, float | torch.Tensor],
        global_step: int | None = None,
    ) -> None:
        """Add points to several curves of one plot; each curve has its own subfolder."""
        if self._writer is not None:
            self._writer.add_scalars(main_tag, tag_scalar_dict, global_step)

    def add_image(
        self,
        tag: str,
        img_tensor: _Image,
        global_step: int | None = None,
        dataformats: str = "CHW",
    ) -> None:
        """Add an image of floats in [0, 1] or bytes; ``dataformats`` names its axes."""
        if self._writer is not None:
            self._writer.add_image(tag, img_tensor, global_step, dataformats=dataformats)

    def add_images(
        self,
        tag: str,
        img_tensor: _Image,
        global_step: int | None = None,
        dataformats: str = "NCHW",
    ) -> None:
        """Add a batch of images, of floats in [0, 1] or bytes."""
        if self._writer is not None:
            self._writer.add_images(tag, img_tensor, global_step, dataformats=dataformats)

    def add_figure(
        self,
        tag: str,
        figure: Figure | list[Figure],
        global_step: int | None = None,
        close: bool = True,
    ) -> None:
        """Add a Matplotlib figure as an image, and close it unless ``close`` is False."""
        if self._writer is not None:
            self._writer.add_figure(tag, figure, global_step, close)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Add a text in Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, text_string, global_step)

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
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.detach().cpu()
        elif inputs is not None:
            inputs = [item.detach().cpu() for item in inputs]
        with rng.stream(rng.key("add_graph")), warnings.catch_warnings():
            # torch's writer still uses torch.jit, which its users cannot change.
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", r"`torch\.jit\.", category)
            self._writer.add_graph(copy.deepcopy(model).cpu(), inputs, verbose, use_strict_trace)

    def add_pr_curve(
        self,
        tag: str,
        labels: _Image,
        predictions: _Image,
        global_step: int | None = None,
        num_thresholds: int = 127,
    ) -> None:
        """Add a precision-recall curve.

        Args:
            tag: name of the curve.
            labels: label of each sample, 0 or 1.
            predictions: predicted probability of the label 1 for each sample, in [0, 1].
            global_step: step of the curve.
            num_thresholds: number of points of the curve.
        """
        if self._writer is not None:
            self._writer.add_pr_curve(tag, labels, predictions, global_step, num_thresholds)

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
        writer = _open_writer(self.run_path / run_name, self._suffix) if run_name else self._writer
        parts: Any = hparams  # not annotated
        for summary in parts(hparam_dict, metric_dict, hparam_domain_discrete):
            writer.file_writer.add_summary(summary, global_step)
        for name, value in metric_dict.items():
            writer.add_scalar(name, value, global_step)
        if run_name:
            writer.close()


def _open_writer(folder: Path, suffix: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(
        str(folder),
        max_queue=_QUEUE_LENGTH,
        flush_secs=_FLUSH_SECONDS,
        filename_suffix=suffix,
    )


def _event_files(run_path: Path) -> dict[str, Path]:
    """Return the event files with our suffix by relative path, including subfolders."""
    paths = sorted(run_path.rglob(f"*tfevents*{_SUFFIX}"))
    return {path.relative_to(run_path).as_posix(): path for path in paths}


def _cut_back(run_path: Path, marks: Mapping[str, int], found: Mapping[str, Path]) -> None:
    """Restore the event files that were found to their sizes in ``marks``."""
    # Only files found in the folder are changed: a mark cannot refer to a file elsewhere.
    sizes = {name: path.stat().st_size for name, path in found.items()}
    for name, path in found.items():
        if name not in marks:
            files.unlink(path)
        elif sizes[name] > marks[name]:
            files.truncate(path, marks[name])
    later = [name for name in found if name not in marks]
    if later:
        _LOGGER.info("Removed event files created after the checkpoint in %s: %s.", run_path, later)
    lost = [name for name, size in marks.items() if sizes.get(name, -1) < size]
    if lost:
        _LOGGER.warning(
            "Event files of the resumed run are missing or shorter than at the checkpoint: %s in "
            "%s. Their points are lost. To keep them, put the files back and resume again.",
            lost,
            run_path,
        )
