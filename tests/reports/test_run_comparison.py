"""Comparisons of runs: the best first, what differs, and means over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helios.cli import main
from tests.support.synthetic_run import write_run


def make_run(folder: Path, scores: Sequence[float], **facts: Mapping[str, Any]) -> Path:
    return write_run(folder, {"options": {"precision": "fp32"}, **facts}, scores={"error": scores})


def compare(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["compare", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def grid(tmp_path: Path) -> list[Path]:
    """Return six runs: two learning rates with three seeds each; each ends worse than its best."""
    numbers = np.random.default_rng(3).random(6)
    cells = [(lr, seed) for lr in (0.1, 0.2) for seed in (1, 2, 3)]
    return [
        make_run(
            tmp_path / f"{lr}-{seed}",
            [2.0, lr + numbers[n], 3.0],
            params={"lr": lr},
            given={"model.lr": lr},
            definition={"random_seed": seed},
        )
        for n, (lr, seed) in enumerate(cells)
    ]


@pytest.mark.shows("P126")
def test_runs_are_listed_the_best_first_with_what_differs(
    grid: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = np.random.default_rng(3).random(6)
    scores = {run.name: numbers[n] + (0.1, 0.2)[n // 3] for n, run in enumerate(grid)}
    found = compare(capsys, *grid)
    assert found["by"] == "error (min)"
    # The same value under the same name is one column.
    assert found["settings"] == ["lr", "random_seed"]
    names = sorted(scores, key=lambda name: scores[name])
    assert [row["run"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert row["scores"] == {"error": scores[row["run"]]}
        assert list(row["settings"].values()) == row["run"].split("-")
    assert main(["compare", *map(str, grid)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "lr", "random_seed", "error"]
    assert [line.split()[0] for line in lines[1:7]] == names
    assert lines[1].split()[-1] == f"{scores[names[0]]:.6g}"
    assert compare(capsys, grid[0].parent) == found, "all runs in a folder"


@pytest.mark.shows("P46")
def test_runs_that_differ_in_seeds_only_have_mean_and_standard_deviation(
    grid: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = np.random.default_rng(3).random(6)
    known = {"0.1": numbers[:3] + 0.1, "0.2": numbers[3:] + 0.2}
    groups = compare(capsys, *grid)["groups"]
    means = [group["means"]["error"] for group in groups]
    assert means == sorted(means)
    assert len(groups) == 2
    for group in groups:
        values = known[group["settings"]["lr"]]
        assert group["means"]["error"] == pytest.approx(np.mean(values), rel=1e-12)
        assert group["deviations"]["error"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
    assert main(["compare", *map(str, grid)]) == 0
    shown = capsys.readouterr().out
    for values in known.values():
        assert f"{np.mean(values):.6g} ± {np.std(values, ddof=1):.6g}" in shown


@pytest.mark.shows("P147")
def test_a_plot_has_the_curves_of_all_runs_over_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"_a$x$": [4.0, 2.0, 1.0], "b": [8.0, 4.0, 2.0, 1.0], "c": [3.0, 3.0]}
    for name, losses in runs.items():
        write_run(tmp_path / name, {}, scores={"error": losses[:2]}, losses=losses)
    folders = [str(tmp_path / name) for name in runs]
    target = tmp_path / "plot.svg"
    assert main(["compare", *folders, "--plot", str(target)]) == 0
    assert f"Wrote {target}." in capsys.readouterr().out
    text = " ".join(target.read_text("utf-8").split())
    for title in ("loss: loss", "score: error", "learning rate", *runs):
        assert f"{title}</text>" in text
    # A colour for each run: in each of three charts, and in the legend (three points).
    for color in ("#1f77b4", "#ff7f0e", "#2ca02c"):
        lines = [x for x in text.split("<path") if f"stroke: {color}" in x and " L " in x]
        lengths = [each.partition('"')[2].partition('"')[0].count("L") + 1 for each in lines]
        name = [*runs][["#1f77b4", "#ff7f0e", "#2ca02c"].index(color)]
        count = len(runs[name])
        assert sorted(lengths) == sorted([count, 2, count, 3])
    for suffix in ("png", "pdf"):
        assert main(["compare", *folders, "--plot", str(tmp_path / f"plot.{suffix}")]) == 0
        assert (tmp_path / f"plot.{suffix}").stat().st_size > 1_000
    assert main(["compare", *folders, "--plot", str(tmp_path / "plot.xyz")]) == 2
    assert ".png" in capsys.readouterr().err
