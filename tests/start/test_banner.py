"""What a start logs: the banner, a line at a resume, and seeds that are not those of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import helios
from tests.support.quiet import Quiet
from tests.support.runs import IndexModule, Setting, SmallModel
from tests.typed.user_script import Line, Numbers


class PerEpoch(SmallModel):
    """Says that its scheduler counts epochs."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.scheduler_interval = {"scheduler": "epoch"}


class Stopped(Quiet):
    """Ends the training before its first step."""

    def on_training_start(self) -> None:
        raise InterruptedError


def scheduler_lines(
    kind: type[SmallModel], capsys: pytest.CaptureFixture[str], **options: Any
) -> list[str]:
    setting = Setting()
    trainer = helios.Trainer(use_cpu=True, plugins=[Stopped("stopped")], **options)
    trainer.train_exceptions.append(InterruptedError)
    with pytest.raises(InterruptedError):
        trainer.fit(kind(setting), IndexModule(setting))
    return [line for line in capsys.readouterr().err.splitlines() if "chedulers" in line]


def fit(folder: Path, epochs: int, **options: Any) -> None:
    places: dict[str, Any] = {"chkpt_root": folder, "chkpt_frequency": 1, "use_cpu": True}
    trainer = helios.Trainer(total_steps=epochs, **places, **options)
    trainer.fit(Line("line"), Numbers())


def starts(shown: str) -> list[str]:
    """Return the lines before the end of the training, without those of the model's units."""
    lines = shown.partition("Training has ended")[0].splitlines()[:-1]
    return [line for line in lines if "recomputed in backward" not in line]


@pytest.mark.parametrize("print_banner", [True, False])
def test_a_resume_is_told_in_a_line_and_what_has_changed_in_another(
    print_banner: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 2)
    capsys.readouterr()
    fit(tmp_path, 4, print_banner=print_banner)
    lines = starts(capsys.readouterr().err)
    assert len(lines) == 2
    assert lines[0].endswith(
        " - INFO - Resumed from line_epoch_2_iter_8.pth; run: line; seed: 6691 (the default); "
        "processes: 1 process, 1 replica."
    )
    assert lines[1].endswith(" - INFO - Changed since the checkpoint: total_steps: 2 -> 4.")


@pytest.mark.shows("P81")
def test_a_start_says_how_often_schedulers_step_and_names_one_that_seems_to_count_epochs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scheduler of the model has a period of 30."""

    def told(kind: type[SmallModel], **options: Any) -> str:
        (line,) = scheduler_lines(kind, capsys, **options)
        return line.partition(" - INFO - ")[2]

    remedy = "Model.scheduler_interval = {'scheduler': 'epoch'}"
    assert "scheduler after every optimizer step" in told(SmallModel, total_steps=30)
    assert remedy in told(SmallModel, total_steps=30)
    assert remedy not in told(SmallModel, total_steps=29)
    assert remedy not in told(SmallModel, total_steps=30, train_unit="iteration")
    assert "scheduler after every epoch" in told(PerEpoch, total_steps=30)
    assert remedy not in told(PerEpoch, total_steps=30)
