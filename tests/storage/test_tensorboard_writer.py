"""Event files over a resume: no point is doubled, and none is lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing import event_file_loader
from torch.utils.tensorboard import SummaryWriter

from helios.storage.tensorboard_writer import TensorboardWriter
from tests.support.scripts import call

Points = Counter[tuple[str, str, int, float]]


def read_points(run_path: Path) -> Points:
    """Return how often each point (folder, tag, step, value) is in the event files."""
    points: Points = Counter()
    for path in run_path.rglob("*tfevents*"):
        folder = path.parent.relative_to(run_path).as_posix()
        for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                points[folder, value.tag, event.step, value.simple_value] += 1
    return points


def write_points(writer: TensorboardWriter, start: int, end: int) -> None:
    """Write what a training of four batches an epoch writes: steps of two kinds, sub-folders."""
    for iteration in range(start, end):
        writer.add_scalar("loss", torch.tensor(1.0 / (iteration + 1)), iteration)
        if iteration % 4 == 3:
            writer.add_scalar("accuracy", iteration / 64, iteration // 4)
            writer.add_scalars("rates", {"slow": 0.25, "fast": 0.5}, iteration // 4)
        if iteration in (5, 13):
            writer.add_hparams({"width": 8}, {"score": 0.5}, run_name=f"after_{iteration}")
            writer.add_hparams({"width": 8}, {"score": 0.5}, global_step=iteration)


@pytest.fixture
def writer() -> Iterator[TensorboardWriter]:
    made = TensorboardWriter()
    yield made
    made.close()


@pytest.fixture
def undisturbed(writer: TensorboardWriter, tmp_path: Path) -> Points:
    writer.setup(tmp_path / "undisturbed")
    write_points(writer, 0, 16)
    writer.close()
    points = read_points(tmp_path / "undisturbed")
    assert sum(points.values()) == len(points) == 16 + 4 + 8 + 2 * (4 + 4)
    return points


@pytest.mark.parametrize("stop", [0, 1, 6, 8, 15])
def test_a_resume_leaves_each_point_once(
    writer: TensorboardWriter, undisturbed: Points, tmp_path: Path, stop: int
) -> None:
    run_path = tmp_path / "run"
    writer.setup(run_path)
    write_points(writer, 0, stop)
    marks = json.loads(json.dumps(writer.mark()))
    write_points(writer, stop, 16)
    writer.restore(run_path, marks)
    writer.cut_back()
    write_points(writer, stop, 16)
    writer.close()
    assert read_points(run_path) == undisturbed


def _write_until_killed() -> None:
    writer = TensorboardWriter()
    writer.setup(Path(sys.argv[1]))
    for step in range(310):
        if step == 300:
            print(json.dumps(writer.mark()), flush=True)
        writer.add_scalar("loss", step, step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_mark_covers_survives_a_kill(writer: TensorboardWriter, tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    killed = call(_write_until_killed, run_path)
    assert killed.returncode == -signal.SIGKILL
    writer.restore(run_path, json.loads(killed.stdout))
    writer.cut_back()
    writer.close()
    assert read_points(run_path) == Counter({(".", "loss", n, float(n)): 1 for n in range(300)})


def test_event_files_of_others_are_left_alone(writer: TensorboardWriter, tmp_path: Path) -> None:
    writer.setup(tmp_path)
    marks = writer.mark()
    with SummaryWriter(str(tmp_path / "mine")) as others:
        others.add_scalar("mine", 1.0, 1)
    writer.restore(tmp_path, marks)
    writer.cut_back()
    assert read_points(tmp_path) == Counter({("mine", "mine", 1, 1.0): 1})


def test_files_that_are_gone_or_shorter_are_warned_of(
    writer: TensorboardWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer.setup(tmp_path)
    write_points(writer, 0, 8)
    marks = writer.mark()
    writer.close()
    gone, shorter, whole = [name for name in marks if "after_5" not in name]
    (tmp_path / gone).unlink()
    (tmp_path / shorter).write_bytes((tmp_path / shorter).read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "helios"):
        writer.restore(tmp_path, marks)
        writer.cut_back()
    [record] = caplog.records
    assert "missing or shorter" in record.message
    assert gone in record.message
    assert shorter in record.message
    assert whole not in record.message


def test_every_kind_of_data_is_written(writer: TensorboardWriter, tmp_path: Path) -> None:
    writer.setup(tmp_path)
    writer.add_image("image", torch.rand(3, 4, 4), 1)
    writer.add_images("images", torch.rand(2, 4, 4, 3), 1, dataformats="NHWC")
    writer.add_text("text", "**bold**", 1)
    writer.add_pr_curve("curve", torch.tensor([0, 1]), torch.tensor([0.2, 0.7]), 1)
    writer.close()
    tags = {tag for _, tag, _, _ in read_points(tmp_path)}
    assert tags == {"image", "images", "text/text_summary", "curve"}
