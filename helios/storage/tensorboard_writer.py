"""TensorBoard's event files, exact over a resume: no point is doubled, and none is lost.

A checkpoint records the size of each event file (:meth:`TensorboardWriter.mark`). A resume cuts
the files back to these sizes, removes later ones and begins a new one, so it does not matter
whether a point's step counts iterations, epochs or something else.
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

from helios.core import rng
from helios.distributed.collectives import get_global_rank
from helios.errors import UsageError
from helios.storage import files

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

    _Image = torch.Tensor | npt.NDArray[Any]

_LOGGER = logging.getLogger(__name__)
# Marks the event files of this class: only they are cut or removed, never those of a user's writer.
_SUFFIX = ".helios"
_FLUSH_SECONDS = 20
_QUEUE_LENGTH = 200


class TensorboardWriter:
    """Writer of TensorBoard events; on ranks other than 0, and before :meth:`setup`, a no-op.

    TensorBoard itself is imported by :meth:`setup`.
    """

    def __init__(self) -> None:
        self._writer: Any = None  # torch's SummaryWriter, which is not annotated
        self._run_path: Path | None = None
        self._suffix = _SUFFIX
        self._newest_steps: dict[str, int | None] = {}

    def setup(self, run_path: Path) -> None:
        """Begin a new event file in the folder of a run, which is made where it is missing."""
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
            raise UsageError(
                "TensorboardWriter.run_path needs the folder of a run, and none was given; call "
                "setup(run_path) first."
            )
        return self._run_path

    def mark(self) -> dict[str, int]:
        """Write out everything, and return how long each event file is now.

        Returns:
            Size in bytes by the file's path in the folder of the run: what :meth:`restore` takes.
        """
        if self._writer is None:
            return {}
        self.flush()
        return {name: path.stat().st_size for name, path in _event_files(self.run_path).items()}

    def restore(self, run_path: Path, marks: Mapping[str, int] | None = None) -> None:
        """Go on in the folder of a run, from where a checkpoint was taken.

        Event files are cut back to their marks, those begun later are removed, and a new one is
        begun. A marked file that is gone or shorter than its mark is warned of: its points are
        lost.

        Args:
            run_path: the folder, wherever it is now.
            marks: what :meth:`mark` returned for the checkpoint; ``None`` for an evaluation of the
                run: all events are left, and no later resume touches the new ones.
        """
        self._suffix = "" if marks is None else _SUFFIX
        if marks is not None and get_global_rank() == 0:
            # A writer that is still open would go on behind the cut.
            self.close()
            _cut_back(run_path, marks)
        self.setup(run_path)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Write nothing in a block: what is tried there belongs to no curve (C17)."""
        writer, self._writer = self._writer, None
        try:
            yield
        finally:
            self._writer = writer

    def flush(self) -> None:
        """Bring everything to the files; returns when it is there."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
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
        """Whether the newest point of the curve ``tag`` that was added here is that of a step."""
        return self._newest_steps.get(tag) == global_step

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, float | torch.Tensor],
        global_step: int | None = None,
    ) -> None:
        """Add points to several curves of one plot; each has a sub-folder of the run."""
        if self._writer is not None:
            self._writer.add_scalars(main_tag, tag_scalar_dict, global_step)

    def add_image(
        self,
        tag: str,
        img_tensor: _Image,
        global_step: int | None = None,
        dataformats: str = "CHW",
    ) -> None:
        """Add an image, of floats in [0, 1] or bytes, whose axes ``dataformats`` names."""
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
        """Add a figure of Matplotlib as an image, and close it unless told otherwise."""
        if self._writer is not None:
            self._writer.add_figure(tag, figure, global_step, close)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Add a text, in Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, text_string, global_step)

    def add_graph(
        self,
        model: torch.nn.Module,
        input_to_model: torch.Tensor | Sequence[torch.Tensor] | None = None,
        verbose: bool = False,
        use_strict_trace: bool = True,
    ) -> None:
        """Add the graph of a network, traced on CPU copies of it and of its input.

        Tracing runs the network: on random numbers of its own, so that training's do not move.

        Args:
            model: the network.
            input_to_model: its argument, or the list of its arguments.
            verbose: print the graph.
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
            # torch's writer still traces; its users cannot change that.
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
            labels: truth of each sample, 0 or 1.
            predictions: probability of each sample to be true, in [0, 1].
            global_step: step of the curve.
            num_thresholds: points of the curve.
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
        """Add hyper-parameters and the metrics that they led to.

        Args:
            hparam_dict: values by name.
            metric_dict: results by name; a name should not be that of another curve.
            hparam_domain_discrete: all values that a hyper-parameter may have, by name.
            run_name: sub-folder for them; ``None`` for the run itself.
            global_step: step of the metrics.
        """
        if self._writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        # A second file beside the open one would end TensorBoard's reading of that one: it goes
        # on to the newest file of a folder for good. So a new file is begun in sub-folders only.
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
    """Return our event files by their path in the folder, also those of sub-folders."""
    paths = sorted(run_path.rglob(f"*tfevents*{_SUFFIX}"))
    return {path.relative_to(run_path).as_posix(): path for path in paths}


def _cut_back(run_path: Path, marks: Mapping[str, int]) -> None:
    """Make the event files what they were when ``marks`` was taken, as far as they are there."""
    # Only what is found in the folder is touched: a mark cannot lead to a file elsewhere.
    found = _event_files(run_path)
    sizes = {name: path.stat().st_size for name, path in found.items()}
    for name, path in found.items():
        if name not in marks:
            files.unlink(path)
        elif sizes[name] > marks[name]:
            files.truncate(path, marks[name])
    later = [name for name in found if name not in marks]
    if later:
        _LOGGER.info("Removed event files begun after the checkpoint in %s: %s.", run_path, later)
    lost = [name for name, size in marks.items() if sizes.get(name, -1) < size]
    if lost:
        _LOGGER.warning(
            "Event files of the resumed run are gone or shorter than at the checkpoint: %s in %s. "
            "Their points are lost; put the files back and resume again to keep them.",
            lost,
            run_path,
        )
