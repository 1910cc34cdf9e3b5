"""Evaluations of the best checkpoint, of the newest, and of a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios import CheckpointStore, KeepBest, Trainer
from helios.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
)
from helios.plugins import EarlyStopping, Plugin
from tests.support import graded
from tests.support.graded import Graded, Samples, file_of, make
from tests.typed.user_script import Numbers

CALLS = ("validate", "test", "predict")
BEST = CheckpointStore(keep_best=KeepBest(9, "quality", "min"))


def fit(root: Path, *plugins: Plugin, **options: Any) -> Trainer:
    return graded.fit(root, *plugins, **{"store": BEST, **options})


def weight_of(path: Path) -> torch.Tensor:
    weight: torch.Tensor = helios.load_checkpoint(path)["model"]["objects"]["net"]["weight"]
    return weight


def evaluated(trainer: Trainer, call: str, **options: Any) -> bytes:
    """Evaluate a new model, and return the bytes of its weights."""
    model = Graded()
    getattr(trainer, call)(model, Samples(), **options)
    return bytes(model.net.weight.detach().numpy().tobytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    fit(folder)
    return folder


@pytest.mark.shows("H56", "U23")
@pytest.mark.parametrize("call", CALLS)
def test_each_evaluation_loads_what_it_is_asked_for(root: Path, call: str) -> None:
    wanted = {"best": 2, "newest": 4, "auto": 4, file_of(root, 1): 1, str(file_of(root, 3)): 3}
    weights = {epoch: weight_of(file_of(root, epoch)).numpy().tobytes() for epoch in range(1, 5)}
    assert len(set(weights.values())) == 4
    trainer = make(root, store=BEST)
    for choice, epoch in wanted.items():
        assert evaluated(trainer, call, checkpoint=choice) == weights[epoch], choice
    bare = make(None)
    assert evaluated(bare, call, checkpoint=file_of(root, 2)) == weights[2]


@pytest.mark.shows("U25")
def test_the_log_says_which_one_is_the_best_and_why(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(make(root, store=BEST), "test", checkpoint="best")
    said = capsys.readouterr().err
    assert "Testing of line_epoch_2_iter_8.pth, the best of 4 checkpoints by quality (min)" in said
    assert "equal: line_epoch_3_iter_12.pth" in said


@pytest.mark.shows("H56")
def test_an_evaluation_without_data_says_what_to_define(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in ("test", "predict"):
        assert not dict(getattr(make(root), call)(Graded(), Numbers()))
        assert f"Assign self.{call}_dataset in its setup()." in capsys.readouterr().err


@pytest.mark.parametrize("logs", [False, True])
def test_a_mistyped_score_is_refused_with_the_names_that_there_are(
    tmp_path: Path, *, logs: bool
) -> None:
    class Logging(Graded):
        def valid_step(self, batch: Any, step: int) -> Any:
            scores = super().valid_step(batch, step)
            if not logs:
                return scores
            return self.log("error", scores["error"][0])

    store = CheckpointStore(keep_best=KeepBest(1, "eror", "min"))
    with pytest.raises(helios.UsageError, match=r"metric='eror'.*scores are: error, quality\. "):
        fit(tmp_path, model=Logging(), store=store)


@pytest.mark.shows("U24")
def test_the_file_of_resume_is_evaluated_until_the_trainer_has_trained(tmp_path: Path) -> None:
    fit(tmp_path / "first")
    origin = file_of(tmp_path / "first", 2)
    options: dict[str, Any] = {"resume": origin, "store": BEST}
    start = weight_of(origin).numpy().tobytes()
    for call in CALLS:
        assert evaluated(make(tmp_path / "other", **options), call) == start
    trainer = fit(tmp_path / "other", model=Graded([1.0] * 5), total_steps=5, **options)
    end = weight_of(file_of(tmp_path / "other", 5)).numpy().tobytes()
    assert evaluated(trainer, "test") == end
    assert evaluated(make(tmp_path / "other", **options), "test") == start
    assert evaluated(make(tmp_path / "other", **options), "test", checkpoint="newest") == end


def _refused(trainer: Trainer, kind: type[Exception], text: str, choice: Any) -> None:
    for call in CALLS:
        with pytest.raises(kind, match=text):
            getattr(trainer, call)(Graded(), Samples(), checkpoint=choice)


@pytest.mark.shows("U23")
def test_what_does_not_exist_is_refused_with_what_there_is(root: Path, tmp_path: Path) -> None:
    listing = r"holds line_epoch_4_iter_16.pth, line_epoch_3_iter_12.pth, .*line_epoch_1_iter_4.pth"
    _refused(make(root), CheckpointError, rf"no file at bst\. .*{listing}", "bst")
    _refused(make(tmp_path), CheckpointError, "holds no checkpoint", "newest")
    other = CheckpointStore(keep_best=KeepBest(1, "qualty", "max"))
    text = rf"'qualty', but there is none. .*{listing}.*scores: error, quality\."
    _refused(make(root, store=other), CheckpointError, text, "best")
    _refused(make(root, store=BEST, run_name="x"), CheckpointError, "of the run 'x'", "best")


@pytest.mark.parametrize("options", [{}, {"nproc": 2}])
def test_a_mistyped_name_is_an_error_that_lists_the_runs(
    root: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("zebra", "line2", "a-line"):
        shutil.copytree(root / "line", tmp_path / name)
    (tmp_path / "liner").mkdir()
    _refused(make(tmp_path, **options), CheckpointError, "are: line2, a-line, zebra. ", "auto")
    assert not (tmp_path / "line").exists()


def test_a_model_that_was_never_trained_must_be_asked_for(root: Path, tmp_path: Path) -> None:
    _refused(make(tmp_path), CheckpointError, "pass checkpoint=None", "auto")
    found = {evaluated(make(root), call, checkpoint=None) for call in CALLS}
    assert len(found) == 1
    assert found.isdisjoint(weight_of(file_of(root, n)).numpy().tobytes() for n in range(1, 5))


@pytest.mark.shows("U23")
def test_a_choice_that_means_nothing_is_refused(root: Path, tmp_path: Path) -> None:
    _refused(make(root), ArgumentTypeError, "a file or None, got 3", 3)
    _refused(make(None), ArgumentError, "a folder of checkpoints, got none", "newest")
    names = ("error", "quality")
    two = [EarlyStopping(name, mode="min", patience=9, plug_id=name) for name in names]
    fit(tmp_path, *two, store=None)
    _refused(make(tmp_path, *two), ArgumentError, "one score that decides", "best")
