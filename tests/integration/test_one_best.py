"""One best: everything that names a best validation or checkpoint names the same one.

The reference is a loop written by hand over the scores that were given.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import helios
from helios import CheckpointStore, KeepBest
from helios.cli import main
from helios.errors import ArgumentError
from helios.plugins import EarlyStopping, Plugin
from tests.support.graded import STEPS, Graded, Samples, epochs_of, file_of, fit, make
from tests.support.ranks import run_ranks

NAN, INF = math.nan, math.inf


def reference(scores: Sequence[float], mode: str, count: int) -> tuple[list[int], list[int]]:
    """Return the epochs that entered the best, and the best ones at the end, the best first."""
    best: list[int] = []
    entered = []
    for epoch, score in enumerate(scores, 1):
        if math.isnan(score) or math.isinf(score):
            continue
        place = 0
        for other in best:
            known = scores[other - 1]
            if (known < score if mode == "min" else known > score) or known == score:
                place += 1
        best.insert(place, epoch)
        if epoch in best[:count]:
            entered.append(epoch)
        del best[count:]
    return entered, best


def draw_scores(seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [numbers.choice([NAN, INF, -INF, 1.0, 2.0, 3.0, 4.0, 5.0]) for _ in range(7)]


def store(count: int, mode: Any, **rules: Any) -> CheckpointStore:
    return CheckpointStore(keep_best=KeepBest(count, "quality", mode), **rules)


class Judging(Graded):
    """Says itself which validations are better: those below 2.5."""

    def have_metrics_improved(self) -> bool:
        return bool(self.metrics["quality"] < 2.5)


@pytest.mark.shows("P122")
@pytest.mark.parametrize(("seed", "mode"), [(0, "min"), (1, "max"), (2, "min")])
def test_each_validation_among_the_best_is_saved_and_the_best_stay(
    seed: int, mode: Any, tmp_path: Path
) -> None:
    scores, count = draw_scores(seed), 1 + seed % 3
    entered, best = reference(scores, mode, count)
    options: dict[str, Any] = {"total_steps": 7, "chkpt_frequency": 100}
    # Nothing is deleted, so every save is seen.
    fit(
        tmp_path / "all",
        model=Graded(scores),
        store=store(count, mode, keep_every=1),
        **options,
    )
    assert epochs_of(tmp_path / "all") == sorted({*entered, 7})
    fit(tmp_path / "kept", model=Graded(scores), store=store(count, mode), **options)
    assert epochs_of(tmp_path / "kept") == sorted({*best, 7})
    found = helios.find_best_checkpoint(tmp_path / "kept" / "line")
    assert found == (file_of(tmp_path / "kept", best[0]) if best else None)


def _train_apart(rank: int, root: Path) -> list[int]:
    scores = [[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]][rank]
    stopping = EarlyStopping("quality", mode="min", patience=2)
    rules = store(1, "min", keep_every=1)
    fit(
        root,
        stopping,
        model=Graded(scores),
        total_steps=3,
        chkpt_frequency=100,
        store=rules,
        num_replicas=2,
    )
    return [stopping.count, int(stopping.best or 0)]


@pytest.mark.shows("P122")
def test_the_score_of_rank_0_decides_in_all_processes(tmp_path: Path) -> None:
    found = run_ranks(_train_apart, 2, tmp_path)
    assert found == [[1, 1], [1, 1]]
    paths = sorted((tmp_path / "line").glob("*.pth"))
    assert [path.stem.split("_")[2] for path in paths] == ["1", "2", "3"]


def stopping(metric: str = "quality", mode: Any = "min", **options: Any) -> EarlyStopping:
    return EarlyStopping(metric, mode, **{"patience": 9, "plug_id": metric, **options})


@pytest.mark.shows("P122")
@pytest.mark.parametrize(
    ("plugins", "options", "model", "best"),
    [
        ([stopping("error")], {"store": store(1, "max")}, Judging, "quality 4"),
        ([stopping()], {}, Judging, "quality 1"),
        ([stopping(), stopping("error")], {}, Judging, ""),
        ([], {}, Judging, "quality 2"),
        ([], {}, Graded, ""),
    ],
)
def test_the_rule_of_a_run(
    plugins: list[Plugin],
    options: dict[str, Any],
    model: type[Graded],
    best: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "runs"
    scores = [4.0, 1.0, 2.0, 3.0]
    fit(root, *plugins, model=model(scores), enable_progress_bar=True, **options)
    said = capsys.readouterr().err
    main(["report", str(root / "line"), "--json"])
    report = json.loads(capsys.readouterr().out)
    page = Path(report["path"]).read_text("utf-8")
    main(["ls", str(root)])
    listed = capsys.readouterr().out
    if not best:
        assert "best" not in said + listed
        assert report["best"] is None
        assert 'class="best"' not in page
        return
    epoch = scores.index(float(best.split()[1])) + 1
    place = f"iteration {STEPS * epoch}"
    summary = said.partition("best scores")[2].splitlines()[0]
    assert f"{best} (" in summary.replace("error", "") or best in summary
    assert f"({place}; {file_of(root, epoch).name})" in summary
    assert report["best"]["iteration"] == STEPS * epoch
    assert f"{float(best.split()[1]):.6g} at {place}" in page
    assert f"{place}" in listed.partition("best:")[2]
    assert file_of(root, epoch).name in listed.partition("best:")[2]
    assert helios.find_best_checkpoint(root / "line") == file_of(root, epoch)
    make(root).test(model(), Samples(), checkpoint="best")
    assert f"Testing of {file_of(root, epoch).name}" in capsys.readouterr().err


def saved_best(root: Path, epoch: int) -> Any:
    return helios.load_checkpoint(file_of(root, epoch))["best_validations"]


@pytest.mark.shows("P122")
def test_a_run_that_was_stopped_has_the_best_of_an_undisturbed_one(tmp_path: Path) -> None:
    scores = [3.0, 2.0, NAN, 2.0, 1.0, 4.0]
    options: dict[str, Any] = {"model": Graded(scores), "store": store(2, "min", keep_every=1)}
    fit(tmp_path / "whole", total_steps=6, **options)
    for total in range(1, 7):
        fit(tmp_path / "parts", total_steps=total, **options)
        assert saved_best(tmp_path / "parts", total) == saved_best(tmp_path / "whole", total)
    found = saved_best(tmp_path / "whole", 6)["validations"]
    assert [each["scores"]["quality"] for each in found] == [1.0, 2.0]
    assert [each["iteration"] for each in found] == [5 * STEPS, 2 * STEPS]


@pytest.mark.shows("P123")
def test_the_best_validation_may_have_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [3.0, 2.5, 1.0, 2.0]
    fit(tmp_path, stopping(), model=Graded(scores), chkpt_frequency=2)
    summary = capsys.readouterr().err.rpartition("best scores")[2].splitlines()[0]
    assert "quality 1 (iteration 12; without a checkpoint)" in summary
    assert helios.find_best_checkpoint(tmp_path / "line") == file_of(tmp_path, 4)
    make(tmp_path).test(Graded(), Samples(), checkpoint="best")
    said = capsys.readouterr().err
    best, name = "quality 1 (iteration 12)", "line_epoch_4_iter_16.pth"
    assert f"Testing of {name}, the best of 2 checkpoints by quality (min): 2" in said
    assert f"has no checkpoint: {best}. The best checkpoint is {name}." in said
    main(["ls", str(tmp_path)])
    text = f"best: {best}, without a checkpoint; best checkpoint: {name}"
    assert text in capsys.readouterr().out
    main(["inspect", str(file_of(tmp_path, 4))])
    assert "metric 'quality', mode 'min', iteration 12" in capsys.readouterr().out


@pytest.mark.shows("P124")
def test_two_modes_of_one_score_are_refused_before_training(tmp_path: Path) -> None:
    modes = "'quality' must have one mode, but KeepBest has mode='min', and EarlyStopping 'q"
    with pytest.raises(ArgumentError, match=modes):
        fit(tmp_path, stopping(mode="max"), store=store(1, "min"))
    assert epochs_of(tmp_path) == []
