"""Event files over a resume: no point is doubled, and none is lost."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing import event_file_loader
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.tensorboard import SummaryWriter

from helios.core import rng
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
    write_points(writer, stop, 16)
    writer.close()
    assert read_points(run_path) == undisturbed


def test_two_resumes_from_one_checkpoint_in_a_moved_folder_leave_each_point_once(
    writer: TensorboardWriter, undisturbed: Points, tmp_path: Path
) -> None:
    writer.setup(tmp_path / "run")
    write_points(writer, 0, 7)
    marks = writer.mark()
    for end in (9, 14):
        write_points(writer, 7, end)
        writer.close()
        moved = tmp_path / f"moved_{end}"
        next(tmp_path.glob("run" if end == 9 else "moved_9")).rename(moved)
        writer.restore(moved, marks)
    write_points(writer, 7, 16)
    writer.close()
    assert read_points(moved) == undisturbed


def test_a_mark_of_a_resumed_run_covers_its_older_files(
    writer: TensorboardWriter, undisturbed: Points, tmp_path: Path
) -> None:
    run_path = tmp_path / "run"
    writer.setup(run_path)
    for start in range(0, 16, 4):
        write_points(writer, start, start + 4)
        marks = writer.mark()
        write_points(writer, start + 4, 16)
        writer.restore(run_path, marks)
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
    writer.close()
    assert read_points(run_path) == Counter({(".", "loss", n, float(n)): 1 for n in range(300)})


def test_what_was_not_cut_back_is_not_cut_back_by_another_run(
    writer: TensorboardWriter, tmp_path: Path
) -> None:
    writer.setup(tmp_path / "one")
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    before = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*tfevents*")}
    writer.restore(tmp_path / "one", {}, cuts=False)
    writer.setup(tmp_path / "two")
    writer.cut_back()
    assert {path: path.read_bytes() for path in before} == before
    writer.restore(tmp_path / "one", {}, cuts=False)
    writer.cut_back()
    assert not any(path.exists() for path in before)


def test_event_files_of_others_are_left_alone(writer: TensorboardWriter, tmp_path: Path) -> None:
    writer.setup(tmp_path)
    marks = writer.mark()
    with SummaryWriter(str(tmp_path / "mine")) as others:
        others.add_scalar("mine", 1.0, 1)
    writer.restore(tmp_path, marks)
    assert read_points(tmp_path) == Counter({("mine", "mine", 1, 1.0): 1})


def test_without_marks_all_events_stay(writer: TensorboardWriter, tmp_path: Path) -> None:
    writer.setup(tmp_path)
    write_points(writer, 0, 4)
    writer.restore(tmp_path)
    write_points(writer, 4, 5)
    writer.close()
    assert sum(read_points(tmp_path).values()) == 5 + 1 + 2


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
    [record] = caplog.records
    assert "missing or shorter" in record.message
    assert gone in record.message
    assert shorter in record.message
    assert whole not in record.message


def test_a_mark_leads_to_no_file_outside_the_folder(
    writer: TensorboardWriter, tmp_path: Path
) -> None:
    outside = tmp_path / "events.out.tfevents.1.helios"
    outside.write_bytes(b"not of this run")
    writer.restore(tmp_path / "run", {"../events.out.tfevents.1.helios": 3})
    assert outside.read_bytes() == b"not of this run"


def test_before_setup_nothing_happens() -> None:
    writer = TensorboardWriter()
    write_points(writer, 0, 8)
    writer.add_graph(torch.nn.Linear(1, 1), torch.ones(1))
    writer.flush()
    assert writer.mark() == {}
    with pytest.raises(RuntimeError, match="setup"):
        _ = writer.run_path


def test_off_rank_0_nothing_happens(writer: TensorboardWriter, tmp_path: Path) -> None:
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        writer.restore(tmp_path / "run", {"gone": 3})
        write_points(writer, 0, 8)
        assert writer.mark() == {}
    finally:
        torch.distributed.destroy_process_group()
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_data_is_written(writer: TensorboardWriter, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    writer.setup(tmp_path)
    writer.add_image("image", torch.rand(3, 4, 4), 1)
    writer.add_images("images", torch.rand(2, 4, 4, 3), 1, dataformats="NHWC")
    writer.add_figure("figure", figures.Figure(), 1, close=False)
    writer.add_text("text", "**bold**", 1)
    writer.add_pr_curve("curve", torch.tensor([0, 1]), torch.tensor([0.2, 0.7]), 1)
    writer.close()
    tags = {tag for _, tag, _, _ in read_points(tmp_path)}
    assert tags == {"image", "images", "figure", "text/text_summary", "curve"}


class _Drawing(torch.nn.Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        random.random()
        rng.get_default_numpy_rng().generator.random()
        return super().forward(batch)


def test_a_graph_is_drawn_without_moving_the_random_numbers(
    writer: TensorboardWriter, tmp_path: Path
) -> None:
    writer.setup(tmp_path)
    rng.seed_rngs(1)
    model = _Drawing(2, 2)
    before = repr(rng.get_rng_state_dict())
    writer.add_graph(model, [torch.ones(1, 2, requires_grad=True)])
    writer.close()
    assert repr(rng.get_rng_state_dict()) == before
    [path] = tmp_path.iterdir()
    events = event_file_loader.LegacyEventFileLoader(str(path)).Load()
    assert any(b"weight" in event.graph_def for event in events)


class _Warning(torch.nn.Linear):
    """Warns as PyTorch does when it traces: 2.13 of what is deprecated, 2.15 of the future."""

    def __init__(self, text: str, category: type[Warning]) -> None:
        super().__init__(2, 2)
        self.text, self.category = text, category

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        warnings.warn(self.text, self.category, stacklevel=2)
        return super().forward(batch)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_a_graph_is_drawn_without_a_warning_that_its_author_cannot_heed(
    writer: TensorboardWriter, tmp_path: Path, category: type[Warning]
) -> None:
    writer.setup(tmp_path)
    network = _Warning("`torch.jit.trace` is deprecated. Please switch.", category)
    writer.add_graph(network, torch.ones(1, 2))
    with pytest.warns(category, match="its own"):
        writer.add_graph(_Warning("of its own", category), torch.ones(1, 2))
    writer.close()
